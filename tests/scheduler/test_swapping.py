"""Who waits for a cold version, and for how long."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from daskinfer.policy import BatchPolicy
from scheduler_plugins import swapping
from scheduler_plugins.constraint import ANYWHERE, Constraint
from scheduler_plugins.request import Request
from scheduler_plugins.room import Place
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


async def ask(cluster: Cluster, seconds: float, names: str, *workers: str) -> None:
    """Have so many requests wait, for a while, that nobody runs out of them."""
    for _ in range(round(seconds / 0.05)):
        for name in names:
            while cluster.dispatcher.lines[name, "1"].queue.count < 10:
                submit(cluster, name)
        await asyncio.sleep(0.05)
        await work(cluster, answering=workers)


@on_loop
async def test_small_ones_do_not_keep_a_large_one_out() -> None:
    cluster = cluster_of("abcdX", 2, A)
    for name in "abcd":
        cluster.deploy(name)
        await work(cluster)
    await asyncio.sleep(1)
    # One comes after the other.
    await ask(cluster, 0.25, "a", A)
    await ask(cluster, 0.25, "ab", A)
    cluster.deploy("X")
    cluster.registry.version("X").nbytes = 2
    large = submit(cluster, "X")
    # Five turns.
    await ask(cluster, 2.5, "abcd", A)
    assert has_ended(cluster, large)


@on_loop
async def test_a_large_one_takes_turns_with_small_ones_on_several_workers() -> None:
    small = "abcdefgh"
    cluster = cluster_of(f"{small}X", 2, A, B)
    for name in small:
        cluster.deploy(name)
        await work(cluster)
    await asyncio.sleep(1)
    for number in range(len(small)):
        await ask(cluster, 0.1, small[: number + 1], A, B)
    cluster.deploy("X")
    cluster.registry.version("X").nbytes = 2
    loads = []
    load = cluster.memory.load
    cluster.memory.load = lambda v, r: loads.append(v.name) or load(v, r)
    for _ in range(3):
        large = submit(cluster, "X")
        await ask(cluster, 2.5, small, A, B)
        assert has_ended(cluster, large)
    # Nor does it keep them out.
    assert set(loads) == {*small, "X"}
    before = {n: cluster.dispatcher.lines[n, "1"].served for n in small}
    await ask(cluster, 4, small, A, B)
    for name in small:
        assert cluster.dispatcher.lines[name, "1"].served > before[name], name


@on_loop
async def test_what_a_large_one_waited_for_is_free_when_it_gives_up() -> None:
    cluster = cluster_of("abX", 2, A)
    for name in "ab":
        cluster.deploy(name)
        await work(cluster)
    cluster.deploy("X")
    cluster.registry.version("X").nbytes = 2
    submit(cluster, "X")
    await ask(cluster, 0.1, "ab")
    cluster.undeploy("X")
    await work(cluster)
    assert set(cluster.memory.loaded[A]) == {"a", "b"}
    cluster.kinds["c"], cluster.limits["c"] = "cpu", None
    cluster.policies["c"] = BatchPolicy(max_batch_size=1)
    cluster.deploy("c")
    # As soon as one has had its turn.
    await ask(cluster, 0.6, "abc", A)
    assert "c" in cluster.memory.loaded[A]


@on_loop
async def test_few_look_for_room_at_a_time_however_many_wait() -> None:
    names = [f"m{number}" for number in range(60)]
    cluster = Cluster(
        dict.fromkeys(names, "cpu"),
        dict.fromkeys(names, BatchPolicy(max_batch_size=1)),
        dict.fromkeys(names, None),
        room=1,
    )
    for address in (A, B):
        cluster.join(address)
    for name in names:
        cluster.deploy(name)
    await work(cluster)
    looks: list[int] = []
    check, find = cluster.memory.swapping.check, swapping.find_place

    def checked(busy: Any, now: float) -> float:
        looks.append(0)
        return check(busy, now)

    def found(*args: Any, **kwargs: Any) -> Any:
        place = find(*args, **kwargs)
        looks[-1] += not isinstance(place, Place)
        return place

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.memory.swapping, "check", checked)
        patch.setattr(swapping, "find_place", found)
        waiting = [submit(cluster, name) for name in names]
        # Each gets its turn, two at a time.
        for _ in range(600):
            await asyncio.sleep(0.05)
            await work(cluster, answering=(A, B))
    assert all(has_ended(cluster, key) for key in waiting)
    # Those that have requests, and those that were never loaded.
    assert max(looks) == 2 * swapping._LOOKS
