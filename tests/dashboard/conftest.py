"""A browser for the tests of a module, and what it leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.dashboard.browser import Page, browser


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture
def collect() -> Iterator[None]:
    """Let what a test has left be found while its own warnings are expected."""
    yield
    gc.collect()
