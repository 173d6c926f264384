"""Which tests of clusters run over TLS."""

from __future__ import annotations

import pytest

from tests.encrypted import is_drawn, tenths

NAMES = [f"tests/cluster/test_{i % 7}.py::test_{i}" for i in range(1000)]


def drawn(monkeypatch: pytest.MonkeyPatch, asked: str) -> list[str]:
    monkeypatch.setenv("DASKINFER_TEST_TLS", asked)
    return [name for name in NAMES if is_drawn(name)]


def test_none_or_about_a_tenth_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, "") == []
    assert 70 < len(drawn(monkeypatch, "tenth")) < 130
    assert drawn(monkeypatch, "all") == NAMES
    monkeypatch.delenv("DASKINFER_TEST_TLS")
    assert tenths() == 0


def test_another_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="DASKINFER_TEST_TLS=half is neither"):
        drawn(monkeypatch, "half")
