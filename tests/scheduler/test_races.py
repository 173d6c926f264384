"""Whatever happens, in whatever order: every request ends once, and in its turn.

Each seed is a life of its own; ``-k "races[17]"`` is that of seed 17 again.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.scheduler import virtual
from tests.scheduler.bench import settle
from tests.scheduler.cluster import Cluster
from tests.scheduler.races import World
from tests.scheduler.tasks import ENDED

#: What may happen, and how often.
EVENTS = {
    World.submit: 35.0,
    World.answer: 20.0,
    World.refuse: 3.0,
    World.miss_inputs: 1.0,
    World.fetch: 3.0,
    World.fetched: 3.0,
    World.hold_or_begin: 2.0,
    World.break_device: 2.0,
    World.say_late: 2.0,
    World.cancel: 5.0,
    World.submit_again: 5.0,
    World.retry: 2.0,
    World.die: 4.0,
    World.retire: 1.0,
    World.rejoin: 6.0,
    World.pause_or_resume: 2.0,
    World.redeploy: 2.0,
    World.load_or_unload: 10.0,
    World.restart: 0.2,
}
#: In each life some of it is more frequent, and some never happens.
MOODS = [0.0, 1.0, 1.0, 4.0]
#: Seconds until the next event. Often nothing has been decided yet by then.
PAUSES = {None: 30, 0: 40, 0.01: 10, 0.1: 8, 0.4: 7, 2: 5}


# A life


@pytest.mark.parametrize("seed", range(400))
def test_races(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    try:
        virtual.run(live(seed))
    finally:
        check_nothing_was_raised(caplog)


async def live(seed: int) -> None:
    world = World(seed)
    cluster = world.cluster
    await storm(world)
    # One worker never says anything any more, if there are others.
    silent = world.addresses[0] if len(world.addresses) > 1 else None
    world.calm_down(without=silent)
    await asyncio.sleep(60)
    check_places(cluster)
    check_nobody_waits_in_vain(cluster)
    await finish(world, silent)
    check_all_have_ended(cluster)
    while cluster.fetching.get(silent):
        cluster.fetched(silent)
    while cluster.batches.get(silent):
        cluster.answer(silent)
    await settle()
    check_nothing_is_left(cluster)


async def storm(world: World) -> None:
    frequencies = moody(world.random)
    for _ in range(world.random.choice([10, 20, 40, 80])):
        pick(world.random, frequencies)(world)
        pause = pick(world.random, PAUSES)
        if pause is not None:
            await asyncio.sleep(pause)
            await settle()
            check_places(world.cluster)


async def finish(world: World, silent: str | None) -> None:
    """From now on nothing bad happens, but that a worker is silent."""
    cluster = world.cluster
    for stray in [stray for stray in cluster.strays if stray[0] != silent]:
        cluster.strays.remove(stray)
        cluster.say(*stray)
    for _ in range(400):
        for address in cluster.batches.keys() - {silent}:
            cluster.memory.work(address)
        busy = [a for a, batches in cluster.batches.items() if batches and a != silent]
        if busy:
            cluster.answer(world.random.choice(busy))
        elif all(task.state in ENDED for task in cluster.tasks.by_key.values()):
            return
        world.calm_down(without=silent)
        await asyncio.sleep(0.005 if busy else 0.05)
        await settle()
        check_places(cluster)


def moody(rng: random.Random) -> dict:
    always = World.submit, World.answer, World.load_or_unload
    return {e: n * (e in always or rng.choice(MOODS)) for e, n in EVENTS.items()}


def pick(rng: random.Random, frequencies: dict):
    return rng.choices(list(frequencies), list(frequencies.values()))[0]


# What must hold. Who gets whose answer, that nobody ends twice, and what workers are
# sent is checked where it happens (in tasks.py and cluster.py).


def check_places(cluster: Cluster) -> None:
    """Who has not ended is in one place, and counted there."""
    for key, request in cluster.requests.items():
        state = cluster.tasks.by_key[key].state
        places = [request.waiting, request.delayed, request.batch is not None]
        assert sum(places) == (state not in ENDED), (request, state)
        assert (request.batch is not None) == (state == "processing"), (request, state)
    for line in cluster.dispatcher.lines.values():
        waiting = line.queue.requests()
        assert line.queue.count == len(waiting)
        assert line.queue.rows == sum(request.rows for request in waiting)
        assert line.delayed == len(cluster.dispatcher.recovery.held(line))


def check_nobody_waits_in_vain(cluster: Cluster) -> None:
    """After a while nobody waits who may use a device that idles."""
    dispatcher, running = cluster.dispatcher, cluster.tasks.running()
    for line in dispatcher.lines.values():
        able = [d for d in line.devices.values() if d.name in running and not d.stuck]
        for lane in line.queue.oldest(100):
            # One that has failed it is no help while there is another.
            allowed = dispatcher.waiting._admission.devices(lane, able, able)
            idle = [d for d in allowed if d.idle and not d.isolated]
            assert not idle, f"{lane} waits while {idle} idle"


def check_all_have_ended(cluster: Cluster) -> None:
    """Nobody is left over while there are able workers."""
    left = [k for k, task in cluster.tasks.by_key.items() if task.state not in ENDED]
    assert not left, [cluster.requests[key] for key in left]


def check_nothing_is_left(cluster: Cluster) -> None:
    """All devices are free, and nothing is kept of anybody."""
    dispatcher = cluster.dispatcher
    assert not dispatcher.running.batches and not dispatcher.running.unwanted
    assert not len(dispatcher.recovery.delayed) and not len(dispatcher.deadlines)
    for line in dispatcher.lines.values():
        assert not line.in_flight and not line.delayed and not line.queue.count
        for device in line.devices.values():
            assert device.idle and not device.fetching and not device.stuck


def check_nothing_was_raised(caplog: pytest.LogCaptureFixture) -> None:
    """The engine and the event loop go on after exceptions, and log them."""
    for record in caplog.records:
        if record.exc_info:
            raise record.exc_info[1]
