"""Who waits for a cold version, and for how long."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from daskinfer.policy import BatchPolicy
from scheduler_plugins.constraint import ANYWHERE, Constraint
from scheduler_plugins.request import Request
from tests.scheduler.bench import settle
from tests.scheduler.cluster import Cluster
from tests.scheduler.tasks import ENDED
from tests.scheduler.virtual import on_loop

A, B = "tcp://a:1", "tcp://b:1"
keys = itertools.count()


def cluster_of(names: str, room: int, *addresses: str) -> Cluster:
    cluster = Cluster(
        dict.fromkeys(names, "cpu"),
        dict.fromkeys(names, BatchPolicy(max_batch_size=1)),
        dict.fromkeys(names, None),
        room=room,
    )
    for address in addresses:
        cluster.join(address)
    return cluster


def submit(cluster: Cluster, name: str, worker: str | None = None) -> int:
    constraint = Constraint(workers=frozenset({worker})) if worker else ANYWHERE
    now, key = asyncio.get_running_loop().time(), next(keys)
    cluster.submit(Request(key, name, None, now, signature="s", constraint=constraint))
    return key


async def work(cluster: Cluster, *, answering: tuple[str, ...] = ()) -> None:
    for _ in range(4):
        for address in list(cluster.batches):
            while cluster.memory.work(address):
                pass
            if address in answering and cluster.batches[address]:
                cluster.answer(address)
        await settle()


def has_ended(cluster: Cluster, key: int) -> bool:
    return cluster.tasks.by_key[key].state in ENDED


@on_loop
async def test_nobody_waits_behind_who_insists_on_another_worker() -> None:
    cluster = cluster_of("xyz", 1, A, B)
    cluster.memory.swapping._turn = 1000.0
    for name in "xy":
        cluster.deploy(name)
        await work(cluster)
    # Soon `y` is on one, `z` on the other, and `x` on none.
    submit(cluster, "y", A)
    await work(cluster)
    cluster.deploy("z")
    await work(cluster)
    await asyncio.sleep(0.15)
    submit(cluster, "y", A)
    submit(cluster, "z", B)
    await work(cluster, answering=(B,))
    assert cluster.memory.loaded == {A: ["y"], B: ["z"]}
    await asyncio.sleep(0.15)
    first = submit(cluster, "x", A)
    await work(cluster)
    second = submit(cluster, "x", B)
    for _ in range(15):
        await asyncio.sleep(0.03)
        await work(cluster, answering=(B,))
    assert not has_ended(cluster, first)
    assert has_ended(cluster, second)


@pytest.mark.xfail(reason="the room of one that leaves goes to who fits", strict=True)
def test_small_ones_do_not_keep_a_large_one_out() -> None:
    @on_loop
    async def test() -> None:
        cluster = cluster_of("abcdX", 2, A)

        async def ask(seconds: float, names: str) -> None:
            for _ in range(round(seconds / 0.05)):
                for name in names:
                    while cluster.dispatcher.lines[name, "1"].queue.count < 10:
                        submit(cluster, name)
                await asyncio.sleep(0.05)
                await work(cluster, answering=(A,))

        for name in "abcd":
            cluster.deploy(name)
            await work(cluster)
        await asyncio.sleep(1)
        # One comes after the other.
        await ask(0.25, "a")
        await ask(0.25, "ab")
        cluster.deploy("X")
        cluster.registry.version("X").nbytes = 2
        large = submit(cluster, "X")
        # Five turns.
        await ask(2.5, "abcd")
        assert has_ended(cluster, large)

    test()
