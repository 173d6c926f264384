from __future__ import annotations

import importlib

import pytest
import torch

from benchmarks.batch_size import NETWORKS, SIZES, Network


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_networks_take_their_requests_in_batches_of_every_size(
    network: Network,
) -> None:
    assert all(network.requests % size == 0 for size in SIZES)
    module, _, function = network.factory.partition(":")
    net = getattr(importlib.import_module(module), function)()
    one = torch.rand(network.shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(
            net(one.repeat(3, *[1] * (one.dim() - 1)))[1:2], net(one)
        )
