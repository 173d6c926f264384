"""Large weights: from the client to the scheduler, to workers, and among these."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask.config
import numpy as np
import pytest
import torch
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import config, protocol
from daskinfer.artifact import Artifact, chunks
from daskinfer.artifact.digests import version_digest
from daskinfer.artifact.partial import FilePartial
from daskinfer.artifact.store import Store
from daskinfer.installation import install
from daskinfer.worker.weights import Weights
from scheduler_plugins.distribution import Entry
from tests.cluster.helpers import PATIENCE, linear, until
from tests.cluster.scheduling_helpers import engine

#: Of 1 MiB of weights, so that there are 17 of them.
CHUNK = 64 * 1024
X = torch.ones(1, 512)
TWO = [("127.0.0.1", 1)] * 2
FOUR = [("127.0.0.1", 1)] * 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all workers of this process keep weights."""
    directory, get = tmp_path / "store", config.get

    def configured(key: str) -> Any:
        return str(directory) if key == "artifacts.directory" else get(key)

    monkeypatch.setattr(config, "get", configured)
    return directory


def large(seed: int = 0) -> torch.nn.Module:
    return linear(512, 512, seed).eval()


def weights_of(worker: Worker) -> Weights:
    return worker.plugins["daskinfer-runtime"].loader._builder.weights  # type: ignore[attr-defined, no-any-return]


async def separate(client: Client, workers: Any, folder: Path) -> None:
    """Have workers in one process be on hosts of their own."""
    await install(client)
    for number, worker in enumerate(workers):
        weights_of(worker)._store = Store(folder / f"of-{number}", 2**30)


def entry(scheduler: Scheduler) -> Entry:
    (found,) = engine(scheduler).distribution.entries.values()
    return found


def sends(server: Any) -> Counter[int]:
    """Count what a scheduler or a worker sends from now on, by where it starts."""
    counts: Counter[int] = Counter()
    handler = server.handlers[protocol.CHUNK]

    async def counted(weights: str, start: int, nbytes: int) -> Any:
        counts[start] += 1
        return await handler(weights=weights, start=start, nbytes=nbytes)

    server.handlers[protocol.CHUNK] = counted
    return counts


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


async def answers(model: Any, net: torch.nn.Module, *workers: Worker) -> None:
    """Each worker must answer as the network does."""
    for worker in workers:
        future = model.options(workers=[worker.address]).submit(X)
        torch.testing.assert_close(await future, net(X))


# From each other


@gen_cluster(client=True, nthreads=FOUR)
async def test_weights_come_from_other_workers_too(
    c: Any, s: Any, *workers: Any, tmp_path: Path
) -> None:
    await separate(c, workers, tmp_path)
    origin, peers = sends(s), [sends(worker) for worker in workers]
    net = large()
    model = await daskinfer.deploy(c, net, name="m")
    await answers(model, net, *workers)
    found = entry(s)
    assert origin.keys() == {i * CHUNK for i in range(17)}
    assert max(origin.values()) <= 2
    assert max(found.swarm.sent) <= 2
    assert sum(origin.values()) + sum(sum(p.values()) for p in peers) == 4 * 17
    assert sum(bool(p) for p in peers) >= 2
    assert len(files(tmp_path)) == 4


@gen_cluster(client=True, nthreads=TWO)
async def test_workers_of_a_host_fetch_once(
    c: Any, s: Any, a: Any, b: Any, folder: Path
) -> None:
    await install(c)
    origin, peers = sends(s), [sends(a), sends(b)]
    net = large()
    model = await daskinfer.deploy(c, net, name="m")
    await answers(model, net, a, b)
    assert set(origin.values()) == {1} and len(origin) == 17
    assert not any(peers)
    (file,) = files(folder)
    assert file.name == f"{entry(s).spool.chunks.key}.v1"
    one, other = (
        w.plugins["daskinfer-runtime"].loader.find("m", "1").function for w in (a, b)
    )
    # Memory of their own, as soon as one writes to it.
    with torch.no_grad():
        one.weight.zero_()
    torch.testing.assert_close(other.weight, net.weight)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_worker_that_starts_again_finds_its_weights(
    c: Any, s: Any, a: Any, folder: Path
) -> None:
    net = large()
    model = await daskinfer.deploy(c, net, name="m")
    origin, peer = sends(s), sends(a)
    async with Worker(s.address, nthreads=1) as b:
        await until(lambda: len(engine(s).registry.version("m").ready()) == 2)
        await answers(model, net, b)
        assert not origin and not peer
        # It is a source at once.
        await a.close()
        async with Worker(s.address, nthreads=1) as far:
            await until(lambda: "daskinfer-runtime" in far.plugins)
            weights_of(far)._store = Store(folder.parent / "far", 2**30)
            entry(s).swarm._busy[""] = 2  # the scheduler has no time
            peer = sends(b)
            await until(lambda: len(engine(s).registry.version("m").ready()) == 2)
            await answers(model, net, far)
            assert len(peer) == 17 and not origin


@gen_cluster(client=True, nthreads=TWO)
async def test_a_second_deployment_of_the_same_weights(
    c: Any, s: Any, a: Any, b: Any, folder: Path
) -> None:
    await install(c)
    net = large()
    one = await daskinfer.deploy(c, net, name="one")
    origin = sends(s)
    uploads = []
    upload = s.handlers[protocol.UPLOAD]
    s.handlers[protocol.UPLOAD] = lambda **kwargs: uploads.append(1) or upload(**kwargs)
    two = await daskinfer.deploy(c, net, name="two")
    await answers(two, net, a, b)
    assert not origin and not uploads
    assert len(engine(s).distribution.entries) == 1
    await one.undeploy()
    assert len(engine(s).distribution.entries) == 1
    await answers(two, net, a, b)
    await two.undeploy()
    assert not engine(s).distribution.entries
    assert not engine(s).distribution._offers


@gen_cluster(client=True, nthreads=TWO)
async def test_versions_let_go_of_their_weights(
    c: Any, s: Any, a: Any, b: Any, folder: Path
) -> None:
    entries = {}
    model = await daskinfer.deploy(c, large(), name="m")
    entries["1"] = set(engine(s).distribution.entries)
    for version in ("2", "3"):
        net = large(int(version))
        await model.update(net, version=version)
        await answers(model, net, a, b)
        entries[version] = set(engine(s).distribution.entries)
    assert {v: len(found) for v, found in entries.items()} == {"1": 1, "2": 2, "3": 2}
    assert not entries["1"] & entries["3"]  # retired
    await model.rollback()
    await answers(model, large(2), a, b)


@gen_cluster(client=True, nthreads=TWO)
async def test_an_update_that_fails_lets_go_of_its_weights(
    c: Any, s: Any, a: Any, b: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = large()
    model = await daskinfer.deploy(c, net, name="m")
    entries = set(engine(s).distribution.entries)
    build = Artifact.build

    def fails(self: Artifact, device: Any = None) -> Any:
        raise ArithmeticError("it cannot be built")

    monkeypatch.setattr(Artifact, "build", fails)
    with pytest.raises(daskinfer.UpdateFailed):
        await model.update(large(2), version="2")
    assert set(engine(s).distribution.entries) == entries
    with pytest.raises(daskinfer.VersionExists):
        await model.update(large(2), version="1")
    assert set(engine(s).distribution.entries) == entries

    def is_free() -> bool:
        Store(folder, 0).trim()
        return len(files(folder)) == 1

    # Nor does any process hold the file, once the other worker has failed too.
    await until(is_free)
    monkeypatch.setattr(Artifact, "build", build)
    await model.update(large(2), version="2")
    await answers(model, large(2), a, b)


def test_threads_of_one_process(folder: Path) -> None:
    """Where messages are not even put into bytes."""
    with Client(processes=False, n_workers=2, dashboard_address=":0") as client:
        net = large()
        model = daskinfer.deploy(client, net, name="m")
        torch.testing.assert_close(model.submit(X).result(), net(X))
    assert len(files(folder)) == 1


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_the_digest_covers_the_policy(c: Any, s: Any, a: Any) -> None:
    net = linear()
    digests = []
    for number, rows in enumerate((8, 8, 16)):
        policy = daskinfer.BatchPolicy(max_batch_size=rows)
        model = await daskinfer.deploy(c, net, name=f"m{number}", batching=policy)
        (version,) = (await model.status()).versions
        digests.append(version.digest)
        future = model.submit(torch.ones(1, 4))
        await future
        assert (await daskinfer.info(future)).digest == version.digest
        content = Artifact.from_object(net).digest
        policy_now = engine(s).registry.version(f"m{number}").policy
        assert version.digest == version_digest(content, vars(policy_now))
    assert digests[0] == digests[1] != digests[2]


# What goes wrong with a source


@gen_cluster(client=True, nthreads=TWO)
async def test_a_peer_that_sends_damaged_chunks(
    c: Any, s: Any, a: Any, b: Any, tmp_path: Path
) -> None:
    await separate(c, [a, b], tmp_path)
    net = large()
    model = await daskinfer.deploy(c, net, name="m")
    (damaged,) = files(tmp_path / "of-0")
    damaged.write_bytes(b"?" * damaged.stat().st_size)
    lies = sends(a)
    async with Worker(s.address, nthreads=1) as far:
        await until(lambda: "daskinfer-runtime" in far.plugins)
        weights_of(far)._store = Store(tmp_path / "far", 2**30)
        await until(lambda: len(engine(s).registry.version("m").ready()) == 3)
        await answers(model, net, far)
    # Those that were on their way when the first came damaged.
    assert 1 <= sum(lies.values()) <= 4
    assert files(tmp_path / "far")[0].read_bytes() == (
        files(tmp_path / "of-1")[0].read_bytes()
    )


@contextlib.asynccontextmanager
async def hanging(worker: Worker) -> Any:
    """Have a worker never send a chunk; gives an event that says that it was asked."""
    asked = asyncio.Event()
    handler = worker.handlers[protocol.CHUNK]

    async def hang(**kwargs: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    worker.handlers[protocol.CHUNK] = hang
    yield asked
    worker.handlers[protocol.CHUNK] = handler


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "times out"])
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_peer_that_dies_or_hangs_in_the_middle(
    c: Any, s: Any, a: Any, tmp_path: Path, dies: bool
) -> None:
    await separate(c, [a], tmp_path)
    net = large()
    model = await daskinfer.deploy(c, net, name="m")
    async with hanging(a) as asked, Worker(s.address, nthreads=1) as far:
        await until(lambda: "daskinfer-runtime" in far.plugins)
        weights_of(far)._store = Store(tmp_path / "far", 2**30)
        with timeout_of_chunks("60s" if dies else "0.2s"):
            await asyncio.wait_for(asked.wait(), PATIENCE)
            if dies:
                await a.close()
            await answers(model, net, far)
    assert max(entry(s).swarm.sent) <= 3


@contextlib.contextmanager
def timeout_of_chunks(timeout: str) -> Iterator[None]:
    with dask.config.set({"daskinfer.artifacts.timeout": timeout}):
        yield


@gen_cluster(client=True, nthreads=TWO, config={"daskinfer.artifacts.timeout": "200ms"})
async def test_a_worker_that_stands_still_in_the_middle(
    c: Any, s: Any, a: Any, b: Any, tmp_path: Path
) -> None:
    """Nobody waits for what it should have by now; later it goes on."""
    await separate(c, [a, b], tmp_path)
    held_back: list[dict[str, Any]] = []
    take = a.stream_handlers[protocol.TAKE]
    a.stream_handlers[protocol.TAKE] = lambda **message: held_back.append(message)
    net = large()
    model = await daskinfer.deploy(c, net, name="m", wait=False)
    registry = engine(s).registry
    await until(
        lambda: [r.address for r in registry.version("m").ready()] == [b.address]
    )
    assert held_back
    await answers(model, net, b)
    a.stream_handlers[protocol.TAKE] = take
    for message in held_back:
        take(**message)
    await until(lambda: len(registry.version("m").ready()) == 2)
    await answers(model, net, a)


@gen_cluster(client=True, nthreads=TWO, config={"daskinfer.artifacts.timeout": "200ms"})
async def test_a_process_of_the_host_that_begins_and_stands_still(
    c: Any, s: Any, a: Any, b: Any, folder: Path
) -> None:
    """The others do not wait for it for ever."""
    net = large()
    found = Artifact.from_object(net).chunks
    assert found is not None
    standing = Store(folder, 2**30).begin(found)
    assert standing is not None
    model = await daskinfer.deploy(c, net, name="m")
    await answers(model, net, a, b)
    names = [file.name for file in files(folder)]
    assert names == [f"{found.key}.v1", f"{found.key}.v1.part"]
    standing.abandon()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_scheduler_that_cannot_send(
    c: Any, s: Any, a: Any, tmp_path: Path
) -> None:
    await separate(c, [a], tmp_path)

    async def fails(**kwargs: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    s.handlers[protocol.CHUNK] = fails
    with pytest.raises(daskinfer.InferenceError, match=r"5 times.*Input/output error"):
        await daskinfer.deploy(c, large(), name="m")
    assert not engine(s).distribution.entries
    # Nobody holds the file that was begun.
    del s.handlers[protocol.CHUNK]
    s.handlers.update(engine(s).distribution.calls())
    net = large()
    model = await daskinfer.deploy(c, net, name="m")
    await answers(model, net, a)


@gen_cluster(client=True, nthreads=TWO)
async def test_undeployed_while_weights_are_on_their_way(
    c: Any, s: Any, a: Any, b: Any, folder: Path
) -> None:
    await install(c)
    net = large()
    handler = s.handlers[protocol.CHUNK]
    async with hanging(s) as asked:
        model = await daskinfer.deploy(c, net, name="m", wait=False)
        await asyncio.wait_for(asked.wait(), PATIENCE)
        await model.undeploy()
        assert not engine(s).distribution.entries
        assert not weights_of(a)._downloads and not weights_of(b)._downloads
    assert s.handlers[protocol.CHUNK] is handler
    again = await daskinfer.deploy(c, net, name="m")
    await answers(again, net, a, b)


# What goes wrong with a disk


@gen_cluster(client=True, nthreads=TWO)
async def test_a_directory_that_is_none(
    c: Any, s: Any, a: Any, b: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.touch()
    await serves_from_memory(c, s, a, b, caplog)


def no_room(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fills_up(write: Callable[..., bool]) -> Callable[..., bool]:
    def limited(self: FilePartial, index: int, data: memoryview) -> bool:
        if len(self.whole) > 5:
            no_room()
        return write(self, index, data)

    return limited


@pytest.mark.parametrize("at", ["once", "in the middle", "the end"])
@gen_cluster(client=True, nthreads=TWO)
async def test_a_disk_that_is_full(
    c: Any,
    s: Any,
    a: Any,
    b: Any,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    if at == "once":
        monkeypatch.setattr(FilePartial, "_prepare", no_room)
    elif at == "the end":
        monkeypatch.setattr(FilePartial, "finish", no_room)
    else:
        monkeypatch.setattr(FilePartial, "write", fills_up(FilePartial.write))
    await serves_from_memory(c, s, a, b, caplog)


async def serves_from_memory(
    c: Client, s: Scheduler, a: Worker, b: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "distributed.inference"):
        for number in range(2):
            net = large(number)
            model = await daskinfer.deploy(c, net, name=f"m{number}")
            await answers(model, net, a, b)
    told = [r.getMessage() for r in caplog.records if "cannot keep" in r.getMessage()]
    assert len(told) == 2  # each of the two, once
    assert all("daskinfer.artifacts.directory" in text for text in told)


@pytest.mark.parametrize("damage", ["torn", "flipped", "partial"])
@gen_cluster(client=True, nthreads=TWO)
async def test_files_that_were_damaged_are_fetched_again(
    c: Any, s: Any, a: Any, b: Any, folder: Path, damage: str
) -> None:
    net = large()
    model = await daskinfer.deploy(c, net, name="m")
    await model.undeploy()
    (file,) = files(folder)
    whole = file.read_bytes()
    if damage == "torn":
        file.write_bytes(whole[: 3 * CHUNK + 10])
    elif damage == "flipped":
        file.write_bytes(whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
    else:
        file.rename(file.with_name(f"{file.name}.part"))
        os.truncate(f"{file}.part", 10 * CHUNK + 10)
    origin = sends(s)
    again = await daskinfer.deploy(c, net, name="m")
    await answers(again, net, a, b)
    assert files(folder) == [file] and file.read_bytes() == whole
    assert len(origin) == (7 if damage == "partial" else 17)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_file_that_is_changed_while_it_is_loaded(
    c: Any, s: Any, a: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is told to load again, and fetches it again."""
    build, times = Artifact.build, [1]

    def changes(self: Artifact, device: Any = None) -> Any:
        model = build(self, device)
        if times.pop() if times else 0:
            (file,) = files(folder)
            with open(file, "r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                opened.write(b"?")
        return model

    monkeypatch.setattr(Artifact, "build", changes)
    net = large()
    model = await daskinfer.deploy(c, net, name="m")
    await answers(model, net, a)
    (replica,) = engine(s).registry.version("m").replicas.values()
    assert (replica.load, replica.reloads) == (2, 0)


# What goes wrong with a client


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_client_that_leaves_before_it_has_sent_everything(
    c: Any, s: Any, a: Any, folder: Path
) -> None:
    await install(c)
    began = asyncio.Event()

    async def hang(**kwargs: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    upload = s.handlers[protocol.UPLOAD]
    s.handlers[protocol.UPLOAD] = hang
    async with Client(s.address, asynchronous=True) as other:
        deploying = asyncio.ensure_future(
            daskinfer.deploy(other, large(), name="m")  # type: ignore[arg-type]
        )
        await asyncio.wait_for(began.wait(), PATIENCE)
        assert len(engine(s).distribution.entries) == 1
    with contextlib.suppress(Exception):
        await deploying
    await until(lambda: not engine(s).distribution.entries)
    s.handlers[protocol.UPLOAD] = upload
    net = large()
    model = await daskinfer.deploy(c, net, name="m")
    await answers(model, net, a)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_scheduler_without_room(
    c: Any, s: Any, a: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(daskinfer.DeploymentFailed, match=r"temporary-directory: No sp"):
        await daskinfer.deploy(c, large(), name="m")
    assert not engine(s).distribution.entries
    assert await daskinfer.deployments(c) == []


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_weights_that_arrive_damaged(c: Any, s: Any, a: Any) -> None:
    await install(c)
    upload = s.handlers[protocol.UPLOAD]
    s.handlers[protocol.UPLOAD] = lambda offer, chunk, data: upload(
        offer=offer, chunk=chunk, data=b"?" * CHUNK if chunk == 3 else data
    )
    with pytest.raises(daskinfer.DeploymentFailed, match=r"chunk 3.*damaged"):
        await daskinfer.deploy(c, large(), name="m")
    assert not engine(s).distribution.entries


# Whatever it is


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export's own
@pytest.mark.parametrize("kind", ["script", "export", "pickled"])
@gen_cluster(client=True, nthreads=TWO)
async def test_files_of_models(
    c: Any, s: Any, a: Any, b: Any, folder: Path, tmp_path: Path, kind: str
) -> None:
    net, path = large(), tmp_path / "net.pt"
    if kind == "script":
        torch.jit.script(net).save(path)
    elif kind == "export":
        torch.export.save(torch.export.export(net, (X,)), path.with_suffix(".pt2"))
        path = path.with_suffix(".pt2")
    else:
        torch.save(net, path)
        with pytest.raises(ValueError, match="trusted=True"):
            daskinfer.deploy(c, path=str(path))
    trusted = kind == "pickled"
    model = await daskinfer.deploy(c, path=str(path), trusted=trusted)
    await answers(model, net, a, b)
    assert len(files(folder)) == 1


@gen_cluster(client=True, nthreads=TWO)
async def test_callables_with_large_arrays(
    c: Any, s: Any, a: Any, b: Any, folder: Path
) -> None:
    """They may write to them, as before."""
    table = np.arange(2.0**17)

    def add(x: Any) -> Any:
        table[0] += 1
        return x + table[1]

    model = await daskinfer.deploy(c, add, name="m")
    for worker in (a, b):
        future = model.options(workers=[worker.address]).submit(np.ones((1, 1)))
        assert (await future)[0, 0] == 2
    assert table[0] == 0
    assert len(files(folder)) == 1
