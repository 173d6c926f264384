"""The files for Prometheus and Grafana name nothing that is not there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import promql_parser
import pytest
import yaml
from distributed import wait
from distributed.utils_test import gen_cluster

from daskinfer.caching import CachePolicy
from tests.cluster.helpers import Probe
from tests.cluster.http_helpers import Scrape, scrape
from tests.cluster.scheduling_helpers import ONE, deploy

ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy" / "prometheus" / "daskinfer.rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "daskinfer.json"
PAGE = ROOT / "docs" / "operations.md"

NAME = re.compile(r"\bdask_(inference_\w+)")
SELECTOR = re.compile(r"\bdask_(inference_\w+)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    for rule in rules():
        yield rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"]


async def figures_of_everything(c: Any, s: Any, a: Any) -> Scrape:
    """What is told after an answer, a failure, an attempt that did not end, a hit."""

    def halve(x: np.ndarray) -> np.ndarray:
        if (x < 0).any():
            raise ValueError("negative")
        return x / 2

    model = await deploy(
        c, Probe(halve), max_batch_size=2, warmup=ONE, cache=CachePolicy()
    )
    for value in (1.0, 1.0, -1.0):
        await wait(model.submit(np.full((1, 1), value)))
    line = s.plugins["daskinfer"].dispatcher.lines["m", "1"]
    line.figures.measures.interrupted["late"] += 1
    # As on a worker with a device.
    a.plugins["daskinfer-runtime"].telemetry.latest["npu"] = {
        "device": "npu:0",
        "name": "Ascend910B1",
        "memory-used": 1 << 30,
        "memory-total": 1 << 35,
        "utilization": 50.0,
    }
    return await scrape(s)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_what_the_files_name_is_there(c, s, a):
    pytest.importorskip("prometheus_client")
    figures = await figures_of_everything(c, s, a)
    labels: dict[str, set[str]] = {}
    for sample in figures.samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    told = {name.removeprefix("dask_") for name in labels}
    for expression in expressions():
        names = set(NAME.findall(expression))
        assert names, expression
        assert names <= told, expression
        for name, selector in SELECTOR.findall(expression):
            assert set(LABEL.findall(selector)) <= labels[f"dask_{name}"], expression

    # The page tells of everything, and of nothing else.
    page = PAGE.read_text("utf-8")
    families = {
        family.name.removeprefix("dask_") + "_total" * (family.type == "counter")
        for family in figures.families.values()
    }
    described = set(re.findall(r"^\| `dask_(inference_\w+)` \|", page, re.MULTILINE))
    assert described == families


def test_alerts_say_what_is_wrong_and_where() -> None:
    page = PAGE.read_text("utf-8")
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "{{ $labels." in rule["annotations"]["summary"]
        assert f"| `{rule['alert']}` |" in page


def test_panels_have_places_of_their_own() -> None:
    places = set()
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in places, panel["title"]
                places.add((x, y))


def test_prometheus_can_read_the_expressions() -> None:
    for expression in expressions():
        # Grafana fills these in.
        filled = expression.replace("$__rate_interval", "5m")
        promql_parser.parse(filled.replace("$deployment", ".*"))
