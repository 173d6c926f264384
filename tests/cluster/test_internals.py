"""Each inner part of Dask's scheduler and worker that the engine relies on.

Where one of these fails, the installed ``distributed`` does something differently:
adapt ``scheduler_plugins.taskstate`` (or the worker's module that is named), or
exclude that release in ``pyproject.toml``.
"""

from __future__ import annotations

import inspect

import distributed
import pytest
from distributed import Scheduler, wait
from distributed.batched import BatchedSend
from distributed.client import FutureState
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import ClientState, TaskState, WorkerState
from distributed.utils_comm import gather_from_workers
from distributed.utils_test import gen_cluster, inc
from distributed.worker_state_machine import (
    FreeKeysEvent,
    UnpauseEvent,
    UpdateDataEvent,
)
from distributed.worker_state_machine import (
    WorkerState as WorkerStateMachine,
)

from daskinfer.failure import dump_failure
from tests.cluster.helpers import Probe, until

pytestmark = pytest.mark.smoke

#: An address that no worker has.
NOWHERE = "tcp://127.0.0.1:9"

ONE_WORKER = [("127.0.0.1", 1)]


def unsupported(what: str) -> str:
    return f"distributed {distributed.__version__} is not supported: {what}"


def require(holds: object, what: str) -> None:
    if not holds:
        pytest.fail(unsupported(what), pytrace=False)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (Scheduler._transition, ["key", "finish", "stimulus_id", "kwargs"]),
        (
            Scheduler._transitions,
            ["recommendations", "client_msgs", "worker_msgs", "stimulus_id"],
        ),
        (Scheduler.transitions, ["recommendations", "stimulus_id"]),
        (Scheduler.send_all, ["client_msgs", "worker_msgs"]),
        (Scheduler.worker_send, ["worker", "msg"]),
        (Scheduler.report, ["msg", "client"]),
        (Scheduler.new_task, ["key", "spec", "state"]),
        (Scheduler.client_desires_keys, ["keys", "client"]),
        (Scheduler.coerce_address, ["addr"]),
        (Scheduler.coerce_hostname, ["host"]),
        (Scheduler.check_idle_saturated, ["ws"]),
        (Scheduler.stimulus_queue_slots_maybe_opened, ["stimulus_id"]),
        (
            Scheduler.stimulus_task_erred,
            ["worker", "stimulus_id", "key", "run_id", "kwargs"],
        ),
        (Scheduler._check_unrunnable_task_timeouts, []),
        (Scheduler.adaptive_target, []),
        (Scheduler.workers_to_close, ["n", "target", "attribute"]),
        (Scheduler.register_worker_plugin, ["comm", "plugin", "name", "idempotent"]),
        (Scheduler.log_event, ["topic", "msg"]),
        (TaskState.add_dependency, ["other"]),
        (TaskState.get_nbytes, []),
        (WorkerState.add_to_long_running, ["ts"]),
        (SchedulerPlugin.valid_workers_downscaling, ["scheduler", "workers"]),
        (SchedulerPlugin.remove_worker, ["scheduler", "worker"]),
        (SchedulerPlugin.log_event, ["topic", "msg"]),
        (gather_from_workers, ["who_has", "rpc", "who"]),
        (FreeKeysEvent, ["keys", "stimulus_id"]),
        (UpdateDataEvent, ["data", "stimulus_id"]),
        (UnpauseEvent, ["stimulus_id"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_functions_take_what_they_are_given(function, parameters):
    found = inspect.signature(function).parameters
    missing = [name for name in parameters if name not in found]
    require(
        not missing,
        f"{function.__qualname__}{tuple(found)} does not take {missing}",
    )


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (
            TaskState,
            [
                "actor",
                "annotations",
                "dependencies",
                "exception_blame",
                "group",
                "host_restrictions",
                "loose_restrictions",
                "metadata",
                "priority",
                "processing_on",
                "resource_restrictions",
                "retries",
                "run_id",
                "run_spec",
                "state",
                "suspicious",
                "who_has",
                "who_wants",
                "worker_restrictions",
            ],
        ),
        (
            WorkerState,
            [
                "address",
                "host",
                "long_running",
                "name",
                "nbytes",
                "processing",
                "resources",
                "status",
            ],
        ),
        (ClientState, ["client_key", "wants_what"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_states_have_the_attributes_in_use(cls, names):
    missing = [name for name in names if not hasattr(cls, name)]
    require(not missing, f"{cls.__name__} has no {missing}")


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_scheduler_and_worker_have_the_parts_in_use(c, s, a):
    scheduler_parts = [
        "bandwidth",
        "client_comms",
        "extensions",
        "generation",
        "handlers",
        "plugins",
        "resources",
        "running",
        "http_application",
        "stream_comms",
        "stream_handlers",
        "tasks",
        "unrunnable",
        "workers",
    ]
    worker_parts = [
        "_ongoing_background_tasks",
        "batched_stream",
        "data",
        "handle_stimulus",
        "handlers",
        "metrics",
        "plugins",
        "rpc",
        "scheduler",
        "state",
        "stream_handlers",
    ]
    for owner, names in [(s, scheduler_parts), (a, worker_parts)]:
        missing = [name for name in names if not hasattr(owner, name)]
        require(not missing, f"{type(owner).__name__} has no {missing}")
    require("adaptive_target" in s.handlers, "no adaptive_target handler to replace")
    require("workers_to_close" in s.handlers, "no workers_to_close handler to replace")
    require("gather" in s.handlers, "no gather handler to replace")
    require(
        hasattr(s.extensions.get("stealing"), "remove_key_from_stealable"),
        "work stealing cannot be told to leave a task alone",
    )
    require(
        hasattr(s.extensions.get("stealing"), "unknown_durations"),
        "work stealing keeps tasks of unknown duration elsewhere",
    )
    require(
        hasattr(s.extensions.get("spans"), "observe_tasks"),
        "tasks cannot be added to spans",
    )
    for stream in (s.stream_comms[a.address], a.batched_stream):
        require(isinstance(stream, BatchedSend), "streams are no BatchedSend")
        require(hasattr(stream, "interval"), "streams have no interval")
        require(hasattr(stream, "recent_message_log"), "streams have no message log")
    state = a.state
    require(isinstance(state, WorkerStateMachine), "the worker's state is another")
    for name in ("available_resources", "total_resources", "tasks", "running"):
        require(hasattr(state, name), f"the worker's state has no {name}")
    require(s.validate and a.state.validate, "the tests do not validate states")


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_task_bound_to_an_address_that_does_not_exist_waits(c, s, a):
    future = c.submit(inc, 1, workers=[NOWHERE], key="parked")
    await until(lambda: "parked" in s.tasks)
    ts = s.tasks["parked"]
    require(ts.state == "no-worker", f"a task without a worker is {ts.state}")
    require(ts in s.unrunnable, "what has no worker is not listed as unrunnable")
    del future


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_parked_task_can_be_moved_to_processing_without_a_message(c, s, a):
    future = c.submit(inc, 1, workers=[NOWHERE], key="parked")
    await until(lambda: "parked" in s.tasks)
    ts, ws = s.tasks["parked"], s.workers[a.address]
    ts.worker_restrictions = {a.address}
    recommendations, client_msgs, worker_msgs = s._transition(
        "parked", "processing", "test"
    )
    require(
        ts.state == "processing" and ts.processing_on is ws,
        "no-worker does not become processing",
    )
    require(
        [m["op"] for m in worker_msgs.get(a.address, ())] == ["compute-task"],
        "the compute-task message cannot be held back",
    )
    require(isinstance(ts.run_id, int), "an attempt has no run id")
    assert not recommendations and not client_msgs
    ws.add_to_long_running(ts)
    first_attempt = ts.run_id
    ts.worker_restrictions = {NOWHERE}
    changes = s._transition("parked", "released", "test")
    require(
        [m["op"] for m in changes[2].get(a.address, ())] == ["free-keys"],
        "the free-keys message cannot be held back",
    )
    s._transitions(changes[0], {}, {}, "test")
    require(ts.state == "no-worker", "a released task does not park again")
    require(not ws.processing and not ws.long_running, "a released task stays behind")
    ts.worker_restrictions = {a.address}
    s._transition("parked", "processing", "test")
    require(ts.run_id != first_attempt, "two attempts have the same run id")
    del future


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_a_worker_was_told_to_keep_completes_a_task(c, s, a):
    future = c.submit(inc, 1, workers=[NOWHERE], key="parked")
    await until(lambda: "parked" in s.tasks)
    ts = s.tasks["parked"]
    ts.worker_restrictions = {a.address}
    s._transition("parked", "processing", "test")
    a.handle_stimulus(UpdateDataEvent(data={"parked": 42}, stimulus_id="test"))
    require(a.data.get("parked") == 42, "UpdateDataEvent does not store data")
    changes = s._transition(
        "parked",
        "memory",
        "test",
        worker=a.address,
        nbytes=8,
        type=b"",
        typename="int",
        metadata={},
        thread=0,
        status="OK",
        startstops=[{"action": "compute", "start": 0.0, "stop": 1.0}],
    )
    s._transitions(*changes, "test")
    s.send_all(*changes[1:])
    require(ts.state == "memory", "processing does not become memory")
    assert await future == 42


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_parked_task_can_be_failed(c, s, a):
    future = c.submit(inc, 1, workers=[NOWHERE], key="parked")
    await until(lambda: "parked" in s.tasks)
    failure = dump_failure(ValueError("not today"))
    changes = s._transition("parked", "erred", "test", cause="parked", **failure)
    s._transitions(*changes, "test")
    s.send_all(*changes[1:])
    require(s.tasks["parked"].state == "erred", "no-worker does not become erred")
    with pytest.raises(ValueError, match="not today"):
        await future


class Recorder(SchedulerPlugin):
    name = "recorder"

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []

    def update_graph(self, scheduler, *, tasks, **kwargs):
        states = {scheduler.tasks[key].state for key in tasks}
        self.seen.append(("update_graph", states))

    def transition(self, key, start, finish, *args, stimulus_id, **kwargs):
        self.seen.append(("transition", (start, finish)))

    def remove_worker(self, scheduler, worker, *, stimulus_id, **kwargs):
        states = {ts.state for ts in scheduler.tasks.values()}
        self.seen.append(("remove_worker", states))

    def log_event(self, topic, msg):
        if isinstance(msg, dict) and "action" in msg:
            self.seen.append(("log_event", msg["action"]))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_graph_is_shown_to_plugins_before_its_tasks_are_placed(c, s, a):
    recorder = Recorder()
    s.add_plugin(recorder)
    await c.submit(inc, 1)
    names = [name for name, _ in recorder.seen if name != "log_event"]
    require(
        names[0] == "update_graph",
        "tasks change their states before update_graph is called",
    )
    require(
        ("update_graph", {"released"}) in recorder.seen,
        "update_graph sees no released tasks",
    )


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_tasks_of_a_lost_worker_are_released_before_plugins_hear(c, s, a):
    task = Probe(is_open=False)
    future = c.submit(task, 1)
    await task.entered()
    recorder = Recorder()
    s.add_plugin(recorder)
    await s.remove_worker(a.address, stimulus_id="test", close=False)
    (states,) = [states for name, states in recorder.seen if name == "remove_worker"]
    require(
        "processing" not in states,
        "remove_worker is called before the worker's tasks are released",
    )
    task.open()
    del future


@gen_cluster(
    client=True,
    nthreads=ONE_WORKER,
    config={"distributed.scheduler.allowed-failures": 0},
)
async def test_dask_can_be_kept_from_blaming_a_task_for_a_lost_worker(c, s, a):
    task = Probe(is_open=False)
    future = c.submit(task, 1, key="task")
    await task.entered()
    s.tasks["task"].suspicious = -(2**31)
    await s.remove_worker(a.address, stimulus_id="test", close=False)
    task.open()
    require(
        s.tasks["task"].state in ("queued", "no-worker"),
        "a task with a low count of deaths fails all the same",
    )
    del future


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_that_leaves_on_purpose_is_announced(c, s, a, b):
    seen: list[tuple[str, object]] = []

    class Events(SchedulerPlugin):
        name = "events"

        def log_event(self, topic, msg):
            if isinstance(msg, dict) and topic in (a.address, b.address):
                if msg.get("action") == "remove-worker":
                    seen.append((topic, msg.get("expected")))
                if msg.get("action") == "worker-status-change":
                    seen.append((topic, msg.get("status")))

        def remove_worker(self, scheduler, worker, *, stimulus_id, **kwargs):
            seen.append((worker, "gone"))

    s.add_plugin(Events())
    await s.retire_workers([a.address])
    told = [what for topic, what in seen if topic == a.address]
    require(
        told[:3] == ["closing_gracefully", True, "gone"],
        f"a retired worker is announced as {told}",
    )
    await s.remove_worker(b.address, stimulus_id="test", close=False)
    told = [what for topic, what in seen if topic == b.address]
    require(told == [False, "gone"], f"a lost worker is announced as {told}")


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_task_that_waits_for_inputs_can_be_failed(c, s, a):
    source = Probe(is_open=False)
    first = c.submit(source, 1, key="source")
    future = c.submit(inc, first, key="waits")
    last = c.submit(inc, future, key="last")
    await until(lambda: "last" in s.tasks)
    ts = s.tasks["waits"]
    failure = dump_failure(ValueError("not today"))
    ts.exception_blame = ts
    ts.exception, ts.traceback = failure["exception"], failure["traceback"]
    changes = s._transition("waits", "erred", "test")
    s._transitions(*changes, "test")
    s.send_all(*changes[1:])
    require(ts.state == "erred", "waiting does not become erred")
    for failed in (future, last):
        with pytest.raises(ValueError, match="not today"):
            await failed
    source.open()
    await first


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_change_of_a_workers_status_is_logged(c, s, a):
    recorder = Recorder()
    s.add_plugin(recorder)
    a.memory_manager.memory_pause_fraction = False
    a.status = Status.paused
    await until(lambda: s.workers[a.address].status == Status.paused)
    require(
        ("log_event", "worker-status-change") in recorder.seen,
        "a paused worker is not announced",
    )
    require(s.workers[a.address] not in s.running, "a paused worker counts as running")


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_time_out_of_tasks_without_workers_can_be_wrapped(c, s, a):
    called = []
    check = s._check_unrunnable_task_timeouts

    def wrapped(*args, **kwargs):
        called.append(args)
        return check(*args, **kwargs)

    s._check_unrunnable_task_timeouts = wrapped
    s.no_workers_timeout = 1e-9
    future = c.submit(inc, 1, workers=[NOWHERE])
    await until(lambda: s.unrunnable)
    s._check_no_workers()
    require(called, "the check is not called on the instance")
    await wait([future])
    assert future.status == "error"


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_batch_can_take_a_resource_from_a_workers_account(c, s, a):
    a.state.total_resources["X"] = a.state.available_resources["X"] = 1
    await c.submit(inc, 1)
    for account in (a.state.total_resources, a.state.available_resources):
        account["X"] -= 1
    a.state.validate_state()
    a.handle_stimulus(UnpauseEvent(stimulus_id="test"))
    assert await c.submit(inc, 2) == 3


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_results_can_be_kept_with_the_state_of_a_future(c, s, a):
    """Small results come unasked: :mod:`daskinfer.future` keeps them there."""
    require("key-in-memory" in c._stream_handlers, "clients take no stream handlers")
    require(
        inspect.iscoroutinefunction(distributed.Future._result),
        "Future._result is no coroutine function to override",
    )
    require(c._handle_report_task is not None, "a connected client looks new")
    state = c.futures["k"] = FutureState("k")
    future = distributed.Future("k", c)
    require(future._state is state, "futures do not share the state of their key")
    require(state.status == "pending", "a new state is not pending")
    state.finish()
    require(state.status == "finished", "a state that has finished does not say so")


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_states_of_a_task_are_remembered(c, s, a):
    await c.submit(inc, 1, key="x")
    told = [move for move in s.story("x") if move.key == "x"]
    states = [(move.start, move.finish) for move in told]
    expected = ("processing", "memory")
    require(states and expected in states, "the story of a task has no states")
    require(
        all(move.stimulus_id and move.timestamp for move in told),
        "the story of a task has no times or stimulus ids",
    )
