"""Batching anew at every step against batches that stay together to their end.

Requests need very different numbers of steps (geometric lengths), and all are there at
once. In this process first: a network whose step takes as long for any number of rows,
and one that a core has to work more for if there are more; stepped by what a worker
steps them with, and in static batches that leave out who has ended. Then through a
cluster, where those are a generator that ends its rows one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from distributed import Client, as_completed

import daskinfer
from benchmarks.measure import alternate, cluster, settle
from benchmarks.models import Talker, steady_talker, wide_talker
from benchmarks.report import Ratio
from daskinfer import BatchPolicy, Model, StreamPolicy
from daskinfer.device import open_device
from daskinfer.worker.device_steps import DeviceSteps
from daskinfer.worker.execution import Item
from daskinfer.worker.slots import Slots
from daskinfer.worker.stepping import StepProducer

TITLE = "Batching at every step against static batches, geometric lengths"

ROWS = 32
MEAN_STEPS = 24
MOST_STEPS = 400


@dataclass(frozen=True)
class Figures:
    """What one way has come to."""

    tokens_per_second: float
    p95: float


def run(smoke: bool = False) -> list[Ratio]:
    """Run the same requests in all ways, in turns."""
    count, rounds = (3 * ROWS, 1) if smoke else (16 * ROWS, 2)
    lengths = np.random.default_rng(0).geometric(1 / MEAN_STEPS, count)
    lengths = np.minimum(lengths, MOST_STEPS)
    ratios = []
    for name, model, required in (
        ("steps of 5 ms", steady_talker(), 2.0),
        # Rows that have ended save work here, for both.
        ("64 MB of weights on a core", wide_talker(), 1.2),
    ):
        ways = {
            "continuous": partial(_continuous, model, lengths),
            "static": partial(_static, model, lengths),
        }
        ratios += _ratios(name, _figures(ways, rounds), required)
    with cluster(1) as client:
        clustered = {
            "continuous": _deployed(client, "steady_talker"),
            # All at once and in full batches, or they would be worse off still.
            "static": _deployed(client, "static_talker", ROWS, 100 * ROWS),
        }
        ways = {
            name: partial(_clustered, client, deployed, lengths)
            for name, deployed in clustered.items()
        }
        name = "steps of 5 ms, through a cluster"
        ratios += _ratios(name, _figures(ways, rounds), 2.0)
    return ratios


def _figures(
    ways: dict[str, Callable[[], Figures]], rounds: int
) -> dict[str, list[Figures]]:
    figures: dict[str, list[Figures]] = {name: [] for name in ways}

    def measured(name: str) -> float:
        figures[name].append(ways[name]())
        return figures[name][-1].p95

    alternate({name: partial(measured, name) for name in ways}, rounds)
    # The first round has warmed up.
    return {name: found[1:] for name, found in figures.items()}


def _ratios(
    where: str, found: dict[str, list[Figures]], required: float
) -> list[Ratio]:
    rates = {k: np.median([f.tokens_per_second for f in v]) for k, v in found.items()}
    p95 = {k: np.median([f.p95 for f in v]) for k, v in found.items()}
    return [
        Ratio(
            f"{where}: throughput, against static batches",
            float(rates["continuous"] / rates["static"]),
            required,
            detail=f"{rates['continuous']:,.0f}/s of {rates['static']:,.0f} tokens/s",
        ),
        Ratio(
            f"{where}: p95 latency, against static batches",
            float(p95["continuous"] / p95["static"]),
            1.0,
            at_most=True,
            detail=f"{p95['continuous']:.2f} s of {p95['static']:.2f} s",
        ),
    ]


def _continuous(model: Talker, lengths: Any) -> Figures:
    producer = StepProducer(DeviceSteps(model, open_device("cpu")), Slots(ROWS))
    started = perf_counter()
    producer.add(
        [
            Item(key, lambda n=n: ((torch.tensor([[n]]),), {}))  # type: ignore[misc]
            for key, n in enumerate(lengths.tolist())
        ]
    )
    ended: list[float] = []
    tokens = 0
    while producer.live:
        for emission in producer.advance(0.005):
            tokens += len(emission.chunks)
            if emission.ended:
                ended.append(perf_counter() - started)
    return _summed(tokens, lengths, ended)


@torch.inference_mode()
def _static(model: Talker, lengths: Any) -> Figures:
    started = perf_counter()
    waiting = deque(lengths.tolist())
    ended: list[float] = []
    tokens = 0
    while waiting:
        batch = [waiting.popleft() for _ in range(min(ROWS, len(waiting)))]
        state = model.start(torch.tensor(batch)[:, None])
        while len(state["left"]):
            outputs, finished = model.step(state)
            tokens += len(outputs)
            ended += [perf_counter() - started] * int(finished.sum())
            # Those that have ended cost nothing more.
            state = {name: rows[~finished] for name, rows in state.items()}
    return _summed(tokens, lengths, ended)


def _summed(tokens: int, lengths: Any, ended: list[float]) -> Figures:
    assert tokens == lengths.sum()
    assert len(ended) == len(lengths)
    return Figures(tokens / max(ended), float(np.quantile(ended, 0.95)))


def _deployed(
    client: Client, factory: str, min_batch_size: int = 1, streams: int = 2 * ROWS
) -> Model:
    return daskinfer.deploy(
        client,
        factory=f"benchmarks.models:{factory}",
        name=factory,
        batching=BatchPolicy(max_batch_size=ROWS, min_batch_size=min_batch_size),
        streaming=StreamPolicy(max_streams=streams),
    )


def _clustered(client: Client, model: Model, lengths: Any) -> Figures:
    started = perf_counter()
    futures = model.map([np.array([[n]]) for n in lengths.tolist()])
    ended: list[float] = []
    for _ in as_completed(futures):
        ended.append(perf_counter() - started)
    tokens = sum(map(len, daskinfer.gather(futures)))
    del futures, _
    settle(client)
    return _summed(tokens, lengths, ended)
