"""Names that are meant to do harm, and where they get."""

from __future__ import annotations

import json
import tempfile
from html import escape
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import torch
from distributed.metrics import monotonic
from distributed.utils_test import captured_logger, gen_cluster

import daskinfer
from daskinfer.caching import CachePolicy
from daskinfer.exceptions import UnknownDeployment
from daskinfer.installation import calls, install
from daskinfer.names import LONGEST
from daskinfer.planning import plan_of
from scheduler_plugins import dask_setup
from scheduler_plugins.dashboard import view
from scheduler_plugins.dashboard.summary import html
from tests.cluster.helpers import Probe, until
from tests.cluster.http_helpers import ask, ask_json, is_ready, scrape
from tests.cluster.scheduling_helpers import ONE, engine

pytest.importorskip("prometheus_client")

ONE_WORKER = [("127.0.0.1", 1)]

#: Text in HTML, JavaScript, JSON, Prometheus' format, SQL, a shell, a format string.
ODD = '<img src=x onerror="alert(1)">\'; {a="1"} 7 $(id) `id` %s {0} 🚀 识别 مرحبا'
BAD = ["../../up", "a\\b", "a\nb", "a\x00b", "a\u202eb", "x" * (LONGEST + 1), ""]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_odd_names_are_text_wherever_they_get(c: Any, s: Any, a: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with dask.config.set({"daskinfer.cache.directory": folder}):
            model = await daskinfer.deploy(
                c, torch.nn.Identity(), name=ODD, version=ODD, cache=CachePolicy()
            )
        x = np.ones((1, 4), "f4")
        for _ in range(3):
            assert np.array_equal(await model.submit(x), x)
        pinned = await daskinfer.get(c, ODD, ODD)
        assert np.array_equal(await c.submit(pinned, x), x)
        told = await daskinfer.info(await _done(model))
        assert (told.name, told.version) == (ODD, ODD)
        # Status, as an object, as text and as JSON.
        status = await model.status()
        assert (status.name, status.active_version) == (ODD, ODD)
        assert ODD in str(status)
        _, data = await ask_json(s, "/inference/status.json")
        assert data["deployments"][ODD]["active_version"] == ODD
        assert (await is_ready(s, True))["deployments"] == {ODD: None}
        # Figures.
        figures = await scrape(s)
        assert figures("requests_total", deployment=ODD) == status.requests
        assert figures("replicas", deployment=ODD, version=ODD) == 1
        # The page.
        (row,) = view.deployments(engine(s), monotonic())
        page = html(row, None)
        assert escape(ODD) in page and "<img" not in page
        # Files are named by hashes.
        for directory in (folder, a.local_directory):
            for file in Path(directory).rglob("*"):
                assert "img" not in str(file.relative_to(directory))
        await model.undeploy()


async def _done(model: Any) -> Any:
    future = model.submit(np.zeros((1, 4), "f4"))
    await future
    return future


@pytest.mark.parametrize("name", BAD, ids=ascii)
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_the_scheduler_refuses_what_a_client_did_not(
    c: Any, s: Any, a: Any, name: str
) -> None:
    with pytest.raises(ValueError, match=r"^name must"):
        await daskinfer.deploy(c, abs, name=name)
    await install(c)
    message = plan_of(abs, name="m").to_message()
    # As a client sends it that checks nothing.
    for field in ("name", "version"):
        answer = await calls(c).daskinfer_deploy(
            **{**message, field: name}, client=c.id
        )
        assert answer["status"] == "error"
        assert answer["message"].startswith(f"{field} must")
    assert not engine(s).registry.deployments

    model = await daskinfer.deploy(c, Probe(), name="m")
    with pytest.raises(ValueError, match=r"^version must"):
        await model.update(Probe(), version=name)
    update = {
        **{"name": "m", "version": name, "artifact": message["artifact"]},
        **{"policy": None, "warmup": None, "min_ready": 1.0, "manual": False},
        **{"share": 0.0, "keep_previous": True, "auto_abort": None, "timeout": None},
    }
    answer = await calls(c).daskinfer_update(**update)
    assert answer["status"] == "ValueError"
    assert answer["message"].startswith("version must")
    assert list(engine(s).registry.deployment("m").versions) == ["1"]


@pytest.mark.parametrize("name", BAD, ids=ascii)
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_is_asked_for_under_a_bad_name_becomes_no_label(
    c: Any, s: Any, a: Any, name: str
) -> None:
    await daskinfer.deploy(c, Probe(), name="m")
    with pytest.raises(UnknownDeployment):
        await daskinfer.Model(name, client=c).submit(ONE)
    figures = await scrape(s)
    assert figures.values("deployment") == {"m", ""}
    assert figures("requests_total", reason="unknown_deployment") == 1


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_bad_names_in_the_configuration(c: Any, s: Any, a: Any) -> None:
    entry = {"factory": "torch.nn:Identity"}
    entries = {name: entry for name in BAD} | {"fine": entry}
    with (
        dask.config.set({"daskinfer.deployments": entries}),
        captured_logger("distributed.inference.configured") as log,
    ):
        await dask_setup(s)
        problems = engine(s).configured.problems
        await until(lambda: not any("about to" in p for p in problems.values()))
    assert len(problems) == len(BAD)
    for shown, problem in problems.items():
        assert shown.isprintable() and len(shown) <= LONGEST
        assert "its name must" in problem and problem.isprintable()
    await until(lambda: engine(s).registry.can_answer("fine"))
    figures = await scrape(s)
    assert figures("ready", deployment="fine") == 1
    assert all(label.isprintable() for label in figures.values("deployment"))
    assert "\x00" not in log.getvalue() and "\u202e" not in log.getvalue()
    # Each line begins one of its own.
    told = [line for line in log.getvalue().splitlines() if "is not deployed" in line]
    assert len(told) == len(BAD)
    body = (await ask(s, "/inference/ready")).body
    assert set(json.loads(body)["deployments"]) == {*problems, "fine"}
