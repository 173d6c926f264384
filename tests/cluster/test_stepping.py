"""Models that advance step by step, in a cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from distributed.utils_test import gen_cluster

from tests.cluster.scheduling_helpers import deploy, nothing_is_left
from tests.worker.step_models import Attention, Recurrent, recurrent_alone

ONE_WORKER = [("127.0.0.1", 1)]
TWO_WORKERS = [("127.0.0.1", 1)] * 2


async def read(stream: Any) -> list[int]:
    return [int(chunk) async for chunk in stream]


def request(prompt: list[int], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([prompt]), torch.tensor([steps])


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_each_is_told_what_the_model_says_alone(c, s, a, b):
    model = await deploy(c, Recurrent(), name="recurrent")
    cached = await deploy(c, Attention(slots=4), name="attention")
    wanted = [([1 + n % 7, n % 3], 1 + n % 11) for n in range(30)]
    streams = [model.stream(*request(*about)) for about in wanted]
    others = [cached.stream(*request(*about)) for about in wanted]
    said = await asyncio.gather(*map(read, streams), *map(read, others))
    alone = Recurrent(), Attention(slots=1)
    assert said[:30] == [recurrent_alone(alone[0], *about) for about in wanted]
    assert said[30:] == [alone[1].alone(*about) for about in wanted]
    del streams, others
    await nothing_is_left(s, a, b)
