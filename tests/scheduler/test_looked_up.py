"""Batches that are sent to be found in a worker's cache."""

from __future__ import annotations

import asyncio
from typing import Any

from daskinfer.cache import CacheKey
from daskinfer.caching import CachePolicy
from daskinfer.policy import BatchPolicy
from daskinfer.worker.result_cache import ids
from scheduler_plugins.breaker import BreakerState
from scheduler_plugins.line import Line
from tests.scheduler.bench import A, B, Bench, come, settle
from tests.scheduler.test_supervision import SOON, limited, nothing_is_left, other
from tests.scheduler.virtual import on_loop

X = ids([CacheKey.of("m", "digest", b"x")])


def held(bench: Bench, address: str, **about: Any) -> Line:
    """A version whose batches take a millisecond, with one result in a cache."""
    line = limited(bench, cache=CachePolicy(), **about)
    bench.dispatcher.cached("m", address, X, b"")
    return line


async def look_up(bench: Bench, line: Line, *keys: Any) -> None:
    bench.enqueue(line, *keys, content=b"x")
    await settle()
    address, message = bench.runs[-1]
    assert (address, message["keys"], message["held"]) == (A, list(keys), True)


@on_loop
async def test_it_is_beside_what_the_device_does():
    bench = Bench()
    line = held(bench, A)
    await look_up(bench, line, "k")
    device = line.devices[A]
    assert device.idle and device.lookups == 1 and not line.served
    (batch,) = bench.dispatcher.running.batches.values()
    assert not batch.is_running
    bench.answer(passes=[], cached=[0], ran=0.0)
    assert not device.lookups and not device.looked_up
    nothing_is_left(bench)


@on_loop
async def test_no_batch_timeout_counts_for_it():
    """A quarter of a second, five times what a batch may take on the device."""
    bench = Bench().follow()
    line = held(bench, A)
    await look_up(bench, line, "k")
    await asyncio.sleep(0.25)
    assert line.health.is_perfect and len(bench.batches) == 1
    bench.answer(passes=[], cached=[0], ran=0.0)
    nothing_is_left(bench)


@on_loop
async def test_one_that_does_not_come_back_is_run_elsewhere():
    bench = Bench(suspicion=SOON).follow()
    line = held(bench, A)
    await look_up(bench, line, "k")
    await come(lambda: len(bench.batches) == 2)
    assert bench.batches[1] == (B, ["k"])
    (request, _) = bench.requests["k"]
    assert (request.charges, request.hedged) == (0, False)
    bench.answer(1)
    bench.answer(0, keys=[], passes=[])
    nothing_is_left(bench)


@on_loop
async def test_what_is_not_found_takes_its_turn_on_the_device():
    bench = Bench(suspicion=SOON).follow()
    line = held(bench, A)
    await look_up(bench, line, "k")
    bench.not_found(0, X)
    device = line.devices[A]
    (batch,) = bench.dispatcher.running.batches.values()
    assert batch.is_running and not device.lookups and line.served > 0
    assert not bench.dispatcher.affinity.residency.holders("m", X)
    # From now on its time is limited, and it is to blame.
    await come(lambda: not line.health.is_perfect)
    state, _ = line.health.state(A, asyncio.get_running_loop().time())
    assert state is BreakerState.OPEN
    await come(lambda: len(bench.batches) == 2)
    assert bench.batches[1] == (other(A), ["k"])
    bench.answer(1)
    bench.answer(0)
    nothing_is_left(bench)


@on_loop
async def test_what_is_not_found_waits_behind_what_the_device_has():
    bench = Bench().follow()
    line = held(bench, A, policy=BatchPolicy(max_batch_size=1))
    line.batch_timeout = 0.3
    bench.enqueue(line, "first", "second")
    await settle()
    at_a = [i for i, (address, _) in enumerate(bench.batches) if address == A]
    await look_up(bench, line, "k")
    bench.not_found(len(bench.runs) - 1)
    await asyncio.sleep(0.2)
    for index in range(len(bench.runs) - 1):
        bench.answer(index)
    await asyncio.sleep(0.2)
    bench.dispatcher.wake()
    await settle()
    assert at_a and line.health.is_perfect
    bench.answer(-1)
    nothing_is_left(bench)


@on_loop
async def test_nobody_who_is_looked_up_is_charged_for_a_death():
    bench = Bench()
    line = held(bench, A)
    bench.dispatcher.lines["m", "1"].devices.pop(B)
    await look_up(bench, line, "k")
    (request, _) = bench.requests["k"]
    bench.lose(A)
    assert request.charges == 0 and request.waiting
    assert not bench.dispatcher.affinity.residency.holders("m", X)


@on_loop
async def test_who_is_computed_after_all_is_charged_for_a_death():
    bench = Bench()
    line = held(bench, A)
    await look_up(bench, line, "k")
    bench.not_found(0, X)
    (request, _) = bench.requests["k"]
    bench.lose(A)
    assert request.charges == 1


@on_loop
async def test_words_about_look_ups_that_are_gone_or_of_others_are_ignored():
    bench = Bench()
    line = held(bench, A)
    await look_up(bench, line, "k")
    (batch,) = bench.dispatcher.running.batches.values()
    bench.dispatcher.not_found(batch.batch_id, B, X)
    assert line.devices[A].lookups == 1
    bench.answer(passes=[], cached=[0], ran=0.0)
    bench.not_found(0, X)
    assert line.devices[A].idle
    nothing_is_left(bench)


@on_loop
async def test_only_what_was_computed_speaks_for_a_device():
    bench = Bench()
    line = held(bench, A)
    failure = {"exception_text": "ArithmeticError()"}
    for found in (True, False):
        bench.enqueue(line, "good", "bad", content=None if found else b"y")
        await settle()
        address, message = bench.runs[-1]
        keys = list(message["keys"])
        bench.answer(
            keys=["good"],
            failed={"bad": failure},
            cached=[0] if found else [],
        )
        assert keys == ["good", "bad"]
        # All that it computed has failed, whatever it had found.
        assert line.health.is_perfect is not found
        line.health.forget(address)


@on_loop
async def test_what_was_found_tells_nothing_of_how_fast_a_version_is():
    bench = Bench()
    line = held(bench, A)
    bench.enqueue(line, "k", "l", content=b"y")
    await settle()
    bench.answer(cached=[1])
    assert [bench.requests[key][0].was_cached for key in "kl"] == [False, True]


@on_loop
async def test_nothing_is_said_of_caches_where_there_are_none():
    bench = Bench()
    line = limited(bench)
    bench.enqueue(line, "k", content=None)
    await settle()
    ((_, message),) = bench.runs
    assert (message["contents"], message["held"]) == ([], False)
    assert not len(bench.dispatcher.affinity.residency)
    assert not bench.dispatcher.affinity._awaiting
