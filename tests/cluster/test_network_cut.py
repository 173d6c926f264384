"""Workers that the scheduler does not hear for a while, and that come back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from distributed import Nanny, Scheduler, Status
from distributed.utils_test import gen_cluster

from daskinfer import Model
from tests.cluster.helpers import SCHEME, until
from tests.cluster.scheduling_helpers import deploy, engine, nothing_is_left

pytestmark = pytest.mark.process

ONE_WORKER = [("127.0.0.1", 1)]
#: Dask waits for ten heartbeats at least, which are five seconds here.
IMPATIENT = {
    "distributed.scheduler.worker-ttl": "1s",
    "distributed.scheduler.allowed-failures": 0,
    "daskinfer.health.suspect-after": "500ms",
}
PATIENT = {"daskinfer.health.suspect-after": "500ms"}


def row(value: float) -> np.ndarray:
    return np.full((1, 1), float(value))


def increment() -> Callable[[Any], Any]:
    # Pickled by value: worker processes don't import the tests.
    def answer(x: np.ndarray) -> np.ndarray:
        return x + 1

    return answer


class Network:
    """What a worker's connections to the scheduler go through.

    Attributes
    ----------
    address
        Where the worker finds the scheduler.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.address = ""
        self._scheduler = scheduler
        self._writers: set[asyncio.StreamWriter] = set()
        self._whole = asyncio.Event()
        self._whole.set()

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.address = f"{SCHEME}{host}:{port}"
        try:
            yield
        finally:
            self.mend()
            server.close()
            self.reset()
            await until(lambda: not self._writers)
            await server.wait_closed()

    def cut(self) -> None:
        """Let nothing through. Nobody is told: what is sent waits."""
        self._whole.clear()

    def mend(self) -> None:
        """Let everything through again."""
        self._whole.set()

    def reset(self) -> None:
        """End all connections, and let new ones be made."""
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._whole.wait()
        host, port = self._scheduler.address.removeprefix(SCHEME).split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        both = {writer, far_writer}
        self._writers |= both
        try:
            await asyncio.gather(
                self._carry(reader, far_writer), self._carry(far_reader, writer)
            )
        finally:
            for one in both:
                one.transport.abort()
            self._writers -= both

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


async def serves(scheduler: Scheduler, model: Model, name: str) -> None:
    """See that a worker is in service, without reservations."""
    dispatcher = engine(scheduler).dispatcher
    line, counts = dispatcher.lines[model.name, "1"], dispatcher.statistics[model.name]

    def address() -> str | None:
        return scheduler.aliases.get(name)

    await until(lambda: address() in line.devices)
    await answered(model.options(workers=[name]).map([row(i) for i in range(8)]))

    def rows() -> int:
        return counts.workers[address()].rows if address() in counts.workers else 0

    # It is given requests that may go anywhere, too.
    before = rows()
    while rows() <= before:
        await answered(model.map([row(i) for i in range(16)]))
    status = await model.status()
    (worker,) = (w for w in status.workers if w.address == address())
    assert (worker.state, worker.breaker, worker.healthy) == ("ready", "closed", True)
    assert (status.waiting, status.in_flight, status.failures) == (0, 0, 0)


async def answered(futures: list[Any]) -> None:
    for i, future in enumerate(futures):
        assert np.array_equal(await future, row(i + 1))


@gen_cluster(client=True, nthreads=ONE_WORKER, Worker=Nanny, config=PATIENT, timeout=90)
async def test_a_cut_that_dask_does_not_notice(c, s, a):
    network = Network(s)
    async with network.up(), Nanny(network.address, nthreads=1, name="far") as far:
        model = await deploy(c, increment(), max_batch_size=4)
        await serves(s, model, "far")
        pid = far.pid
        network.cut()
        futures = model.map([row(i) for i in range(40)])
        await answered(futures)
        pinned = model.options(workers=["far"]).submit(row(7))
        await until(
            lambda: (
                engine(s).dispatcher.lines["m", "1"].devices[far.worker_address].stuck
            )
        )
        assert not pinned.done()
        problem = (await model.status()).problem
        assert "no worker is fit" in problem and "has not answered batch" in problem
        network.mend()
        assert np.array_equal(await pinned, row(8))
        await serves(s, model, "far")
        assert far.pid == pid and s._workers_removed_total == 0
        del futures, pinned
        await nothing_is_left(s)


@pytest.mark.parametrize(
    "how", [pytest.param("cable", marks=pytest.mark.slow), "frozen"]
)
@gen_cluster(
    client=True, nthreads=ONE_WORKER, Worker=Nanny, config=IMPATIENT, timeout=90
)
async def test_a_cut_that_is_longer_than_the_worker_ttl(c, s, a, how):
    """Dask has the nanny start another process, which finds its way back."""
    network = Network(s)
    async with network.up(), Nanny(network.address, nthreads=1, name="far") as far:
        model = await deploy(c, increment(), max_batch_size=4)
        await serves(s, model, "far")
        pid, gone = far.pid, far.worker_address
        assert pid is not None
        if how == "cable":
            network.cut()
        else:
            os.kill(pid, signal.SIGSTOP)
        try:
            futures = model.map([row(i) for i in range(40)])
            await answered(futures)
            # A network that is cut does not tell the scheduler that it is gone.
            await until(
                lambda: (
                    gone not in s.workers
                    if how == "frozen"
                    else far.pid not in (pid, None)
                )
            )
            await answered(model.map([row(i) for i in range(40)]))
        finally:
            network.mend()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        await until(lambda: s.aliases.get("far") not in (None, gone))
        assert far.pid != pid
        await serves(s, model, "far")
        del futures
        await nothing_is_left(s)


@gen_cluster(
    client=True, nthreads=ONE_WORKER, Worker=Nanny, config=IMPATIENT, timeout=90
)
async def test_connections_that_are_reset(c, s, a):
    """Dask ends the worker and its nanny; whoever runs them starts them again."""
    network = Network(s)
    async with network.up():
        model = await deploy(c, increment(), max_batch_size=4)
        async with Nanny(network.address, nthreads=1, name="far") as far:
            await serves(s, model, "far")
            futures = model.map([row(i) for i in range(40)])
            network.reset()
            await answered(futures)
            pinned = model.options(workers=["far"]).submit(row(7))
            await until(lambda: far.status is Status.closed)
        async with Nanny(network.address, nthreads=1, name="far") as far:
            assert np.array_equal(await pinned, row(8))
            await serves(s, model, "far")
            del futures, pinned
            await nothing_is_left(s)
