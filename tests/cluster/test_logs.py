"""What a cluster logs: all that an operator must know, and nothing of the data."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import numpy as np
import pytest
from distributed import Nanny, Worker, wait
from distributed.metrics import monotonic
from distributed.utils_test import captured_logger, gen_cluster

import daskinfer
from daskinfer import BreakerPolicy, UnknownDeployment
from daskinfer.caching import CachePolicy
from daskinfer.logs import BURST
from scheduler_plugins.dashboard import view
from scheduler_plugins.dashboard.summary import html
from tests.cluster.helpers import Probe, until
from tests.cluster.http_helpers import ask
from tests.cluster.scheduling_helpers import ONE, deploy, engine

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = [("127.0.0.1", 1)] * 2
MARKER = "4711-secret-4711"
ENGINE = "distributed.inference"


def lines(log: Any, text: str) -> list[str]:
    return [line for line in log.getvalue().splitlines() if text in line]


def ids(line: str) -> dict[str, str]:
    """What a line says that it is about."""
    end = line[line.rindex(" [") :]
    return dict(re.findall(r"(\w+)='([^']*)'", end))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_life_of_a_deployment(c: Any, s: Any, a: Any) -> None:
    with captured_logger(ENGINE) as log:
        model = await deploy(c, Probe())
        await model.update(Probe(), version="2")
        await model.rollback()
        await model.update(Probe(), version="3", activate="manual")
        await model.abort()
        await model.undeploy()
    for text, version, stimulus_id in [
        ("'m' is deployed in version '1'", "1", "daskinfer-deploy-m-1"),
        ("has loaded 'm' '1' on cpu", "1", "daskinfer-load-m-1"),
        ("'m' is being updated from version '1' to '2'", "2", "daskinfer-update-m-2"),
        ("'m' is answered by version '2'", "2", "daskinfer-activate-m-2"),
        ("'m' is answered by version '1'", "1", "daskinfer-activate-m-1"),
        ("was given up by a user", "3", "daskinfer-update-m-3"),
        ("'m' is undeployed", "1", "daskinfer-undeploy-m"),
    ]:
        found = lines(log, text)
        assert len(found) == 1, (text, log.getvalue())
        about = {"deployment": "m", "version": version, "stimulus_id": stimulus_id}
        assert ids(found[0]) == about


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_update_that_fails(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    with captured_logger(ENGINE, logging.WARNING) as log:
        with pytest.raises(daskinfer.UpdateFailed):
            await model.update(factory="no_such_module:build", version="2")
    for text, stimulus_id in [
        ("could not load 'm' '2'", "daskinfer-load-m-2"),
        ("version '2' of 'm'", "daskinfer-update-m-2"),
    ]:
        found = lines(log, text)
        about = {"deployment": "m", "version": "2", "stimulus_id": stimulus_id}
        assert about in [ids(line) for line in found], (text, found)


@gen_cluster(client=True, nthreads=ONE_WORKER, Worker=Nanny)
async def test_workers_that_die_and_that_leave(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, np.negative)
    async with Worker(s.address) as leaving:
        await until(lambda: len(engine(s).registry.version("m").ready()) == 2)
        with captured_logger(ENGINE) as log:
            await s.retire_workers([leaving.address])
            await until(lambda: bool(lines(log, "has left")))
    (line,) = lines(log, "has left")
    assert line.startswith(f"{leaving.address} has left, which had 'm' '1' [")
    assert ids(line)["deployment"] == "m" and ids(line)["stimulus_id"]
    (address,) = s.workers
    with captured_logger(ENGINE, logging.WARNING) as log:
        future = model.submit(_Killer())
        await until(lambda: bool(lines(log, "Lost")))
    (line,) = lines(log, "Lost")[:1]
    assert line.startswith(f"Lost {address}, which had 'm' '1' [")
    (line,) = lines(log, "died while it ran batch")[:1]
    assert ids(line)["stimulus_id"].startswith("daskinfer-run-m-")
    assert ids(line)["deployment"] == "m" and ids(line)["version"] == "1"
    future.release()


class _Killer:
    """An input that ends the process which reads it."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        import os

        return os._exit, (1,)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_breaker_opens_and_closes(c: Any, s: Any, a: Any, b: Any) -> None:
    from distributed.worker import get_worker

    ill = [True]

    def fail(x: Any) -> Any:
        if ill and get_worker().address == a.address:
            raise ValueError(MARKER)
        return x

    model = await deploy(
        c, Probe(fail), max_batch_size=1, breaker=BreakerPolicy(cooldown=0.05)
    )
    with captured_logger(ENGINE) as log:
        while not lines(log, "gets no requests"):
            await wait([model.submit(ONE) for _ in range(8)])
        ill.clear()
        while not lines(log, "serves 'm' again"):
            await wait([model.submit(ONE) for _ in range(8)])
    for text in ("gets no requests", "serves 'm' again"):
        line = lines(log, text)[0]
        assert line.startswith(a.address)
        assert ids(line)["stimulus_id"].startswith("daskinfer-done-m-")
        assert (ids(line)["deployment"], ids(line)["version"]) == ("m", "1")
    assert MARKER not in log.getvalue()


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_flood_of_bad_messages_is_cut(c: Any, s: Any, a: Any) -> None:
    await deploy(c, Probe())
    with captured_logger(ENGINE) as log:
        for number in range(200):
            engine(s).submit(c.id, [f"k-{number}"], name="m", nonsense=MARKER)
    told = lines(log, "Refused 1 request")
    assert len(told) == BURST
    assert "more of these are left out" in told[-1] and MARKER not in log.getvalue()
    assert ids(told[0])["deployment"] == "m"


class Unpicklable:
    """A value whose own code tells what is in it."""

    def __reduce__(self) -> Any:
        raise TypeError(f"cannot pickle {MARKER}")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(f"cannot copy {MARKER}")

    def __sizeof__(self) -> int:
        raise TypeError(f"cannot measure {MARKER}")


class Untold(Exception):
    """An exception that cannot be pickled, nor put into words."""

    def __reduce__(self) -> Any:
        raise TypeError(MARKER)

    def __repr__(self) -> str:
        return f"{MARKER}({MARKER})"


def answer(x: Any, what: str = "", **kwargs: Any) -> Any:
    if what == "raise":
        raise ValueError(f"cannot use {x!r} of {kwargs}: {MARKER}")
    if what == "untold":
        raise Untold(MARKER)
    if what == "exit":
        raise SystemExit(MARKER)
    if what == "unpicklable":
        return [Unpicklable()]
    if what == "too many":
        return [MARKER] * 7
    return x


@pytest.mark.parametrize("cached", [False, True])
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_no_data_is_in_logs_figures_or_pages(
    c: Any, s: Any, a: Any, b: Any, cached: bool
) -> None:
    cache = CachePolicy() if cached else None
    breaker = BreakerPolicy(failures=2, cooldown=0.01)
    with captured_logger("distributed", logging.INFO) as log:
        model = await deploy(c, Probe(answer), cache=cache, breaker=breaker)
        futures = []
        for x in (
            MARKER,
            [MARKER],
            {"k": MARKER},
            np.array([[MARKER]]),
            MARKER.encode(),
        ):
            for what in ("", "raise", "untold", "exit", "unpicklable", "too many"):
                futures.append(model.submit(x, what=what, password=MARKER))
                futures.append(c.submit(model, x, what=what, password=MARKER))
        # What only workers can read, or nobody.
        held = c.submit(lambda: MARKER)
        futures.append(model.submit(held, what="raise"))
        for value in (Unpicklable(),):
            with pytest.raises(TypeError):
                model.submit(value)
        await wait(futures)
        statuses = {future.status for future in futures}
        assert statuses == {"finished", "error"}
        answers = [await f for f in futures[:1] if f.status == "finished"]
        assert answers == [MARKER]
        with pytest.raises(UnknownDeployment):
            await daskinfer.Model("gone", client=c).submit(MARKER)
        told = [str(await model.status())]
        for server, path in (
            *((s, "/inference/status.json"), (s, "/inference/ready")),
            *((s, "/metrics"), (a, "/metrics")),
        ):
            told.append((await ask(server, path)).body.decode())
        (row,) = view.deployments(engine(s), monotonic())
        told.append(html(row, None))
        found = view.status(engine(s), "m")
        assert found is not None
        told += [repr(w) for w in view.workers(engine(s), found)]
        await asyncio.gather(*(future.cancel() for future in futures[:3]))
        await model.undeploy()
    assert "'m' is undeployed" in log.getvalue()
    assert MARKER not in log.getvalue()
    assert not [text for text in told if MARKER in text]
