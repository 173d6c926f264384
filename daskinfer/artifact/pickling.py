"""Who is to blame when a model cannot be pickled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from daskinfer.artifact.skeleton import take_apart, try_pickle


def take_apart_or_explain(obj: Any, label: str) -> tuple[bytes, memoryview | None]:
    """Divide an object into skeleton and weights, or say which part resists.

    Parameters
    ----------
    obj
        A model, or a factory's name and arguments.
    label
        What it is called in messages.

    Raises
    ------
    TypeError
        If it cannot be pickled; the message names the attribute.
    """
    try:
        return take_apart(obj)
    except Exception as error:
        path, culprit = _culprit(obj)
        what = f"its part {path} (a {type(culprit).__name__})" if path else "it"
        raise TypeError(
            f"cannot deploy {label}: {what} cannot be pickled: {error}. Leave it out "
            "with __getstate__, or deploy(factory='package.module:function'), which "
            "builds the model on each worker"
        ) from error


def _culprit(obj: Any, depth: int = 8) -> tuple[str, Any]:
    """Find the innermost part that cannot be pickled, and how to reach it."""
    for name, part in _parts(obj) if depth else ():
        try:
            try_pickle(part)
        except Exception:
            deeper, culprit = _culprit(part, depth - 1)
            return name + deeper, culprit
    return "", obj


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        yield from ((f"[{key!r}]", part) for key, part in obj.items())
    elif isinstance(obj, (list, tuple)):
        yield from ((f"[{i}]", part) for i, part in enumerate(obj))
    elif not isinstance(obj, type):
        state = dict(getattr(obj, "__dict__", {}))
        # The children of a module are reached like attributes.
        for registry in ("_modules", "_parameters", "_buffers"):
            children = state.pop(registry, None)
            state.update(children if isinstance(children, dict) else {})
        yield from ((f".{name}", part) for name, part in state.items())
