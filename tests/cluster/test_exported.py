"""Exported programs that take only some numbers of rows."""

from __future__ import annotations

import pytest
import torch
from distributed.utils_test import gen_cluster
from torch import nn

import daskinfer
from daskinfer import BatchPolicy


def export(path, **options) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    program = torch.export.export(net, (torch.zeros(2, 4),), **options)
    torch.export.save(program, path)
    return net


@gen_cluster(client=True, nthreads=[("", 1)])
async def check(c, s, a, path, net, allowed, most):
    model = await daskinfer.deploy(c, path=str(path), name="net")
    policy = s.plugins["daskinfer"].registry.deployment("net").policy
    assert (policy.allowed_batch_sizes, policy.max_batch_size) == (allowed, most)
    for rows in (1, 2, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(await model.submit(x), net(x).detach())


def test_a_fixed_size_is_the_only_one_allowed(tmp_path):
    path = tmp_path / "net.pt2"
    check(path, export(path), (2,), 2)


def test_a_largest_size_is_the_maximum(tmp_path):
    path = tmp_path / "net.pt2"
    rows = torch.export.Dim("rows", min=1, max=3)
    check(path, export(path, dynamic_shapes=({0: rows},)), None, 3)


@pytest.mark.parametrize("dim", [torch.export.Dim("rows"), torch.export.Dim.AUTO])
def test_any_size_is_as_configured(tmp_path, dim):
    path = tmp_path / "net.pt2"
    check(path, export(path, dynamic_shapes=({0: dim},)), None, 64)


@gen_cluster(client=True, nthreads=[("", 1)])
async def deploy_with_a_policy(c, s, a, path):
    batching = BatchPolicy(max_batch_size=8)
    await daskinfer.deploy(c, path=str(path), name="net", batching=batching)
    assert s.plugins["daskinfer"].registry.deployment("net").policy == batching


def test_what_the_user_says_is_left_alone(tmp_path):
    path = tmp_path / "net.pt2"
    export(path)
    deploy_with_a_policy(path)
