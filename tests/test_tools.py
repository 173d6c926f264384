from __future__ import annotations

import pytest

from tests.tools import require_tool


def test_a_tool_that_is_there_is_given_with_its_path():
    assert require_tool("sh").endswith("/sh")


def test_a_missing_tool_skips_with_its_name(monkeypatch):
    monkeypatch.delenv("CI_REQUIRE_TOOLS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-tool is not installed"):
        require_tool("no-such-tool")


def test_a_missing_tool_fails_where_tools_are_required(monkeypatch):
    monkeypatch.setenv("CI_REQUIRE_TOOLS", "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-tool is not installed"):
        require_tool("no-such-tool")
