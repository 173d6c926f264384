"""Tools outside Python that some tests need: a compiler, an SSH server, a browser."""

from __future__ import annotations

import os
import shutil

import pytest


def require_tool(name: str) -> str:
    """Give the path of a program, or end the test that asks for it.

    The test is skipped, with the program's name as the reason.  Where
    ``CI_REQUIRE_TOOLS=1`` is set the program was meant to be there, and the test fails.
    """
    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not installed"
        if os.environ.get("CI_REQUIRE_TOOLS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return path
