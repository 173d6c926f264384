"""Asking the HTTP servers of schedulers and workers, as programs outside do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from distributed.metrics import monotonic
from tornado.httpclient import AsyncHTTPClient, HTTPResponse

from tests.cluster.helpers import PATIENCE


async def ask(server: Any, path: str, method: str = "GET") -> HTTPResponse:
    """What a server answers, whatever it is."""
    url = f"http://127.0.0.1:{server.http_server.port}{path}"
    body = b"{}" if method in ("POST", "PUT", "PATCH") else None
    return await AsyncHTTPClient().fetch(
        url, method=method, body=body, raise_error=False
    )


async def ask_json(server: Any, path: str) -> tuple[int, Any]:
    """A status and plain data."""
    answer = await ask(server, path)
    return answer.code, json.loads(answer.body)


async def is_ready(server: Any, expected: bool) -> dict[str, Any]:
    """Wait until the scheduler says that it is ready, or is not; return all it says."""
    deadline = monotonic() + PATIENCE
    while True:
        status, told = await ask_json(server, "/inference/ready")
        if (status == 200) is expected:
            return dict(told)
        assert monotonic() < deadline, told
        await asyncio.sleep(0.01)


class Scrape:
    """The engine's figures of one look at ``/metrics``, read as Prometheus would."""

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self.families = {
            family.name: family
            for family in text_string_to_metric_families(text)
            if family.name.startswith("dask_inference_")
        }
        self.samples = [
            sample for family in self.families.values() for sample in family.samples
        ]

    def matching(self, name: str, **labels: str) -> Iterator[Any]:
        """Samples of a metric that have these labels, among others."""
        for sample in self.samples:
            if sample.name == f"dask_inference_{name}" and (
                labels.items() <= sample.labels.items()
            ):
                yield sample

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over all samples of a metric that have these labels."""
        return sum(sample.value for sample in self.matching(name, **labels))

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The figures of a metric that are not 0, by the value of a label."""
        found: dict[str, float] = {}
        for sample in self.matching(name, **labels):
            if sample.value:
                value = sample.labels[label]
                found[value] = found.get(value, 0.0) + sample.value
        return found

    def values(self, label: str) -> set[str]:
        """All values of a label."""
        return {s.labels[label] for s in self.samples if label in s.labels}


async def scrape(server: Any) -> Scrape:
    """Look at the figures of a server."""
    answer = await ask(server, "/metrics")
    assert answer.code == 200
    return Scrape(answer.body.decode())


def ends(figures: Scrape, **labels: str) -> dict[tuple[str, str], float]:
    """How many requests have ended, by outcome and reason."""
    return {
        (sample.labels["outcome"], sample.labels["reason"]): sample.value
        for sample in figures.matching("requests_total", **labels)
    }
