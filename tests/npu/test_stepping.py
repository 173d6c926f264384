"""Models that advance step by step on the simulated NPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from daskinfer.device import open_device
from daskinfer.worker.device_steps import DeviceSteps
from daskinfer.worker.execution import Item
from daskinfer.worker.slots import Slots
from daskinfer.worker.stepping import StepProducer
from tests.npu.test_device_errors import FATAL
from tests.worker.step_models import Attention


def told(model: Any, wanted: list[tuple[list[int], int]], **sizes: Any) -> Any:
    """What each request is told, and the producer."""
    device = open_device("npu")
    with device.active():
        model.to(device.torch_device)
    steps = DeviceSteps(model, device)
    producer = StepProducer(steps, Slots(8, room=steps.room, **sizes), device=device)
    chunks: list[list[Any]] = [[] for _ in wanted]
    for key, (prompt, length) in enumerate(wanted):
        call = (np.array([prompt]), np.array([length])), {}
        producer.add([Item(key, lambda call=call: call)])
        for emission in producer.advance(0.0):
            assert emission.error is None
            chunks[emission.key] += emission.chunks
    while producer.live:
        for emission in producer.advance(0.0):
            assert emission.error is None
            chunks[emission.key] += emission.chunks
    return chunks, producer


class Watched(Attention):
    """Notes where its states are."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.devices: set[str] = set()

    def step(self, state: Any) -> Any:
        self.devices.update(array.device.type for array in state.values())
        return super().step(state)


@pytest.mark.parametrize("allowed", [None, (4, 8)])
def test_states_stay_there_and_outputs_come_to_the_host(allowed: Any) -> None:
    wanted = [([1 + n, n % 3, 4], 2 + n % 4) for n in range(7)]
    model = Watched(slots=3)
    chunks, producer = told(model, wanted, allowed=allowed)
    assert model.devices == {"npu"}
    assert {type(chunk) for its in chunks for chunk in its} == {np.ndarray}
    alone = Attention(slots=1)
    for its, about in zip(chunks, wanted, strict=True):
        assert [int(chunk[0]) for chunk in its] == alone.alone(*about)
    assert producer.broken is None


def test_memory_of_those_who_have_ended_is_free() -> None:
    model = Watched(slots=3)
    told(model, [([1, 2], 3)] * 5)
    held = torch.npu.memory_allocated()
    _, producer = told(model, [([1, 2], 3)] * 20)
    assert not producer.live
    assert torch.npu.memory_allocated() == held > 0


def test_device_that_breaks_ends_nobody(simulator: Any) -> None:
    device = open_device("npu")
    model = Attention(slots=3)
    with device.active():
        model.to(device.torch_device)
    steps = DeviceSteps(model, device)
    producer = StepProducer(steps, Slots(8, room=steps.room), device=device)
    call = (np.array([[1, 2]]), np.array([9])), {}
    producer.add([Item("a", lambda: call)])
    assert len(producer.advance(0.0)[0].chunks) == 1
    simulator.fail_next("", FATAL, 1 << 30)
    assert producer.advance(0.0) == []
    assert FATAL in str(producer.broken)
    assert producer.live == ["a"]
