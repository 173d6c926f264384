"""Answers that come piece by piece, in a cluster."""

from __future__ import annotations

from typing import Any

from distributed.utils_test import gen_cluster

from tests.cluster.scheduling_helpers import deploy, nothing_is_left

ONE_WORKER = [("127.0.0.1", 1)]


def count(n: int):
    yield from range(n)


async def read(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_generator_is_read_chunk_by_chunk(c, s, a):
    model = await deploy(c, count)
    assert await read(model.stream(5)) == [0, 1, 2, 3, 4]
    await nothing_is_left(s, a)
