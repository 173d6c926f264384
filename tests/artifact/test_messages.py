"""Artifacts as Dask messages: unread by the scheduler, uncopied where possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from distributed.protocol import dumps, loads
from distributed.utils_test import gen_cluster
from torch import nn

from daskinfer.artifact import Artifact
from tests.artifact.models import Tied, build_linear


def test_a_message_goes_there_and_back() -> None:
    net = Tied().eval()
    artifact = Artifact.from_object(net)
    frames = [bytes(frame) for frame in dumps({"op": "load", **artifact.to_message()})]
    message = loads(frames)
    again = Artifact.from_message(message)
    assert again == artifact
    assert (again.label, again.format) == ("Tied", "module")
    assert message["nbytes"] == artifact.nbytes == again.nbytes
    assert torch.equal(again.build("cpu")(torch.ones(1, 4)), net(torch.ones(1, 4)))


@pytest.mark.parametrize("compression", ["lz4", "zlib", False])
def test_a_scheduler_passes_it_on_unread(compression: Any) -> None:
    net = nn.Linear(512, 512)
    nn.init.zeros_(net.weight)  # easily compressed
    artifact = Artifact.from_object(net)
    frames = dumps(artifact.to_message(), context={"compression": compression})
    passed = loads(frames, deserialize=False)
    assert any(passed["weights"].header["compression"]) == bool(compression)
    assert Artifact.from_message(loads(dumps(passed))) == artifact
    assert Artifact.from_message(passed) == artifact  # should it want to look


def test_an_artifact_without_weights() -> None:
    artifact = Artifact.from_object(nn.ReLU())
    assert Artifact.from_message(loads(dumps(artifact.to_message()))) == artifact
    assert Artifact.from_message(artifact.to_message()) == artifact


def test_weights_are_sent_without_a_copy() -> None:
    artifact = Artifact.from_object(nn.Linear(512, 512))
    frames = dumps(artifact.to_message())
    weights = np.asarray(artifact.weights)
    assert any(
        np.shares_memory(np.frombuffer(frame, np.uint8), weights)
        for frame in frames
        if len(frame)
    )


@gen_cluster(client=True)
async def test_over_a_cluster(c: Any, s: Any, a: Any, b: Any) -> None:
    stored: dict[str, Any] = {}

    async def put(message: dict[str, Any]) -> None:
        stored.update(message)

    async def get() -> dict[str, Any]:
        return stored

    s.handlers["put"], s.handlers["get"] = put, get
    artifact = Artifact.from_object(build_linear(600))
    await c.scheduler.put(message=artifact.to_message())
    for worker in (a, b):
        received = Artifact.from_message(await worker.scheduler.get())
        assert received == artifact
        assert torch.equal(received.build("cpu").weight, torch.eye(600))
