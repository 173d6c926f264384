"""That the stand-in computes what the other tests take for granted."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_types_are_converted_on_the_device(dtype):
    x = torch.tensor([1.5, -2.25, 3.0])
    assert torch.equal(x.to("npu").to(dtype).cpu(), x.to(dtype))


def test_views_are_read_and_written_through_their_strides():
    x = torch.arange(6.0).reshape(2, 3)
    on_npu = x.to("npu")
    assert torch.equal(on_npu.t().cpu(), x.t())
    assert torch.equal(on_npu.t().contiguous().cpu(), x.t())
    on_npu[:, 1] = torch.ones(2, device="npu")
    x[:, 1] = 1
    assert torch.equal(on_npu.cpu(), x)


def test_a_view_shares_the_memory_of_its_base():
    base = torch.zeros(4).to("npu")
    base[1:3] += 2
    assert base.cpu().tolist() == [0, 2, 2, 0]
