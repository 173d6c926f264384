"""The dispatcher with a stand-in for Dask's side of the requests."""

from __future__ import annotations

import math
from typing import Any

import pytest

from daskinfer import protocol
from daskinfer.policy import BatchPolicy
from scheduler_plugins.constraint import Constraint
from scheduler_plugins.placement import Candidate, Placement
from tests.scheduler.bench import NOWHERE, A, B, Bench, settle
from tests.scheduler.virtual import on_loop


@on_loop
async def test_what_arrives_together_leaves_together():
    bench = Bench()
    line = bench.open(policy=BatchPolicy(max_batch_size=256))
    bench.enqueue(line, *range(140))
    assert bench.batches == []
    await settle()
    assert bench.batches == [(A, list(range(140)))]


@on_loop
async def test_no_batch_is_above_the_maximum_counted_in_rows():
    bench = Bench(warn_after=60)
    line = bench.open(policy=BatchPolicy(max_batch_size=8), seconds=1e-4)
    bench.enqueue(line, *range(10), rows=3)
    answered = 0
    while line.queue.count or line.in_flight:
        await settle()
        bench.answer(answered)
        answered += 1
    assert sorted(key for _, keys in bench.batches for key in keys) == list(range(10))
    assert all(3 * len(keys) <= 8 for _, keys in bench.batches)


@on_loop
async def test_requests_of_different_signatures_never_share_a_batch():
    bench = Bench()
    line = bench.open(workers=(A, B))
    bench.enqueue(line, "x1", "x2", signature="x")
    bench.enqueue(line, "y1", "y2", signature="y")
    await settle()
    bench.answer()
    await settle()
    assert sorted(keys for _, keys in bench.batches) == [["x1", "x2"], ["y1", "y2"]]


@on_loop
async def test_a_constraint_is_kept():
    bench = Bench()
    line = bench.open(workers=(A, B))
    bench.enqueue(line, 1, 2, constraint=Constraint(workers=frozenset({B})))
    await settle()
    assert bench.batches == [(B, [1, 2])]


@on_loop
async def test_a_preference_is_kept_only_where_it_can_be():
    bench = Bench()
    line = bench.open(workers=(A, B))
    wish = Constraint(workers=frozenset({B}), preferred_only=True)
    bench.enqueue(line, 1, constraint=wish)
    await settle()
    bench.tasks.workers = [A]
    bench.enqueue(line, 2, constraint=wish)
    await settle()
    assert bench.batches == [(B, [1]), (A, [2])]


@on_loop
async def test_requests_that_nobody_can_serve_do_not_hold_up_the_others():
    bench = Bench()
    line = bench.open()
    for i in range(100):
        # Each in a lane of its own: it may share a pass with nobody.
        bench.enqueue(line, i, signature=f"alone-{i}", constraint=NOWHERE)
    bench.enqueue(line, "servable", arrived=1.0)
    await settle()
    assert bench.batches == [(A, ["servable"])]


@on_loop
async def test_a_slow_worker_runs_what_is_too_large_to_travel_to_a_fast_one():
    bench = Bench()
    line = bench.open(workers=(B,), seconds=1.0)
    bench.dispatcher.device_ready("m", "1", A, "cpu", [(1, 5.0), (64, 5.0)])
    bench.tasks.bytes_away_from = {B: 10**10}
    bench.enqueue(line, 1, 2, has_dependencies=True)
    await settle()
    assert bench.batches == [(A, [1, 2])]


@on_loop
async def test_a_batch_goes_to_no_worker_that_is_paused():
    bench = Bench()
    line = bench.open(workers=(A, B))
    bench.tasks.workers = [B]
    bench.enqueue(line, *range(4))
    await settle()
    assert bench.batches == [(B, [0, 1, 2, 3])]


@on_loop
async def test_deployments_on_one_device_take_turns_by_device_time():
    bench = Bench()
    hot, other = bench.open("hot", seconds=1.0), bench.open("other", seconds=3.0)
    hot_keys = [f"hot-{i}" for i in range(64 * 12)]
    other_keys = [f"other-{i}" for i in range(64 * 4)]
    bench.enqueue(hot, *hot_keys, arrived=0.0)
    bench.enqueue(other, *other_keys, arrived=1.0)
    for _ in range(15):
        await settle()
        bench.answer()
    served = [keys[0].split("-")[0] for _, keys in bench.batches][:12]
    # One batch of three seconds for three of one second.
    assert served.count("other") == 3
    for start in range(0, 12, 4):
        assert served[start : start + 4].count("other") == 1


@on_loop
async def test_a_deployment_that_was_idle_has_no_claim_on_the_past():
    bench = Bench()
    hot, other = bench.open("hot", seconds=1.0), bench.open("other", seconds=1.0)
    bench.enqueue(hot, *range(64 * 20))
    for _ in range(10):
        await settle()
        bench.answer()
    bench.enqueue(other, *(f"other-{i}" for i in range(64 * 5)))
    before = len(bench.batches)
    for _ in range(7):
        await settle()
        bench.answer()
    latest = [isinstance(keys[0], str) for _, keys in bench.batches[before:]]
    assert 2 <= sum(latest[:6]) <= 4


@on_loop
async def test_starving_is_reported_once_until_something_changes():
    bench = Bench(warn_after=0.0)
    line = bench.open(workers=())
    bench.enqueue(line, 1)
    await settle()
    bench.enqueue(line, 2)
    await settle()
    assert bench.reported == [line]
    bench.dispatcher.device_ready("m", "1", A, "cpu", [(1, 1.0), (64, 1.0)])
    await settle()
    assert bench.batches == [(A, [1, 2])]
    bench.dispatcher.worker_lost(A)
    bench.enqueue(line, 3)
    await settle()
    assert bench.reported == [line, line]


@on_loop
async def test_starving_is_reported_again_when_there_is_more_to_say():
    bench = Bench(warn_after=0.0)
    line = bench.open(workers=())
    bench.enqueue(line, 1)
    await settle()
    # A worker has come that has no device for it, or could not load it.
    bench.dispatcher.workers_changed()
    await settle()
    assert bench.reported == [line, line]


@on_loop
async def test_a_short_wait_for_a_device_is_not_reported():
    bench = Bench(warn_after=3600.0)
    line = bench.open(workers=())
    bench.enqueue(line, 1)
    await settle()
    assert bench.reported == []
    assert math.isfinite(bench.dispatcher._timer.at)


@on_loop
async def test_a_request_whose_input_cannot_be_pickled_fails_alone():
    bench = Bench()
    bench.tasks.unpicklable = {2}
    line = bench.open()
    bench.enqueue(line, 1, 2, 3)
    await settle()
    assert bench.batches == [(A, [1, 3])]
    assert list(bench.tasks.failed) == [2]


@on_loop
async def test_a_batch_of_which_nothing_is_left_is_not_sent():
    bench = Bench()
    bench.tasks.unpicklable = {1, 2}
    bench.tasks.gone = {3}
    line = bench.open()
    bench.enqueue(line, 1, 2, 3)
    await settle()
    assert bench.sent == []
    assert bench.dispatcher.running.batches == {}
    assert line.in_flight == 0
    assert line.devices[A].idle


@on_loop
async def test_requests_that_are_gone_are_not_sent():
    bench = Bench()
    bench.tasks.gone = {2}
    line = bench.open()
    requests = bench.enqueue(line, 1, 2)
    await settle()
    assert bench.batches == [(A, [1])]
    assert [r.attempts for r in requests] == [1, 0]


@on_loop
async def test_what_nobody_wants_any_more_is_dropped_from_its_batch():
    bench = Bench()
    line = bench.open()
    first, *_ = bench.enqueue(line, 1, 2)
    await settle()
    bench.dispatcher.unassign(first)
    await settle()
    address, message = bench.sent[-1]
    assert (address, message["op"], message["keys"]) == (A, protocol.DROP, [1])
    bench.answer()
    await settle()
    assert bench.dispatcher.running.batches == {}


@on_loop
async def test_an_answer_of_a_batch_that_was_given_up_completes_nothing():
    bench = Bench()
    line = bench.open(workers=(A, B))
    bench.enqueue(line, 1)
    await settle()
    ((address, _),) = bench.batches
    bench.dispatcher.worker_lost(address)
    bench.answer()
    assert [run_ids for _, run_ids in bench.tasks.completed] == [{}]
    assert line.in_flight == 0
    assert list(line.devices) == [{A: B, B: A}[address]]


@on_loop
async def test_an_answer_completes_the_attempts_that_were_sent():
    bench = Bench()
    line = bench.open()
    bench.enqueue(line, 1, 2)
    await settle()
    bench.answer()
    assert [run_ids for _, run_ids in bench.tasks.completed] == [{1: 1, 2: 1}]
    counts = bench.dispatcher.statistics["m"]
    assert (counts.batches, counts.rows) == (1, 2)
    assert line.devices[A].idle


@on_loop
async def test_inputs_that_stay_missing_fail_the_request_in_the_end():
    bench = Bench()
    line = bench.open()
    (request,) = bench.enqueue(line, 1)
    attempts = 0
    while request.error is None:
        await settle()
        bench.answer(keys=[], missing=[1], passes=[])
        attempts += 1
        assert bench.tasks.released == [1] * attempts
        if request.error is None:
            bench.dispatcher.waiting.enqueue(request, line)
    assert attempts == request.attempts == 5
    assert "inputs of 1 could not be fetched" in str(request.error)


@on_loop
async def test_closing_returns_who_waited():
    bench = Bench()
    line = bench.open(workers=())
    waiting = bench.enqueue(line, 1, 2)
    assert bench.dispatcher.close("m", "1") == waiting
    assert not any(request.waiting for request in waiting)
    bench.dispatcher.forget("m")
    assert (bench.dispatcher.lines, bench.dispatcher.statistics) == ({}, {})


@on_loop
async def test_clearing_forgets_requests_and_keeps_deployments():
    bench = Bench()
    line = bench.open(policy=BatchPolicy(max_batch_size=2))
    bench.enqueue(line, *range(6))
    await settle()
    bench.dispatcher.clear()
    await settle()
    assert len(line.queue) == 0
    assert bench.dispatcher.running.batches == {}
    assert line.devices[A].idle
    bench.enqueue(line, "new")
    await settle()
    assert bench.batches[-1] == (A, ["new"])


@on_loop
async def test_a_large_request_measures_sizes_on_its_first_passes():
    bench = Bench()
    line = bench.open(
        policy=BatchPolicy(max_batch_size=16), timings=[(1, 0.01), (16, 0.02)]
    )
    bench.enqueue(line, "large", rows=1000)
    await settle()
    ((_, message),) = bench.sent
    assert message["pass_sizes"] == [2, 2, 4, 4, 8, 8]
    assert message["pass_rows"] == 16


@on_loop
async def test_a_request_that_is_hardly_too_large_pays_for_no_trials():
    bench = Bench()
    line = bench.open(
        policy=BatchPolicy(max_batch_size=16), timings=[(1, 0.01), (16, 0.02)]
    )
    bench.enqueue(line, "large", rows=17)
    await settle()
    assert bench.sent[0][1]["pass_sizes"] == []


@on_loop
async def test_passes_of_static_sizes_are_cut_to_them():
    bench = Bench()
    line = bench.open(
        policy=BatchPolicy(allowed_batch_sizes=[1, 4, 16]),
        timings=[(1, 0.01), (4, 0.02), (16, 0.05)],
    )
    bench.enqueue(line, "large", rows=100)
    await settle()
    assert bench.sent[0][1]["pass_sizes"] == []
    assert bench.sent[0][1]["pass_rows"] == 16


@on_loop
async def test_waiting_work_is_told_in_seconds_of_device_time():
    bench = Bench()
    line = bench.open(seconds=2.0)
    assert bench.dispatcher.lines.waiting_seconds() == 0
    # What was learned holds while there is no worker, too.
    bench.dispatcher.worker_lost(A)
    bench.enqueue(line, *range(640))
    assert bench.dispatcher.lines.waiting_seconds() == pytest.approx(20.0)


@on_loop
async def test_round_robin_takes_one_worker_after_the_other():
    bench = Bench()
    line = bench.open(
        workers=(A, B), placement="round-robin", policy=BatchPolicy(max_batch_size=2)
    )
    for i in range(6):
        bench.enqueue(line, i)
        await settle()
        bench.answer()
    assert [address for address, _ in bench.batches] == [A, B] * 3


class Broken(Placement):
    def choose(self, candidates: Any, now: float) -> Candidate:
        raise ZeroDivisionError


@on_loop
async def test_a_placement_that_fails_fails_its_requests_and_no_others():
    bench = Bench()
    broken = bench.open("broken", placement=f"{__name__}.Broken")
    sound = bench.open("sound")
    bench.enqueue(broken, 1, 2)
    bench.enqueue(sound, 3)
    await settle()
    assert bench.batches == [(A, [3])]
    assert {key: type(e) for key, e in bench.tasks.failed.items()} == {
        1: ZeroDivisionError,
        2: ZeroDivisionError,
    }
    assert len(broken.queue) == 0


@on_loop
async def test_representations_tell_what_is_there():
    bench = Bench()
    line = bench.open(workers=())
    bench.enqueue(line, 1)
    assert repr(bench.dispatcher) == "<Dispatcher lines: 1 waiting: 1 batches: 0>"
    assert repr(line) == "<Line 'm' '1' waiting: 1 in flight: 0 devices: 0>"
