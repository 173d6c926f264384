"""Requests in a scheduler's state, without any worker."""

from __future__ import annotations

import pytest
from distributed.utils_test import gen_cluster, inc

from daskinfer import Model
from daskinfer.exceptions import NotServable
from scheduler_plugins.constraint import Constraint
from scheduler_plugins.taskstate import PARKED_AT, FastTask, NewTask, TaskStates
from tests.cluster.helpers import until

ELSEWHERE = "tcp://127.0.0.1:9"


def new(key, *dependencies, priority=0.0, retries=0):
    return NewTask(key, Model("m"), b"input", list(dependencies), priority, retries)


async def graph_task(client, scheduler, **options):
    """A task that Dask has taken in and cannot run."""
    future = client.submit(inc, 1, key="task", **options)
    await until(lambda: "task" in scheduler.tasks)
    return future


@gen_cluster(client=True, nthreads=[])
async def test_a_new_request_parks(c, s):
    tasks = TaskStates(s)
    assert tasks.create(c.id, [new("k", priority=3, retries=2)], "test") == (
        ["k"],
        ["k"],
    )
    tasks.start(["k"], "test")
    ts = s.tasks["k"]
    assert (ts.state, ts.retries, ts.priority[0]) == ("no-worker", 2, -3)
    assert ts.worker_restrictions == {PARKED_AT}
    assert tasks.model_of("k") == Model("m")
    assert tasks.priority("k") == 3
    assert tasks.payload("k", repr) == b"input"
    assert not tasks.has_dependencies("k")
    assert ts.group.span_id is not None
    s.client_releases_keys(["k"], c.id)
    assert not s.tasks


@gen_cluster(client=True, nthreads=[])
async def test_requests_of_one_message_keep_their_order(c, s):
    tasks = TaskStates(s)
    keys = [f"k-{i}" for i in range(10)]
    tasks.create(c.id, [new(key) for key in keys], "test")
    tasks.start(keys, "test")
    assert [ts.key for ts in s.unrunnable] == keys
    priorities = [s.tasks[key].priority for key in keys]
    assert priorities == sorted(priorities)


@gen_cluster(client=True, nthreads=[])
async def test_a_request_waits_for_its_inputs(c, s):
    future = await graph_task(c, s)
    tasks = TaskStates(s)
    tasks.create(c.id, [new("k", future.key)], "test")
    tasks.start(["k"], "test")
    assert s.tasks["k"].state == "waiting"
    assert tasks.has_dependencies("k")
    assert tasks.who_has(["k"]) == {"task": []}


@gen_cluster(client=True, nthreads=[])
async def test_a_request_whose_input_is_gone_is_left_out(c, s):
    tasks = TaskStates(s)
    created, wanted = tasks.create(c.id, [new("lost", "gone"), new("k")], "test")
    assert created == wanted == ["k"]
    assert "lost" not in s.tasks


@gen_cluster(client=True, nthreads=[])
async def test_a_key_that_exists_is_only_wanted_once_more(c, s):
    tasks = TaskStates(s)
    tasks.create(c.id, [new("k")], "test")
    spec = s.tasks["k"].run_spec
    assert tasks.create("other", [new("k")], "test") == ([], ["k"])
    assert s.tasks["k"].run_spec is spec
    assert len(s.tasks["k"].who_wants) == 2


@gen_cluster(client=True, nthreads=[])
async def test_parking_remembers_what_was_asked_for(c, s):
    options = {"workers": [ELSEWHERE, "somehost"], "resources": {"NPU": 1}}
    future = await graph_task(c, s, **options, allow_other_workers=True)
    tasks = TaskStates(s)
    assert tasks.park(future.key) == Constraint(
        workers=frozenset({ELSEWHERE}),
        hosts=frozenset({"somehost"}),
        resources=(("NPU", 1),),
        preferred_only=True,
    )
    ts = s.tasks[future.key]
    assert ts.worker_restrictions == {PARKED_AT}
    assert not (ts.host_restrictions or ts.resource_restrictions)
    assert not ts.loose_restrictions
    # It was parked already: nothing is to be learned from that.
    assert tasks.park(future.key) == Constraint()


@gen_cluster(client=True, nthreads=[])
async def test_an_actor_is_parked_and_refused(c, s):
    future = await graph_task(c, s, workers=[ELSEWHERE])
    s.tasks[future.key].actor = True
    with pytest.raises(NotServable, match="actor"):
        TaskStates(s).park(future.key)
    assert s.tasks[future.key].worker_restrictions == {PARKED_AT}


@gen_cluster(client=True, nthreads=[])
async def test_a_parked_request_fails_with_the_exception_it_is_given(c, s):
    tasks = TaskStates(s)
    tasks.create(c.id, [new("k")], "test")
    tasks.start(["k"], "test")
    assert tasks.fail_parked(["k", "unknown"], KeyError("why"), "test") == ["k"]
    assert s.tasks["k"].state == "erred"
    assert tasks.fail_parked(["k"], KeyError("again"), "test") == []


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_attempts_are_told_apart(c, s, a):
    tasks = TaskStates(s)
    tasks.create(c.id, [new("k")], "test")
    tasks.start(["k"], "test")
    (first,) = tasks.dispatch(["k", "unknown"], a.address, "test").values()
    assert tasks.is_current("k", a.address, first)
    assert not tasks.is_current("k", ELSEWHERE, first)
    assert tasks.dispatch(["k"], a.address, "test") == {}
    tasks.release_running(["k"], "test")
    assert s.tasks["k"].state == "no-worker"
    assert not tasks.is_current("k", a.address, first)
    (second,) = tasks.dispatch(["k"], a.address, "test").values()
    assert second != first
    ws = s.workers[a.address]
    assert ws.long_running == {s.tasks["k"]}
    assert not a.state.tasks
    s.client_releases_keys(["k"], c.id)
    assert not ws.processing and not ws.long_running


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_that_is_late_is_adopted_as_the_one_that_did_it(c, s, a, b):
    tasks = TaskStates(s)
    keys = ["parked", "elsewhere", "cancelled"]
    tasks.create(c.id, [new(key) for key in keys], "test")
    tasks.start(keys, "test")
    first = tasks.dispatch(keys, a.address, "test")
    tasks.park_running(keys, "test")
    assert {s.tasks[key].state for key in keys} == {"no-worker"}
    assert not s.workers[a.address].processing
    # The worker may keep what it has stored meanwhile.
    sent = [m["op"] for m in s.stream_comms[a.address].buffer]
    assert "free-keys" not in sent
    tasks.dispatch(["elsewhere"], b.address, "test")
    s.client_releases_keys(["cancelled"], c.id)
    adopted = tasks.adopt([*keys, "unknown"], a.address, "test")
    assert adopted.keys() == {"parked", "elsewhere"}
    for key, run_id in adopted.items():
        assert run_id != first[key]
        assert tasks.is_current(key, a.address, run_id)
    assert not s.workers[b.address].processing
    s.validate_state()
    s.client_releases_keys(keys, c.id)
    assert not s.tasks


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_retries_park_a_request_again(c, s, a):
    tasks = TaskStates(s)
    tasks.create(c.id, [new("k", retries=1)], "test")
    tasks.start(["k"], "test")
    failure = {
        "exception": None,
        "traceback": None,
        "exception_text": "no",
        "traceback_text": "",
    }
    run_ids = tasks.dispatch(["k"], a.address, "test")
    assert tasks.fail_running({"k": failure}, run_ids, a.address, "test") == []
    assert s.tasks["k"].state == "no-worker"
    # What an old attempt says later does not count.
    again = tasks.dispatch(["k"], a.address, "test")
    assert tasks.is_current("k", a.address, again["k"])
    assert tasks.fail_running({"k": failure}, again, a.address, "test") == ["k"]
    assert s.tasks["k"].state == "erred"


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1, {"resources": {"NPU": 1}}), ("127.0.0.1", 1)],
)
async def test_constraints_admit_workers(c, s, a, b):
    tasks = TaskStates(s)
    addresses, hosts = tasks.resolve_workers([a.address, "127.0.0.1"])
    assert (addresses, hosts) == (frozenset({a.address}), frozenset({"127.0.0.1"}))
    assert tasks.resolve_workers(None) == (None, None)

    def admitted(**wanted):
        constraint = Constraint(**wanted)
        return [w for w in (a.address, b.address) if tasks.admits(constraint, w)]

    assert admitted() == [a.address, b.address]
    assert admitted(workers=frozenset({b.address})) == [b.address]
    assert admitted(hosts=frozenset({"127.0.0.1"})) == [a.address, b.address]
    assert admitted(hosts=frozenset({"10.0.0.1"})) == []
    assert admitted(resources=(("NPU", 1),)) == [a.address]
    assert admitted(resources=(("NPU", 2),)) == []
    assert admitted(workers=frozenset({b.address}), resources=(("NPU", 1),)) == []
    assert tasks.declared("NPU") == {a.address: 1}
    assert not tasks.declares(ELSEWHERE, ())


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_home_is_where_most_bytes_are(c, s, a, b):
    (large,) = await c.scatter([b"x" * 50_000], workers=[a.address])
    (small,) = await c.scatter([b"y" * 10_000], workers=[b.address])
    tasks = TaskStates(s)
    tasks.create(c.id, [new("k", large.key, small.key)], "test")
    assert tasks.home("k", at_least=20_000) == a.address
    assert tasks.home("k", at_least=1e9) is None
    assert 10_000 <= tasks.missing_bytes("k", a.address) < 50_000
    assert tasks.missing_bytes("k", b.address) >= 50_000
    assert tasks.missing_bytes("k", ELSEWHERE) >= 60_000
    tasks.start(["k"], "test")
    s.client_releases_keys(["k"], c.id)


def test_a_fast_task_looks_like_what_dask_expects_of_a_specification():
    spec = FastTask("k", Model("m"), b"", frozenset({"dependency"}))
    assert (spec.key, spec.dependencies) == ("k", {"dependency"})
    assert not spec.data_producer
    assert repr(spec) == "<FastTask 'k' <Model 'm'>>"


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint(), "any worker"),
        (Constraint(workers=frozenset({"b", "a"})), "workers a, b"),
        (Constraint(resources=(("NPU", 1.0),)), "resources NPU=1"),
        (
            Constraint(hosts=frozenset({"h"}), resources=(("NPU", 0.5),)),
            "workers h and resources NPU=0.5",
        ),
    ],
)
def test_a_constraint_reads_well(constraint, text):
    assert str(constraint) == text
    assert constraint.anywhere == (text == "any worker")
