"""Weights on their way: what is said of them, and when they are there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from daskinfer import protocol
from daskinfer.artifact.chunks import Chunks
from daskinfer.artifact.partial import MemoryPartial
from daskinfer.worker.download import Download

PATIENCE = 30
CHUNK = 64 * 1024
WEIGHTS = memoryview(bytes(range(256)) * 256 * 2)


def test_all_chunks_are_told_of_before_it_ends() -> None:
    """Also those that a thread has written while nobody looked."""

    async def test() -> None:
        chunks = Chunks.of(WEIGHTS, CHUNK)
        assert len(chunks) == 2
        gathered, gate = MemoryPartial(chunks), asyncio.Event()
        said: list[Any] = []

        async def fetch(source: str, key: str, start: int, nbytes: int) -> memoryview:
            return WEIGHTS[start : start + nbytes]

        async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
            written = function(*args)
            if args[0] == 0:
                # Its thread is through, and the event loop has not heard of it.
                assert await asyncio.wait_for(gate.wait(), PATIENCE)
            return written

        download = Download(gathered, fetch, said.append, in_thread, PATIENCE)
        running = asyncio.ensure_future(download.run())
        await asyncio.sleep(0)
        download.take(0, "tcp://a:1")
        download.take(1, "tcp://b:1")
        while len(said) < 2:
            await asyncio.sleep(0)
        assert gathered.whole == {0, 1}
        done, _ = await asyncio.wait({running}, timeout=0.05)
        assert not done
        gate.set()
        await asyncio.wait_for(running, PATIENCE)
        told = [(m["op"], m["chunk"], m["source"]) for m in said[1:]]
        assert told == [
            (protocol.GOT, 1, "tcp://b:1"),
            (protocol.GOT, 0, "tcp://a:1"),
        ]

    asyncio.run(test())
