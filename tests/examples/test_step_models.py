"""The examples that advance step by step say what they say alone."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daskinfer import run_steps
from daskinfer.device import open_device
from daskinfer.worker.device_steps import DeviceSteps
from daskinfer.worker.execution import Item
from daskinfer.worker.slots import Slots
from daskinfer.worker.stepping import StepProducer
from examples import characters

#: What is asked for, and the turn at which it comes.
Arrivals = list[tuple[tuple[Any, ...], int]]


def told(model: torch.nn.Module, arrivals: Arrivals, allowed: Any) -> list[list[Any]]:
    """What each request is told, when all share the steps of a model."""
    steps, ticks = DeviceSteps(model, open_device("cpu")), count()
    slots = Slots(8, allowed, steps.room)
    producer = StepProducer(steps, slots, clock=lambda: next(ticks) * 1e-3)
    chunks: list[list[Any]] = [[] for _ in arrivals]
    for turn in count():
        producer.add(
            [
                Item(key, lambda call=call: (call, {}))
                for key, (call, at) in enumerate(arrivals)
                if at == turn
            ]
        )
        for emission in producer.advance(0.0):
            assert emission.error is None
            chunks[emission.key] += emission.chunks
        if turn > 10 and not producer.live:
            return chunks
    raise AssertionError


def mixes(prompts: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    one = st.tuples(prompts, st.integers(1, 12), st.integers(0, 10))
    return st.lists(one, min_size=1, max_size=8)


sizes = st.sampled_from([None, (1, 4, 8), (8,)])


@settings(max_examples=20, deadline=None)
@given(mixes(st.text("abc xyz.", min_size=1, max_size=9)), sizes)
def test_characters(mix: list[tuple[str, int, int]], allowed: Any) -> None:
    for temperature in (0.0, 0.7):
        model = characters.build(temperature).double().eval()
        calls = [characters.request(*about[:2], seed=9) for about in mix]
        arrivals = [(call, m[2]) for call, m in zip(calls, mix, strict=True)]
        said = told(model, arrivals, allowed)
        assert said == [list(run_steps(model, *call)) for call in calls]


def generated(decoder: Any, prompt: list[int], length: int) -> list[int]:
    """What the network says when ``transformers`` itself has it generate."""
    tokens = decoder.network.generate(
        torch.tensor([prompt]), max_new_tokens=length, do_sample=False
    )
    return tokens[0, len(prompt) :].tolist()


@settings(max_examples=20, deadline=None)
@given(mixes(st.lists(st.integers(2, 255), min_size=1, max_size=9)), sizes)
def test_decoder(mix: list[tuple[list[int], int, int]], allowed: Any) -> None:
    pytest.importorskip("transformers")
    from examples import decoder

    model = decoder.build(slots=5, longest=32).double().eval()
    arrivals: Iterable[Any] = [(([p], np.array([n])), at) for p, n, at in mix]
    said = told(model, list(arrivals), allowed)
    with torch.inference_mode():
        expected = [generated(model, prompt, length) for prompt, length, _ in mix]
    assert [[int(chunk[0]) for chunk in chunks] for chunks in said] == expected
