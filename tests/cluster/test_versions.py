"""One version takes over from another: no gap, no mixed answers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest
from distributed import Worker
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import (
    DeployTimeout,
    NoPreviousVersion,
    NoUpdate,
    UnknownDeployment,
    UpdateAborted,
    UpdateFailed,
    UpdateInProgress,
    VersionExists,
    VersionNotReady,
    protocol,
)
from daskinfer.artifact import Artifact, DamagedArtifact
from tests.cluster.helpers import Builder, Probe, until
from tests.cluster.scheduling_helpers import (
    ONE,
    deploy,
    engine,
    nothing_is_left,
    queued,
)
from tests.cluster.stream_helpers import Feed
from tests.cluster.version_helpers import (
    FACTORY,
    LaterOnes,
    Says,
    active,
    resident,
    version_now,
    versions_of,
)

ONE_WORKER = [("", 1)]
THREE_WORKERS = [("", 1)] * 3


@gen_cluster(client=True)
async def test_update_under_load(c: Any, s: Any, a: Any, b: Any) -> None:
    model = await deploy(c, Says(1))
    stop = asyncio.Event()
    sent: list[Any] = []

    async def load(submit: Any) -> None:
        while not stop.is_set():
            sent.append(submit(ONE))
            await sent[-1]

    def plain(x: Any) -> Any:
        return c.submit(model, x, pure=False)

    senders = [asyncio.ensure_future(load(f)) for f in [model.submit] * 8 + [plain] * 2]
    await until(lambda: len(sent) > 50)
    for version in "23":
        before = len(sent)
        await model.update(Says(int(version)), version=version)
        assert active(s) == version
        switched = len(sent)
        await until(lambda: len(sent) > switched + 50)  # noqa: B023
        # What is sent after the switch is answered by the new one alone.
        told = await versions_of([f for f in sent[switched:] if f.done()])
        assert set(told) == {version}
        assert len(sent) > before
    stop.set()
    await asyncio.gather(*senders)
    told = await versions_of(sent)
    assert sorted(set(told)) == ["1", "2", "3"]
    answers = await c.gather(sent)
    assert [x[0, 0] for x in answers] == [float(version) for version in told]
    status = await model.status()
    assert (status.failures, status.cancelled) == (0, 0)
    assert sum(v.requests for v in status.versions) < status.requests  # 1 is gone
    sent.clear()
    del answers, senders
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_waits_moves_and_what_runs_stays(c: Any, s: Any, a: Any) -> None:
    old = Probe(lambda x: x + 10, is_open=False)
    new = Probe(lambda x: x + 20)
    model = await deploy(c, old, max_batch_size=1)
    running = model.submit(np.full((1, 1), 0.0))
    await old.entered()
    low = model.map([np.full((1, 1), float(i)) for i in range(1, 4)])
    high = model.options(priority=5).submit(np.full((1, 1), 9.0))
    pinned = (await model.pin("1")).submit(np.full((1, 1), 5.0))
    await until(lambda: len(s.tasks) == 6)
    await model.update(new, version="2")
    status = await model.status()
    assert status.version("1").stage == "draining"
    old.open()
    answers = await c.gather([running, *low, high, pinned])
    told = await versions_of([running, *low, high, pinned])
    # One batch may have been on its way behind the one that ran.
    assert told[0] == told[-1] == "1" and told.count("2") >= 3
    assert [x[0, 0] for x in answers] == [
        value + 10 * int(version)
        for value, version in zip([0, 1, 2, 3, 9, 5], told, strict=True)
    ]
    rows = [float(args[0][0, 0]) for args, _ in new.calls]
    # In the order in which they would have run before.
    assert rows == sorted(rows, key=lambda value: (value != 9, value))
    assert (await model.status()).version("1").stage == "previous"


@gen_cluster(client=True, nthreads=ONE_WORKER)
@pytest.mark.parametrize("leaves", [False, True])
async def test_old_version_goes_with_its_last_stream(
    c: Any, s: Any, a: Any, leaves: bool
) -> None:
    feed = Feed(length=3)
    model = await deploy(c, feed)
    stream = model.stream()
    feed.let()
    assert await anext(stream) == 0
    for number in (2, 3):
        await model.update(Says(number), version=str(number), keep_previous=False)
    assert "1" in resident(a)[0]
    if leaves:
        stream.close()
        # Nothing else happens.
        await until(lambda: not engine(s).dispatcher.streams.live)
        # Told of it before its next step, the model makes no other.
        (job,) = a.plugins["daskinfer-runtime"].jobs.values()
        await until(lambda: bool(job.dropped))
        feed.let()
    else:
        feed.open()
        assert [chunk async for chunk in stream] == [1, 2]
    await until(lambda: resident(a) == [{"3"}])
    del stream
    await nothing_is_left(s, a)


@gen_cluster(client=True)
async def test_activation_waits_for_the_slow_loader(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    model = await deploy(c, Says(1))
    slow = LaterOnes(2)
    updating = asyncio.ensure_future(
        model.update(version="2", factory=FACTORY, factory_kwargs={"builder": slow})
    )
    await until(lambda: slow.built == 2)

    def ready() -> int:
        return len(engine(s).registry.version("m", "2").ready())

    await until(lambda: ready() == 1)
    assert await version_now(model) == "1"
    assert (await model.status()).version("2").stage == "loading"
    assert not updating.done()
    slow.open()
    await updating
    assert await version_now(model) == "2"
    assert resident(a, b) == [{"1", "2"}] * 2


@gen_cluster(client=True, nthreads=THREE_WORKERS)
async def test_a_load_that_raises_on_one_of_three_workers(
    c: Any, s: Any, *workers: Any
) -> None:
    model = await deploy(c, Says(1))
    builder = LaterOnes(2, failures=1)
    builder.open()
    with pytest.raises(UpdateFailed, match="version '1' stays active") as caught:
        await model.update(
            version="2", factory=FACTORY, factory_kwargs={"builder": builder}
        )
    assert "on 1 worker of 3" in str(caught.value)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    for worker in workers:
        assert await version_now(model, workers=[worker.address]) == "1"
    await until(lambda: resident(*workers) == [{"1"}] * 3)
    status = await model.status()
    assert [v.version for v in status.versions] == ["1"]
    assert "cannot build number 1" in str(status.last_update)
    # Its label was never an answer's.
    await model.update(Says(2), version="2", min_ready=0.5)
    assert await version_now(model) == "2"


@gen_cluster(client=True)
async def test_two_updates_at_once(c: Any, s: Any, a: Any, b: Any) -> None:
    model = await deploy(c, Says(1))
    ended = await asyncio.gather(
        *(model.update(Says(int(v)), version=v) for v in "23"), return_exceptions=True
    )
    (lost,) = [end for end in ended if end is not None]
    assert isinstance(lost, UpdateInProgress)
    assert "give it up with model.abort()" in str(lost)
    winner = "2" if ended[0] is None else "3"
    assert await version_now(model) == winner
    with pytest.raises(VersionExists, match="give this one a label of its own"):
        await model.update(Says(1), version=winner)
    with pytest.raises(ValueError, match="batch_dim must stay 0"):
        await model.update(
            Says(4), version="4", batching=daskinfer.BatchPolicy(batch_dim=None)
        )
    with pytest.raises(UnknownDeployment, match="no deployment is named 'n'"):
        await daskinfer.Model("n", client=c).update(Says(1), version="2")


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_update_that_is_given_up(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, Says(1))
    builder = Builder(is_open=False)
    about = {"version": "2", "factory": FACTORY, "factory_kwargs": {"builder": builder}}
    with pytest.raises(DeployTimeout, match=r"'1' stays active\. It goes on loading"):
        await model.update(**about, wait_timeout="10ms")
    with pytest.raises(VersionNotReady, match="1 more worker"):
        await model.promote()
    await model.abort("2")
    with pytest.raises(NoUpdate, match="no update is under way, and version '1'"):
        await model.abort()
    with pytest.raises(NoUpdate):
        await model.promote("2")
    updating = asyncio.ensure_future(model.update(**about))
    await until(lambda: engine(s).registry.deployment("m").update is not None)
    await model.abort()
    with pytest.raises(UpdateAborted, match="given up by a user"):
        await updating
    builder.open()
    await until(lambda: not len(engine(s).unloading))
    assert resident(a) == [{"1"}]
    assert await version_now(model) == "1"


@gen_cluster(client=True)
async def test_manual_activation(c: Any, s: Any, a: Any, b: Any) -> None:
    model = await deploy(c, Says(1))
    await model.update(Says(2), version="2", activate="manual")
    status = await model.status()
    assert (status.active_version, status.version("2").stage) == ("1", "ready")
    assert await version_now(model) == "1"
    # To be tried before it is let loose.
    assert await version_now(await model.pin("2")) == "2"
    await model.promote("2")
    assert await version_now(model) == "2"
    future = model.submit(ONE)
    await future
    info = await daskinfer.info(future)
    digests = {v.version: v.digest for v in (await model.status()).versions}
    assert info.digest == digests["2"] != digests["1"]


@gen_cluster(client=True)
async def test_rollback_and_pins(c: Any, s: Any, a: Any, b: Any) -> None:
    model = await deploy(c, Says(1))
    with pytest.raises(NoPreviousVersion, match="no version before '1'"):
        await model.rollback()
    pinned = await model.pin("1")
    assert (pinned.version, pinned.client) == ("1", c)
    with pytest.raises(UnknownDeployment, match="no version '7'; it has '1'"):
        await model.pin("7")
    await model.update(Says(2), version="2")
    assert [await version_now(m) for m in (model, pinned)] == ["2", "1"]
    await model.rollback()
    assert await version_now(model) == "1"
    await model.rollback()
    assert await version_now(model) == "2"
    await model.update(Says(3), version="3")
    with pytest.raises(UnknownDeployment, match="version '1' of 'm' was retired"):
        await pinned.submit(ONE)
    with pytest.raises(UnknownDeployment, match=r"daskinfer.get\(client, 'm'\)"):
        await c.submit(pinned, ONE)
    await until(lambda: resident(a, b) == [{"2", "3"}] * 2)
    await model.update(Says(4), version="4", keep_previous=False)
    await until(lambda: resident(a, b) == [{"4"}] * 2)
    with pytest.raises(NoPreviousVersion):
        await model.rollback()


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_pinned_requests_that_wait_when_their_version_is_retired(
    c: Any, s: Any, a: Any
) -> None:
    old = Probe(lambda x: x, is_open=False)
    model = await deploy(c, old, max_batch_size=1)
    pinned = await model.pin("1")
    futures = pinned.map([ONE] * 6)
    await old.entered()
    await model.update(Says(2), version="2", keep_previous=False)
    assert await_stage(await model.status(), "1") == "draining"
    old.open()
    ended = await asyncio.gather(*futures, return_exceptions=True)
    failed = [end for end in ended if isinstance(end, UnknownDeployment)]
    assert 4 <= len(failed) < 6  # those under way are answered
    assert "'1' of 'm' was retired; there is '2'" in str(failed[0])
    await until(lambda: resident(a) == [{"2"}])


def await_stage(status: Any, label: str) -> str:
    return status.version(label).stage


# Workers that come and go


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_worker_joins_during_an_update(c: Any, s: Any, a: Any) -> None:
    """It is waited for, and takes requests as soon as it has what is active."""
    model = await deploy(c, Says(1))
    builder = Builder(is_open=False)
    builder.build = lambda: Builder.build(builder) and Says(2)  # type: ignore
    updating = asyncio.ensure_future(
        model.update(version="2", factory=FACTORY, factory_kwargs={"builder": builder})
    )
    await until(lambda: builder.built == 1)
    async with Worker(s.address) as late:
        assert await version_now(model, workers=[late.address]) == "1"
        assert not updating.done()
        builder.open()
        await updating
        for worker in (a, late):
            assert await version_now(model, workers=[worker.address]) == "2"
        assert resident(a, late) == [{"1", "2"}] * 2


@gen_cluster(client=True)
async def test_the_last_ready_worker_dies_during_an_update(
    c: Any, s: Any, a: Any, b: Any
) -> None:
    """The update goes on with those that are left."""
    model = await deploy(c, Says(1))
    slow = LaterOnes(2)
    updating = asyncio.ensure_future(
        model.update(version="2", factory=FACTORY, factory_kwargs={"builder": slow})
    )

    def ready() -> list[Any]:
        return engine(s).registry.version("m", "2").ready()

    await until(lambda: slow.built == 2 and len(ready()) == 1)
    (first,) = [w for w in (a, b) if w.address == ready()[0].address]
    (other,) = {a, b} - {first}
    await first.close()
    assert not updating.done() and active(s) == "1"
    assert await version_now(model) == "1"
    slow.open()
    await updating
    assert await version_now(model) == "2"
    assert resident(other) == [{"1", "2"}]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_workers_that_join_load_all_that_is_resident(
    c: Any, s: Any, a: Any
) -> None:
    model = await deploy(c, Says(1))
    for version in "23":
        await model.update(Says(int(version)), version=version)
    async with Worker(s.address) as late:
        assert await version_now(model, workers=[late.address]) == "3"
        await until(lambda: resident(late) == [{"2", "3"}])
        await until(lambda: len(engine(s).registry.version("m", "2").ready()) == 2)
        await model.rollback()
        assert await version_now(model, workers=[late.address]) == "2"


# Manifest and reports disagree


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_worker_reports_what_nobody_asked_for(c: Any, s: Any, a: Any) -> None:
    """It lets go of it, and goes on with what it shall have."""
    model = await deploy(c, Says(1))
    loader = a.plugins["daskinfer-runtime"].loader
    (found,) = loader.models.values()
    loader.models["m", "7"] = found
    report = {
        "op": protocol.LOADED,
        "name": "m",
        "version": "7",
        "load": 99,
        "digest": found.digest,
        "failure": None,
        "device": "cpu",
        "device_class": "cpu",
        "timings": [],
        "seconds": 0.0,
        "nbytes": 0,
        "source": "",
        "kind": "",
        "broken": "",
    }
    a.batched_send(report)
    await until(lambda: resident(a) == [{"1"}] and not len(engine(s).unloading))
    # Of an older load than the one that was asked for last: it counts for nothing.
    builder = Builder(is_open=False)
    updating = asyncio.ensure_future(
        model.update(version="2", factory=FACTORY, factory_kwargs={"builder": builder})
    )
    await until(lambda: builder.built == 1)
    (replica,) = engine(s).registry.version("m", "2").replicas.values()
    a.batched_send(report | {"version": "2", "load": replica.load - 1})
    assert await version_now(model) == "1"
    assert replica.state.value == "loading"
    builder.open()
    await updating
    assert active(s) == "2"


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_damaged_parts_are_loaded_again(
    c: Any, s: Any, a: Any, monkeypatch: Any
) -> None:
    model = await deploy(c, Says(1))
    build, damaged = Artifact.build, [2]

    def arrives(self: Artifact, device: Any = None) -> Any:
        if damaged[0]:
            damaged[0] -= 1
            raise DamagedArtifact("arrived damaged", "0000")
        return build(self, device)

    monkeypatch.setattr(Artifact, "build", arrives)
    await model.update(Says(2), version="2")
    assert await version_now(model) == "2"
    damaged[0] = 100
    with pytest.raises(UpdateFailed, match="it loaded digest 0000, not") as caught:
        await model.update(Says(3), version="3")
    assert isinstance(caught.value.__cause__, DamagedArtifact)
    assert damaged[0] == 96  # four times in all
    assert await version_now(model) == "2"


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_undeploying_during_an_update(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, Says(1))
    builder = Builder(is_open=False)
    updating = asyncio.ensure_future(
        model.update(version="2", factory=FACTORY, factory_kwargs={"builder": builder})
    )
    await until(lambda: builder.built == 1)
    await model.undeploy(wait_timeout=0)
    with pytest.raises(UpdateAborted, match="'m' was undeployed during its update"):
        await updating
    builder.open()
    await until(lambda: not len(engine(s).unloading))
    assert resident(a) == [set()]


@gen_cluster(client=True, nthreads=[])
async def test_the_stages_of_a_version(c: Any, s: Any) -> None:
    model = await deploy(c, Says(1), wait=False)
    probe = Probe(is_open=False)
    builder = Builder(is_open=False)
    builder.build = lambda: Builder.build(builder) and probe  # type: ignore
    updating = asyncio.ensure_future(
        model.update(
            version="2",
            factory=FACTORY,
            factory_kwargs={"builder": builder},
            warmup=ONE,
        )
    )

    async def stage() -> str:
        return (await model.status()).version("2").stage

    await until(lambda: engine(s).registry.deployment("m").update is not None)
    assert await stage() == "registered"
    async with Worker(s.address) as worker:
        await until(lambda: builder.built == 1)
        assert await stage() == "loading"
        builder.open()
        await probe.entered()
        while await stage() != "warming":
            assert await stage() in ("loading", "warming")
        told = (await model.status()).version("2")
        assert (told.workers_ready, told.active) == (0, False)
        probe.open()
        await updating
        assert [await stage(), active(s)] == ["active", "2"]
        assert resident(worker) == [{"1", "2"}]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_arguments_that_are_wrong(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, Says(1))
    for about, error, match in [
        ({"version": ""}, ValueError, "version must be a text"),
        ({"version": "2", "min_ready": 2}, ValueError, "min_ready must be between"),
        ({"version": "2", "traffic": "5%"}, TypeError, "traffic must be a number"),
        ({"version": "2", "activate": "now"}, ValueError, "activate must be one of"),
        ({"version": "2", "auto_abort": 0.1}, TypeError, "must be an AbortPolicy"),
        ({"version": "2", "path": "x.pt2"}, TypeError, "one of: a model, factory="),
    ]:
        with pytest.raises(error, match=match):
            model.update(Says(2), **about)
    with pytest.raises(TypeError, match="one version and its share"):
        model.traffic({"1": 0.5, "2": 0.5})
    assert (await model.status()).last_update is None
    with contextlib.suppress(NoUpdate):
        await model.abort()
    await queued(s, 0)
