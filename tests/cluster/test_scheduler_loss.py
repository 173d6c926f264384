"""A scheduler process that is killed, and one that comes in its place."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import CancelledError, Client, LocalCluster
from distributed.utils import open_port
from distributed.utils_test import gen_cluster, inc, poll_for

import daskinfer
from daskinfer import (
    BatchPolicy,
    CachePolicy,
    Model,
    SchedulerLost,
    UnknownDeployment,
)
from daskinfer.loss import until_lost
from tests.cluster.helpers import SCHEME

pytestmark = pytest.mark.process

PATIENCE = 60
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start one of Dask's commands; it is gone after the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: str, *args: str) -> subprocess.Popen[bytes]:
        module = f"distributed.cli.dask_{command}"
        process = subprocess.Popen([sys.executable, "-m", module, *args])
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def start_cluster(start: Start, port: int) -> tuple[Any, Any]:
    host = ("--host", "127.0.0.1", "--port", str(port))
    options = (*host, "--dashboard-address", ":0", "--no-dashboard")
    scheduler = start("scheduler", *options)
    address = f"{SCHEME}127.0.0.1:{port}"
    worker = start("worker", address, "--no-nanny", "--no-dashboard")
    return scheduler, worker


def blocked(gate: str) -> Callable[[np.ndarray], np.ndarray]:
    # Pickled by value: worker processes don't import the tests.
    def answer(x: np.ndarray) -> np.ndarray:
        import pathlib
        import time

        while not pathlib.Path(gate).exists():
            time.sleep(0.01)
        return 2 * x

    return answer


def outcome_of(function: Callable[[], Any]) -> Callable[[], BaseException]:
    """Call a function in a thread; what is returned waits for what it raises."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()

    def wait() -> BaseException:
        thread.join(PATIENCE)
        assert raised, "it neither ended nor raised"
        return raised[0]

    return wait


def test_calls_say_that_the_scheduler_is_lost_and_can_be_made_again(
    start: Start, tmp_path: Path, loop: Any
) -> None:
    gate = tmp_path / "gate"
    port = open_port()
    address = f"{SCHEME}127.0.0.1:{port}"
    scheduler, worker = start_cluster(start, port)
    x = np.ones((1, 2))
    with (
        # It tries to connect again for longer than anything here may take.
        Client(address, timeout=10 * PATIENCE, loop=loop) as client,
        Client(address, timeout=1, loop=loop, set_as_default=False) as hasty,
    ):
        client.wait_for_workers(1, timeout=PATIENCE)
        model = daskinfer.deploy(client, blocked(str(gate)), name="blocked")
        seen = daskinfer.get(hasty, "blocked")
        futures = [*model.map([x] * 5), seen.submit(x)]
        plain = client.submit(model, x)
        waits = [
            outcome_of(lambda: model(x)),
            outcome_of(futures[0].result),
            outcome_of(lambda: daskinfer.gather(futures[1:-1])),
            outcome_of(lambda: model.predict(np.ones((8, 2)))),
            outcome_of(futures[-1].result),
            outcome_of(lambda: wait_for_death(model)),
        ]
        poll_for(lambda: model.status().requests >= 9, PATIENCE)
        scheduler.kill()
        scheduler.wait()
        worker.kill()
        for wait in waits:
            expect_lost(wait())
        # Dask's own futures keep Dask's own reason.
        with pytest.raises(CancelledError, match="scheduler-connection-lost"):
            plain.result()
        poll_for(lambda: hasty.status == "closed", PATIENCE)
        for handle, own in ((model, client), (seen, hasty)):
            calls = (
                handle.status,
                handle.undeploy,
                lambda handle=handle: handle(x),
                lambda handle=handle: handle.map([x]),
                lambda handle=handle: handle.predict(x),
                lambda own=own: daskinfer.deployments(own),
                lambda own=own: daskinfer.get(own, "blocked"),
                lambda own=own: daskinfer.deploy(own, blocked(str(gate)), name="b"),
            )
            for call in calls:
                expect_lost(outcome_of(call)())

        gate.touch()
        start_cluster(start, port)
        poll_for(lambda: client.status == "running", PATIENCE)
        with Client(address, timeout=PATIENCE, loop=loop) as new:
            new.wait_for_workers(1, timeout=PATIENCE)
            with pytest.raises(UnknownDeployment):
                daskinfer.get(new, "blocked")
            again = daskinfer.deploy(new, blocked(str(gate)), name="blocked")
            # The client that came back as well as the new one.
            for handle in (again, model):
                futures = handle.map([i * x for i in range(5)])
                for i, answer in enumerate(daskinfer.gather(futures)):
                    assert np.array_equal(answer, 2 * i * x)
                assert np.array_equal(handle(x), 2 * x)
            assert model.status().requests == 12


def noting(folder: str) -> Callable[[np.ndarray], np.ndarray]:
    # Pickled by value: worker processes don't import the tests.
    def answer(x: np.ndarray) -> np.ndarray:
        import pathlib
        import time
        import uuid

        notes = pathlib.Path(folder)
        for value in x[:, 0]:
            (notes / f"{value:g} {uuid.uuid4().hex}").touch()
        while (x >= 10).any() and not (notes / "gate").exists():
            time.sleep(0.01)
        return 2 * x

    return answer


def test_what_is_cached_is_not_computed_again_when_a_map_is_sent_again(
    start: Start, tmp_path: Path, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASK_DASKINFER__CACHE__DIRECTORY", str(tmp_path / "cache"))
    notes = tmp_path / "notes"
    notes.mkdir()
    xs = [np.full((1, 2), float(i)) for i in range(20)]

    def deploy(client: Client) -> Model:
        client.wait_for_workers(1, timeout=PATIENCE)
        return daskinfer.deploy(
            client,
            noting(str(notes)),
            name="noting",
            cache=CachePolicy(),
            batching=BatchPolicy(max_batch_size=1),
        )

    def computed() -> Counter[int]:
        found = [path.name.split()[0] for path in notes.iterdir()]
        return Counter(int(value) for value in found if value != "gate")

    port = open_port()
    address = f"{SCHEME}127.0.0.1:{port}"
    scheduler, worker = start_cluster(start, port)
    with Client(address, timeout=PATIENCE, loop=loop) as client:
        model = deploy(client)
        daskinfer.gather(model.map(xs[:10]))
        futures = model.map(xs)
        poll_for(lambda: all(f.done() for f in futures[:10]), PATIENCE)
        poll_for(lambda: computed()[10] == 1, PATIENCE)
        lost = outcome_of(lambda: daskinfer.gather(futures))
        scheduler.kill()
        scheduler.wait()
        expect_lost(lost())
        # It goes by itself, and leaves its cache in order.
        worker.wait(PATIENCE)
    (notes / "gate").touch()
    start_cluster(start, port)
    with Client(address, timeout=PATIENCE, loop=loop) as client:
        futures = deploy(client).map(xs)
        for x, answer in zip(xs, daskinfer.gather(futures), strict=True):
            assert np.array_equal(answer, 2 * x)
        assert [daskinfer.info(future).cached for future in futures[:10]] == [True] * 10
    assert all(computed()[i] == 1 for i in range(10))
    assert all(computed()[i] >= 1 for i in range(10, 20))


def wait_for_death(model: Model) -> None:
    while True:
        model.status()


def expect_lost(error: BaseException) -> None:
    assert isinstance(error, SchedulerLost), repr(error)
    assert isinstance(error, ConnectionError)
    assert "send it again" in str(error)
    assert isinstance(pickle.loads(pickle.dumps(error)), SchedulerLost)


@gen_cluster(client=True, nthreads=[("", 1)], timeout=60)
async def test_a_call_is_answered_although_all_futures_are_cancelled(c, s, a):
    answer = asyncio.Event()
    call = asyncio.ensure_future(until_lost(c, answer.wait))
    future = c.submit(inc, 1, workers=["nobody"])
    # Without Nannies nobody starts the workers again.
    with pytest.raises(asyncio.TimeoutError):
        await s.restart(stimulus_id="test", timeout=0.1)
    with pytest.raises(CancelledError):
        await future
    answer.set()
    assert await call is True
    assert not c.futures


def test_calls_say_so_too_when_the_cluster_is_closed(tmp_path: Path, loop: Any) -> None:
    x = np.ones((1, 2))
    with LocalCluster(
        n_workers=1, threads_per_worker=1, dashboard_address=":0", loop=loop
    ) as cluster:
        client = Client(cluster)
        model = daskinfer.deploy(client, blocked(str(tmp_path / "gate")))
        futures = model.map([x] * 3)
        waits = [
            outcome_of(lambda: model(x)),
            outcome_of(model.submit(x).result),
            outcome_of(lambda: daskinfer.gather(futures)),
        ]
        poll_for(lambda: model.status().requests == 5, timeout=PATIENCE)
        cluster.close()
    for wait in waits:
        expect_lost(wait())
