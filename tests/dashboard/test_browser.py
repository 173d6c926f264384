"""The page as a browser shows it."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import pytest
from distributed.metrics import monotonic
from distributed.utils import sync

import daskinfer
from scheduler_plugins import dask_setup
from scheduler_plugins.dashboard.page import PARTS
from tests.dashboard.browser import MARKS, Page
from tests.dashboard.serving import (
    Sleeper,
    address,
    cluster,
    fleet_of,
    grows,
    load,
)

pytestmark = MARKS

HOSTILE = "<img src=x onerror=\"document.title='pwned'\">"


def settled(page: Page, source: str, **expected: Any) -> dict[str, list[Any]]:
    """Wait until columns of a source are as expected; return all of them."""

    def found() -> dict[str, list[Any]] | None:
        columns = page.columns(source)
        is_so = all(columns[name] == values for name, values in expected.items())
        return columns if is_so else None

    return page.until(found)


def test_under_load_it_shows_what_the_plugin_knows(page: Page) -> None:
    with cluster(page, 4) as client:
        model = daskinfer.deploy(
            client, Sleeper(), name="resnet50", cache=daskinfer.CachePolicy()
        )
        daskinfer.deploy(client, Sleeper(), name="bert")
        page.open(address(client, "inference?deployment=resnet50"))
        with load(model, 100):
            # It moves by itself, what is drawn as well as what is known.
            grows(page, lambda: page.columns("deployments")["requests"][1])
            grows(page, lambda: len(page.columns("requests")["at"]))
            drawn = page.text("deployments-table")
            page.until(lambda: page.text("deployments-table") != drawn)
            page.until(lambda: page.columns("requests")["answered"][-1] > 0)
            page.until(lambda: max(page.columns("workers")["busy"]) > 0)
            page.until(lambda: page.columns("cache")["hits"][-1] > 0)
            page.until(lambda: page.columns("throughput")["rate"])
            # Of the rows of late: those who wait long enough find none.
            page.until(
                lambda: sum(page.columns("workers")["share"]) == pytest.approx(1.0)
            )
            page.until(lambda: len(page.columns("requests")["at"]) > 20)
            page.picture("four-workers")
            assert page.flaws() == []
        status = model.status()
        table = settled(
            page,
            "deployments",
            requests=[0, status.requests],
            successes=[0, status.successes],
            waiting=[0, 0],
        )
        assert table["name"] == ["bert", "resnet50"]
        assert table["p99"][1] == pytest.approx(1e3 * status.latency.p99)
        assert f"{status.successes:,}" in page.until(
            lambda: page.text("deployments-table")
        )
        health = settled(page, "health", rows=[w.rows for w in status.workers])
        assert health["worker"] == [w.address.split("://")[1] for w in status.workers]
        assert health["breaker"] == ["closed"] * 4
        latency = status.version("1").latency[status.workers[0].device_class]
        curve = page.columns("throughput")
        assert curve["rows"] == [rows for rows, _, _ in latency]
        assert curve["rate"] == pytest.approx([rows / s for rows, s, _ in latency])
        hits = sum(tier.hits for tier in status.cache.results.tiers)
        page.until(lambda: sum(page.columns("cache")["hits"]) == hits)

        # Another one is chosen.
        page.choose("bert")
        settled(page, "versions", requests=[0])
        assert "No request so far" in page.text("summary-text")


def test_from_nothing_to_one_worker_and_back(page: Page) -> None:
    prefix = "/proxy/dask"
    with cluster(page, 1, http_prefix=prefix) as client:
        sync(client.loop, dask_setup, client.cluster.scheduler)
        page.open(address(client, prefix=prefix))
        assert page.has("nothing")
        assert "daskinfer.deploy(client, net)" in page.text("nothing")
        page.picture("nothing-deployed")
        assert page.flaws() == []

        model = daskinfer.deploy(client, Sleeper(), name=HOSTILE)
        page.until(lambda: page.has("everything"))
        model(np.ones((3, 4), "float32"))
        settled(page, "deployments", name=[HOSTILE], requests=[1])
        assert page.value("deployment", "value") == HOSTILE
        # Whatever it is called, it is text.
        page.until(lambda: HOSTILE in page.text("deployments-table"))
        assert "<img" not in page.markup("deployments-table")
        assert page.driver.title != "pwned"
        page.until(lambda: len(page.columns("requests")["at"]) > 5)
        # What comes into an empty page has colours as well.
        assert all(page.fills("workers-plot"))
        page.picture("one-worker")
        assert page.flaws() == []

        model.undeploy()
        page.until(lambda: page.has("nothing"))


def test_every_part_has_a_page(page: Page) -> None:
    with cluster(page, 1) as client:
        model = daskinfer.deploy(client, Sleeper(), name="resnet50")
        model(np.ones((3, 4), "float32"))
        for part in PARTS:
            page.open(address(client, f"individual-inference-{part.name}"))
            assert page.columns(part.name) is not None
            assert page.flaws() == []
            assert page.complaints() == []


def test_sixty_four_workers_some_of_which_are_ill(page: Page) -> None:
    # They have no tasks to look after, and nobody to ask.
    quiet = {"distributed.scheduler.active-memory-manager.start": False}
    with (
        dask.config.set(quiet),
        cluster(page, 0) as client,
        fleet_of(client, 64) as fleet,
    ):
        ill = fleet.addresses[10:12]

        async def fall_ill() -> None:
            for ill_one in ill:
                fleet.line.health.open(ill_one, monotonic(), f"late {HOSTILE}")
            fleet.ask(30, seconds_ago=2.0)

        sync(client.loop, fall_ill)
        page.open(address(client))
        health = page.columns("health")
        assert len(health["worker"]) == 64
        # They come first, with the reason.
        assert health["worker"][:2] == [a.split("://")[1] for a in ill]
        assert all(HOSTILE in reason for reason in health["reason"][:2])
        assert health["breaker"][2:] == ["closed"] * 62
        assert "<img" not in page.markup("health-table")
        workers = page.columns("workers")
        assert len(workers["place"]) == 64
        (ready,) = page.columns("deployments")["ready"]
        assert ready == "64 of 64, 2 unfit"
        (waits,) = page.columns("deployments")["oldest"]
        assert waits >= 2.0
        page.until(lambda: max(page.columns("workers")["busy"]) > 0)
        page.until(lambda: len(page.columns("requests")["at"]) > 10)
        page.picture("sixty-four-workers")
        assert page.flaws() == []


def test_what_does_not_fit_is_found(page: Page) -> None:
    def flaws(change: str) -> str:
        """What is found after a change, which the server undoes soon."""
        model = "const model = name => Bokeh.documents[0].get_model_by_name(name);"

        def found() -> list[str]:
            page.driver.execute_script(model + change)
            return page.flaws()

        return " ".join(page.until(found))

    with cluster(page, 1) as client:
        daskinfer.deploy(client, Sleeper(), name="resnet50")
        page.open(address(client))
        page.until(lambda: page.has("everything"))
        assert page.flaws() == []
        title = "model('throughput-plot').title.text = 'Learned '.repeat(20)"
        assert "the title of Learned" in flaws(title)
        text = "model('summary-text').text = '<pre>' + 'long '.repeat(300) + '</pre>'"
        assert "long  is cut" in flaws(text)
        head = (
            "const columns = model('health-table').columns;"
            "columns[1].title = 'breaker '.repeat(20);"
            "model('health-table').columns = [...columns]"
        )
        assert "health-table: breaker" in flaws(head)
        wide = "model('deployments-table').styles = {'min-width': '1500px'}"
        assert "the page is" in flaws(wide)


def test_versions_in_a_rollout(page: Page) -> None:
    with cluster(page, 2) as client:
        model = daskinfer.deploy(client, Sleeper(), name="resnet50")
        model.update(Sleeper(), version="2", traffic=0.25)
        page.open(address(client))
        found = page.columns("versions")
        assert (found["version"], found["stage"]) == (["1", "2"], ["active", "canary"])
        assert found["share"] == [0.75, 0.25]
        with load(model, 50):
            grows(page, lambda: page.columns("versions")["requests"][1])
        model.promote()
        settled(page, "versions", stage=["previous", "active"], share=[0, 1])
