"""Whose memory is whose: models that work in place, or answer what they keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client, Scheduler, Worker
from distributed.utils_test import gen_cluster

from daskinfer import LocalCluster
from tests.cluster.scheduling_helpers import deploy


class KeepsItsOutput(torch.nn.Module):
    """Writes every answer into the same memory, as captured graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("output", torch.zeros(1, 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.output.shape != x.shape:
            self.output = torch.zeros_like(x)
        return self.output.copy_(x * 2)


class WorksInPlace(torch.nn.Module):
    """Changes its input before it answers."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        for other in others:
            other.zero_()
        return x.mul_(2) + 0


@pytest.mark.parametrize("batch_dim", [0, None])
def test_answers_outlive_the_next_call(batch_dim: int | None) -> None:
    @gen_cluster(client=True, nthreads=[("", 1)], timeout=60)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        model = await deploy(
            client, KeepsItsOutput(), batch_dim=batch_dim, max_batch_size=1
        )
        shape = (2,) if batch_dim is None else (1, 2)
        xs = [np.full(shape, i, np.float32) for i in range(8)]
        answers = await client.gather(model.map(xs))
        for x, answer in zip(xs, answers, strict=True):
            np.testing.assert_array_equal(answer, 2 * x)

    test()


@gen_cluster(client=True, nthreads=[("", 1)], timeout=60)
async def test_pieces_of_a_large_input_outlive_the_next_pass(
    client: Client, scheduler: Scheduler, worker: Worker
) -> None:
    model = await deploy(client, KeepsItsOutput(), max_batch_size=4)
    x = np.arange(80, dtype=np.float32).reshape(40, 2)
    np.testing.assert_array_equal(await model.submit(x), 2 * x)
    np.testing.assert_array_equal(await model.predict(x), 2 * x)


@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_results_of_other_tasks_stay_as_they_are(make: Any) -> None:
    @gen_cluster(client=True, nthreads=[("", 1)], timeout=60)
    async def test(client: Client, scheduler: Scheduler, worker: Worker) -> None:
        model = await deploy(client, WorksInPlace())
        one = client.submit(make, (2, 3), key="one")
        other = client.submit(make, (5, 3), key="another number of rows")
        # The second cannot be batched: its inputs disagree about their rows.
        for inputs in ([one], [one, other]):
            assert (np.asarray(await model.submit(*inputs)) == 2).all()
            assert (np.asarray(await client.submit(model, *inputs)) == 2).all()
        assert (np.asarray(await one) == 1).all()
        assert (np.asarray(await other) == 1).all()

    test()


def test_inputs_of_a_client_in_the_same_process_stay_as_they_are() -> None:
    with (
        LocalCluster(
            n_workers=1, device="cpu", processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        import daskinfer

        model = daskinfer.deploy(client, WorksInPlace(), name="m")
        x = np.ones((30_000, 3), np.float32)
        assert (model.submit(x).result() == 2).all()
        assert (client.submit(model, x).result() == 2).all()
        assert (x == 1).all()
