"""The two READMEs agree, as far as a program can tell, and their links lead on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGLISH = (ROOT / "README.md").read_text("utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text("utf-8")

BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    return BLOCK.sub("", text)


def headings(text: str) -> list[str]:
    return re.findall(r"^(#+) ", prose(text), flags=re.MULTILINE)


def table_rows(text: str) -> list[list[str]]:
    rows = [line for line in prose(text).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def test_each_leads_to_the_other():
    assert links(ENGLISH)[0] == "README.zh-CN.md"
    assert links(CHINESE)[0] == "README.md"


def test_the_code_is_the_same():
    blocks = BLOCK.findall(ENGLISH)
    assert len(blocks) > 8
    assert BLOCK.findall(CHINESE) == blocks


def test_there_are_as_many_headings():
    assert len(headings(ENGLISH)) > 8
    assert headings(CHINESE) == headings(ENGLISH)


def test_the_tables_have_the_same_code_and_figures():
    def told(cell: str) -> tuple[list[str], list[str]]:
        code = re.findall(r"`[^`]+`", cell)
        return sorted(code), re.findall(r"\d[\d,.]*\d|\d", re.sub(r"`[^`]+`", "", cell))

    english, chinese = table_rows(ENGLISH), table_rows(CHINESE)
    assert len(english) == len(chinese)
    for row, translated in zip(english, chinese, strict=True):
        # Numbers that are written as words are the translator's.
        assert told(row[0])[0] == told(translated[0])[0]
        assert [told(cell) for cell in row[1:]] == [
            told(cell) for cell in translated[1:]
        ]


def test_they_lead_to_the_same_places():
    assert sorted(links(CHINESE)[1:]) == sorted(links(ENGLISH)[1:])


def test_both_name_the_same_code():
    def names(text: str) -> set[str]:
        return set(re.findall(r"`[^`\n]+`", prose(text)))

    assert names(CHINESE) == names(ENGLISH)


@pytest.mark.parametrize(
    "file",
    ["README.md", "README.zh-CN.md", "SECURITY.md", "deploy/README.md"],
)
def test_links_lead_to_files(file):
    path = ROOT / file
    for link in links(path.read_text("utf-8")):
        target = link.partition("#")[0]
        if target and not link.startswith("http"):
            assert (path.parent / target).exists(), link
