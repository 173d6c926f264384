"""What deployments, versions and files may be called."""

from __future__ import annotations

from pathlib import Path

import pytest

from daskinfer.entries import plan_of_entry
from daskinfer.names import LONGEST, check_name, check_path, shown
from daskinfer.planning import plan_of

FINE = [
    "resnet50",
    "bert-base_v2.1@prod",
    "<b onclick=alert(1)>",
    "\"quoted\" & 'quoted' {x=1} % $(rm) `ls`",
    "图像识别",
    "مرحبا",  # runs from right to left by itself
    "rocket 🚀",
    "x" * LONGEST,
    "...",
]

REFUSED = [
    ("", "text that is not empty"),
    (3, "text that is not empty"),
    (None, "text that is not empty"),
    ("a\nb", "must not contain U\\+000A"),
    ("a\x00b", "must not contain U\\+0000"),
    ("a\x1b[2Jb", "must not contain U\\+001B"),
    ("a\x7fb", "must not contain U\\+007F"),
    ("a\u202egpj.exe", "must not contain U\\+202E"),  # turns the order around
    ("a\u200fb", "must not contain U\\+200F"),
    ("a\u200bb", "must not contain U\\+200B"),  # nobody sees it
    ("a\u2028b", "must not contain U\\+2028"),
    ("a\u00a0b", "must not contain U\\+00A0"),
    ("a\ud800b", "no valid text"),
    ("../../etc/passwd", "must not contain '/'"),
    ("..\\up", "must not contain"),
    ("..", "stands for a folder"),
    (".", "stands for a folder"),
    (" a", "begin or end with a space"),
    ("a ", "begin or end with a space"),
    ("x" * (LONGEST + 1), "at most 128 characters, got 129"),
]


@pytest.mark.parametrize("name", FINE, ids=ascii)
def test_names_that_are_fine(name: str) -> None:
    assert check_name("name", name) == name
    assert shown(name) == name
    plan = plan_of(abs, name=name, version=name)
    assert (plan.name, plan.version) == (name, name)


@pytest.mark.parametrize("name, told", REFUSED, ids=ascii)
def test_names_that_are_refused_wherever_they_are_given(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"^field .*{told}") as caught:
        check_name("field", name)
    # The message itself is safe to be shown, and short.
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300
    if name is not None:
        with pytest.raises(ValueError, match=f"^name .*{told}"):
            plan_of(abs, name=name)
    with pytest.raises(ValueError, match=f"^version .*{told}"):
        plan_of(abs, version=name)
    with pytest.raises((TypeError, ValueError), match=r"^its name (must|is)"):
        plan_of_entry(name, {"factory": "torch.nn:Identity"})


@pytest.mark.parametrize("name", [name for name, _ in REFUSED], ids=ascii)
def test_whatever_is_shown_is_harmless_and_short(name: object) -> None:
    told = shown(name)
    assert told.isprintable() and told.isascii() and 0 < len(told) <= LONGEST


def test_a_models_own_name_is_checked_too(tmp_path: Path) -> None:
    class Odd:
        __name__ = "x" * 300

        def __call__(self, x: object) -> object:
            return x

    with pytest.raises(ValueError, match="own name, without name=, must have at most"):
        plan_of(Odd())
    assert plan_of(Odd(), name="odd").name == "odd"


@pytest.mark.parametrize("path", ["net\x00.pt2", "net\n.pt2", "a\x1b]0;b\x07/net.pt"])
def test_paths_with_control_characters_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="path must not contain U") as caught:
        plan_of(path=path)
    assert str(caught.value).isprintable()


def test_paths_may_be_any_other() -> None:
    assert check_path("path", Path("a b") / "识别.pt2") == str(Path("a b") / "识别.pt2")
    with pytest.raises(TypeError, match=r"path must be a text or a pathlib\.Path"):
        check_path("path", b"net.pt2")  # type: ignore[arg-type]
