"""The messages in docs/troubleshooting.md are those of the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from daskinfer import exceptions

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
TERMS = re.findall(r"^`(.+)`\n: ", TEXT, flags=re.MULTILINE)

#: Told by Python or torch.
OTHERS = {
    "ModuleNotFoundError",
    "Guard failed: x.size()[0] == 8",
    "Failed to load the backend extension: torch_npu",
}


@cache
def texts() -> str:
    """All texts in the code, one a line, with … for what is put into them."""
    found = []
    for package in ("daskinfer", "scheduler_plugins"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append("…".join(part for part in _parts(node)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%\.?\w+", "…", node.value))
    return "\n".join(" ".join(text.split()) for text in found)


def _parts(node: ast.JoinedStr) -> list[str]:
    """What stands between the values of an f-string."""
    parts = [""]
    for value in node.values:
        if isinstance(value, ast.Constant):
            parts[-1] += str(value.value)
        else:
            parts.append("")
    return parts


def test_there_are_messages():
    assert len(TERMS) > 50 and OTHERS <= set(TERMS)


@pytest.mark.parametrize("term", sorted(set(TERMS) - OTHERS))
def test_a_message_is_in_the_code(term):
    for part in term.split("…"):
        assert part.strip() in texts(), part


@pytest.mark.parametrize("name", re.findall(r"^: `([A-Z]\w+)`", TEXT, re.MULTILINE))
def test_an_error_is_one_of_ours(name):
    assert issubclass(getattr(exceptions, name), exceptions.InferenceError)
