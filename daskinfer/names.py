"""What deployments and versions may be called, and where model files may lie.

Such texts become labels of figures, cells of pages, lines of logs and parts of task
keys. All of these quote what they are given; here, what would be misread even so is
refused before it gets anywhere.
"""

from __future__ import annotations

import os
import unicodedata

from daskinfer.options import check_sendable

#: Characters of a name at most: each of its figures carries it as a label.
LONGEST = 128

#: Controls, marks that change how text around them is shown, halves of characters, what
#: has no meaning, and ends of lines.
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))
#: What is part of a path.
_SEPARATORS = "/\\"


def check_name(field: str, value: object) -> str:
    r"""Return a name if a deployment or a version may have it.

    Letters of any language, digits, signs and spaces are allowed, 128 of them at most.
    Control characters are not, nor marks that nobody sees, slashes and backslashes,
    spaces at its ends, ``"."`` and ``".."``.

    Parameters
    ----------
    field
        What the name was given as, for the message.
    value
        What was given.

    Raises
    ------
    ValueError
        If it may not be called so; the message says why.

    Examples
    --------
    >>> check_name("name", "识别 <v2>")
    '识别 <v2>'
    >>> check_name("version", "../1")
    Traceback (most recent call last):
        ...
    ValueError: version must not contain '/', got '../1'
    """
    if not (isinstance(value, str) and value):
        raise ValueError(f"{field} must be a text that is not empty, not {value!r}")
    check_sendable(value, field)
    if len(value) > LONGEST:
        told = f"{value[:20]!r}…"
        raise ValueError(
            f"{field} must have at most {LONGEST} characters, got {len(value)}: {told}"
        )
    for character in value:
        if character in _SEPARATORS or _is_unseen(character):
            told = f"{field} must not contain {_shown(character)}"
            raise ValueError(f"{told}, got {value!a}")
    if value != value.strip():
        raise ValueError(f"{field} must not begin or end with a space, got {value!r}")
    if value in (".", ".."):
        raise ValueError(f"{field} must not be {value!r}, which stands for a folder")
    return value


def shown(value: object) -> str:
    r"""Put what somebody takes for a name so that it can be shown wherever names are.

    >>> shown("resnet50"), shown("a\nb"), shown(3), len(shown("x" * 1000))
    ('resnet50', "'a\\nb'", '3', 128)
    """
    try:
        return check_name("name", value)
    except ValueError:
        return ascii(value)[:LONGEST]


def check_path(field: str, value: str | os.PathLike[str]) -> str:
    r"""Return a path as text if a file may have it.

    Raises
    ------
    TypeError, ValueError
        If it is no path, or contains control characters.

    Examples
    --------
    >>> check_path("path", "nets/resnet.pt2")
    'nets/resnet.pt2'
    >>> check_path("path", "net\x00.pt2")
    Traceback (most recent call last):
        ...
    ValueError: path must not contain U+0000, got 'net\x00.pt2'
    """
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError(f"{field} must be a text or a pathlib.Path, not {value!r}")
    for character in path:
        if unicodedata.category(character) in ("Cc", "Zl", "Zp"):
            told = f"{field} must not contain {_shown(character)}"
            raise ValueError(f"{told}, got {path!a}")
    return path


def _is_unseen(character: str) -> bool:
    is_odd_space = character.isspace() and character != " "
    return is_odd_space or unicodedata.category(character) in _UNSEEN


def _shown(character: str) -> str:
    return repr(character) if character in _SEPARATORS else f"U+{ord(character):04X}"
