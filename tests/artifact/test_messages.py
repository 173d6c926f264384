"""Artifacts as Dask messages: unread by the scheduler, uncopied where possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from distributed.protocol import dumps, loads
from distributed.utils_test import gen_cluster
from torch import nn

from daskinfer.artifact import Artifact, DamagedArtifact
from daskinfer.artifact.chunks import Chunks
from daskinfer.artifact.weights import aligned_zeros
from tests.artifact.models import Tied, build_linear


def test_a_message_goes_there_and_back() -> None:
    net = Tied().eval()
    artifact = Artifact.from_object(net)
    frames = [bytes(frame) for frame in dumps({"op": "load", **artifact.to_message()})]
    message = loads(frames)
    again = Artifact.from_message(message, artifact.weights)
    assert again == artifact
    assert (again.label, again.format) == ("Tied", "module")
    assert message["nbytes"] == artifact.nbytes == again.nbytes
    assert torch.equal(again.build("cpu")(torch.ones(1, 4)), net(torch.ones(1, 4)))


@pytest.mark.parametrize("compression", ["lz4", "zlib", False])
def test_a_scheduler_passes_it_on_unread(compression: Any) -> None:
    net = nn.Linear(120, 120)
    nn.init.zeros_(net.weight)  # easily compressed
    artifact = Artifact.from_object(net)
    assert artifact.is_inline
    frames = dumps(artifact.to_message(), context={"compression": compression})
    passed = loads(frames, deserialize=False)
    assert any(passed["weights"].header["compression"]) == bool(compression)
    assert Artifact.from_message(loads(dumps(passed))) == artifact
    assert Artifact.from_message(passed) == artifact  # should it want to look


def test_an_artifact_without_weights() -> None:
    artifact = Artifact.from_object(nn.ReLU())
    assert Artifact.from_message(loads(dumps(artifact.to_message()))) == artifact
    assert Artifact.from_message(artifact.to_message()) == artifact


def test_large_weights_travel_apart() -> None:
    net = nn.Linear(512, 512)
    artifact = Artifact.from_object(net)
    assert not artifact.is_inline
    message = loads(dumps(artifact.to_message()))
    assert message["weights"] is None
    assert len(b"".join(dumps(artifact.to_message()))) < 4096
    chunks = Chunks.from_message(message["chunks"])
    assert chunks == artifact.chunks
    weights = aligned_zeros(chunks.size).data
    weights[:] = artifact.weights or b""
    assert chunks.is_all_whole(weights)
    again = Artifact.from_message(message, weights)
    assert again == artifact
    built = again.build("cpu")
    assert torch.equal(built(torch.ones(1, 512)), net(torch.ones(1, 512)))
    # What is verified and its own is not copied again.
    assert np.shares_memory(built.weight.detach().numpy(), np.asarray(weights))


def test_a_damaged_builder_is_found_where_weights_came_apart() -> None:
    artifact = Artifact.from_object(nn.Linear(512, 512))
    message = loads(dumps(artifact.to_message()))
    message["builder"] = bytes(message["builder"])[:-1] + b"?"
    with pytest.raises(DamagedArtifact, match="Linear arrived damaged"):
        Artifact.from_message(message, artifact.weights).build()


@gen_cluster(client=True)
async def test_over_a_cluster(c: Any, s: Any, a: Any, b: Any) -> None:
    stored: dict[str, Any] = {}

    async def put(message: dict[str, Any]) -> None:
        stored.update(message)

    async def get() -> dict[str, Any]:
        return stored

    s.handlers["put"], s.handlers["get"] = put, get
    artifact = Artifact.from_object(build_linear(100))
    await c.scheduler.put(message=artifact.to_message())
    for worker in (a, b):
        received = Artifact.from_message(await worker.scheduler.get())
        assert received == artifact
        assert torch.equal(received.build("cpu").weight, torch.eye(100))
