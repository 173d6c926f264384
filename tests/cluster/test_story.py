"""One request's life, as it is told."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest
from distributed import Nanny, Worker, wait
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import RetryPolicy, Story
from daskinfer.caching import CachePolicy
from scheduler_plugins.trail import Past
from tests.cluster.helpers import Probe, until
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
    queued,
)

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = [("127.0.0.1", 1)] * 2

both_ways = pytest.mark.parametrize("way", ["client", "model"])


def ask(client: Any, way: str, model: Any, x: Any, **options: Any) -> Any:
    if way == "client":
        return client.submit(model, x, **options)
    return model.options(**options).submit(x)


def details(story: Story, event: str) -> list[str]:
    return [entry.detail for entry in story if entry.event == event]


def in_order(story: Story) -> None:
    times = [entry.time for entry in story]
    assert times == sorted(times)


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_answer(c: Any, s: Any, a: Any, way: str) -> None:
    model = await deploy(c, Probe(), max_batch_size=8)
    future = ask(c, way, model, np.ones((3, 1)))
    await future
    story = await model.story(future)
    assert (story.key, story.name, story.state) == (future.key, "m", "answered")
    assert story.events == ["submitted", "queued", "sent", "done", "answered"]
    in_order(story)
    (sent,) = details(story, "sent")
    assert sent == f"in batch m-1 to {a.address}: version '1', 1 request, 3 rows"
    (done,) = details(story, "done")
    assert done.startswith("batch m-1 ran for ") and "on cpu in 1 pass" in done
    assert details(story, "answered")[0] == "computed"
    # Dask's own account, with the ids by which its logs name things.
    moves = [e for e in story if e.source == "dask"]
    assert [e.event for e in moves][-3:] == [
        "waiting → no-worker",
        "no-worker → processing",
        "processing → memory",
    ]
    assert moves[-1].stimulus_id == "daskinfer-done-m-1"
    assert "daskinfer-run-m-1" in {e.stimulus_id for e in story}
    # And the worker's.
    own = [e for e in story if e.source == a.address]
    assert [e.event for e in own] == ["came", "began", "ended"]
    assert own[1].detail == "batch m-1 on cpu"
    # By its key, too; and as it is told to people.
    again = await model.story(future.key)
    assert again.events == story.events
    assert "daskinfer-run-m-1" in str(again) and "+0.0 ms" in str(again)
    assert f"'{future.key}' of 'm'" in str(again).splitlines()[0]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_requests_that_run_and_that_wait(c: Any, s: Any, a: Any) -> None:
    probe = Probe(is_open=False)
    model = await deploy(c, probe, max_batch_size=1)
    futures = [model.submit(ONE) for _ in range(3)]
    await probe.entered()
    stories = [await model.story(future) for future in futures]
    assert [story.state for story in stories] == ["running", "queued", "queued"]
    assert [e.event for e in stories[0] if e.source == a.address] == ["came", "began"]
    assert stories[1].events == ["submitted", "queued"]
    assert details(stories[1], "queued") == ["for version '1'"]
    probe.open()
    await c.gather(futures)
    assert (await model.story(futures[2])).state == "answered"


@gen_cluster(client=True, nthreads=[], config={"daskinfer.no-worker-warning": "1h"})
async def test_why_nobody_serves_it(c: Any, s: Any) -> None:
    model = await deploy(c, Probe(), wait=False)
    # At once: the question may overtake the request.
    future = model.submit(ONE)
    story = await model.story(future)
    assert story.problem == "the cluster has no worker"
    assert str(story).splitlines()[0].endswith("queued: the cluster has no worker")
    async with Worker(s.address):
        await future
        assert (await model.story(future)).problem is None


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_request_that_needs_results(c: Any, s: Any, a: Any, way: str) -> None:
    gate = Probe(is_open=False)
    first = c.submit(gate, ONE, pure=False)
    model = await deploy(c, Probe())
    future = ask(c, way, model, first)
    await gate.entered()
    await until(lambda: future.key in engine(s).requests)
    story = await model.story(future)
    assert (story.state, story.events) == ("waiting for its inputs", ["submitted"])
    assert details(story, "submitted") == ["it needs results of other tasks"]
    gate.open()
    await future
    assert (await model.story(future)).state == "answered"


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_answer_from_the_cache(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, Probe(), cache=CachePolicy())
    await model.submit(ONE)
    again = model.submit(ONE)
    await again
    assert details(await model.story(again), "answered")[0] == "cached"


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_failure_and_a_retry(c: Any, s: Any, a: Any, way: str) -> None:
    def fail(x: Any) -> Any:
        raise ValueError("secret")

    model = await deploy(c, Probe(fail))
    future = ask(c, way, model, ONE, retries=1)
    await wait([future])
    story = await model.story(future)
    assert story.state == "failed (model)"
    attempt = ["queued", "sent", "done", "interrupted"]
    assert sorted(story.events) == sorted(["submitted", *attempt, *attempt, "failed"])
    assert (
        details(story, "interrupted") == [f"ValueError was raised on {a.address}"] * 2
    )
    # Whoever asks has the exception; its text is nobody else's.
    assert "secret" not in str(story)


@both_ways
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_cancelled_requests_are_remembered(
    c: Any, s: Any, a: Any, way: str
) -> None:
    probe = Probe(is_open=False)
    model = await deploy(c, probe, max_batch_size=1)
    futures = [ask(c, way, model, np.full((1, 1), i)) for i in range(3)]
    await probe.entered()
    cancelled = futures[-1]
    await cancelled.cancel()
    await until(lambda: cancelled.key not in s.tasks)
    for what in (cancelled, cancelled.key):
        story = await model.story(what)
        assert story.state == "cancelled (released)"
        assert story.events == ["submitted", "queued", "cancelled"]
    probe.open()
    await wait(futures[:2])
    keys = [future.key for future in futures[:2]]
    del futures
    await until(lambda: not s.tasks)
    assert [(await model.story(key)).state for key in keys] == ["answered"] * 2
    await nothing_is_left(s, a)


class Killer:
    """An input that ends the process which reads it."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return os._exit, (1,)


@gen_cluster(client=True, nthreads=TWO_WORKERS, Worker=Nanny)
async def test_workers_that_die_under_it(c: Any, s: Any, a: Any, b: Any) -> None:
    policy = RetryPolicy(max_attempts=2, backoff=0, max_backoff=0)
    model = await deploy(c, np.negative, retry=policy)
    future = model.submit(Killer())
    await wait([future])
    story = await model.story(future)
    assert story.state == "failed (worker_lost)"
    assert len(details(story, "sent")) >= 2
    ended = details(story, "interrupted")
    assert len(ended) >= 2
    assert all(told.startswith("its process ended on tcp://") for told in ended)
    in_order(story)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_batch_that_takes_too_long(c: Any, s: Any, a: Any, b: Any) -> None:
    probe = Probe(is_open=False)
    model = await deploy(
        c,
        probe,
        batch_timeout=0.05,
        retry=RetryPolicy(max_attempts=2, backoff=0, max_backoff=0),
    )
    future = model.submit(ONE)
    await probe.entered(2)
    probe.open()
    await wait([future])
    story = await model.story(future)
    (first, *_) = details(story, "interrupted")
    assert first.startswith("the batch ran for too long on tcp://")
    assert story.events[:5] == ["submitted", "queued", "sent", "interrupted", "queued"]


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1, {"resources": {"NPU": 1}})])
async def test_a_task_that_holds_the_device(c: Any, s: Any, a: Any) -> None:
    gate = Probe(is_open=False)
    model = await daskinfer.deploy(c, Probe(), name="m", resources={"NPU": 1})
    task = c.submit(gate, ONE, resources={"NPU": 1})
    await gate.entered()
    future = model.submit(ONE)
    held = "for a task that holds the device"

    async def told() -> list[str]:
        return details(await model.story(future), "waits")

    while held not in await told():
        await asyncio.sleep(0)
    gate.open()
    await wait([task, future])
    story = await model.story(future)
    assert story.events.index("waits") < story.events.index("waits no longer")


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_nobody_knows(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    with pytest.raises(ValueError, match="knows of no request 'never': give a future"):
        await model.story("never")
    other = await deploy(c, Probe(), "other")
    future = other.submit(ONE)
    await future
    with pytest.raises(ValueError, match="is a request to 'other', not to 'm'"):
        await model.story(future)
    task = c.submit(sum, [1, 2])
    await task
    with pytest.raises(ValueError, match="knows of no request"):
        await model.story(task)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_message_that_was_refused(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    engine(s).submit(c.id, ["k"], name="m", nonsense=1)
    story = await model.story("k")
    assert (story.state, story.events) == ("failed (refused)", ["failed"])


@gen_cluster(client=True, nthreads=ONE_WORKER, Worker=Nanny)
async def test_a_restart_of_the_cluster(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, np.negative, wait=True)
    future = model.options(workers=["nobody"]).submit(ONE)
    await queued(s, 1)
    key = future.key
    await c.restart()
    assert (await model.story(key)).state.startswith("cancelled (")


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_is_remembered_is_bounded(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, Probe(), max_batch_size=64)
    engine(s).lifecycle.past = Past(maxlen=10)
    keys = []
    for _ in range(3):
        futures = [model.submit(np.full((1, 1), i)) for i in range(10)]
        await wait(futures)
        keys.append(futures[0].key)
        del futures
        await until(lambda: not s.tasks)
    assert (await model.story(keys[-1])).state == "answered"
    with pytest.raises(ValueError, match="are forgotten after a while"):
        await model.story(keys[0])
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_worker_that_is_gone_has_nothing_to_tell(
    c: Any, s: Any, a: Any
) -> None:
    model = await deploy(c, Probe())
    async with Worker(s.address) as b:
        await until(lambda: len(engine(s).registry.version("m").ready()) == 2)
        future = model.options(workers=[b.address]).submit(ONE)
        await future
        assert b.address in {e.source for e in await model.story(future)}
    await until(lambda: b.address not in s.workers)
    story = await model.story(future)
    assert b.address not in {e.source for e in story} and "done" in story.events


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_notebook_shows_a_table(c: Any, s: Any, a: Any) -> None:
    name = "<img src=x>"
    model = await deploy(c, Probe(), name)
    future = model.submit(ONE)
    await future
    page = (await model.story(future))._repr_html_()
    assert "<img" not in page and "&lt;img src=x&gt;" in page
    assert page.count("<tr>") > 5 and "<th>what</th>" in page
