"""Tables on a terminal and elsewhere, with rich and without."""

from __future__ import annotations

import sys

import pytest

from daskinfer.cli.output import print_json, print_table

TITLES = ("name", "rows", "ms")
ROWS = [["[bold]a", 1200, 1.26], ["b", 3, None]]
PLAIN = "name      rows   ms\n[bold]a  1,200  1.3\nb            3    -\n"


def test_plain_text(capsys):
    print_table(TITLES, ROWS)
    assert capsys.readouterr().out == PLAIN


def test_rich_on_a_terminal(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_table(TITLES, ROWS)
    printed = capsys.readouterr().out
    assert "[bold]a" in printed and "1,200" in printed and printed != PLAIN


def test_a_terminal_without_rich(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    print_table(TITLES, ROWS)
    assert capsys.readouterr().out == PLAIN


def test_json(capsys):
    print_json({"name": "ü", "rows": [1, None]})
    assert capsys.readouterr().out == '{"name": "ü", "rows": [1, null]}\n'
