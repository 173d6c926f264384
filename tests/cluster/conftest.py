"""Over TLS, if the environment asks for that: only what is drawn, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.core import Server

from tests import encrypted

HERE = Path(__file__).parent


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if not encrypted.tenths():
        return
    others = [
        item
        for item in items
        if item.path.is_relative_to(HERE) and not encrypted.is_drawn(item.nodeid)
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="session")
def all_addresses_are_encrypted() -> Iterator[None]:
    """See that this does test TLS: processes of their own are told to require it."""
    if not encrypted.tenths():
        yield
        return
    listen = Server.listen

    @functools.wraps(listen)
    async def checked(self: Server, *args: Any, **kwargs: Any) -> None:
        await listen(self, *args, **kwargs)
        found = [listener.contact_address for listener in self.listeners]
        assert found and all(a.startswith("tls://") for a in found), found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "listen", checked)
        yield
