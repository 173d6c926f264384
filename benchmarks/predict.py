"""One big array: against bare processes that do the same job without Dask.

The network of the digits demo on 20,000 images, two workers against two processes
with the same thread settings. Timed on both sides from the array in the caller's hand
to one array of all outputs there. Each bare process is sent its half of the rows over
a pipe, runs them in batches of the size that a sweep found best for such processes,
and sends its outputs back; that it needs no scheduler is what is compared.

The scheduler's memory must not grow with the rows: its peak over ten times as many is
compared with its peak over 20,000.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter

import numpy as np
import numpy.typing as npt
import torch
from distributed import Client

import daskinfer
from benchmarks.measure import alternate, cluster, medians, peak_memory
from benchmarks.report import Ratio
from daskinfer.demo.digits import load_digits, load_model

TITLE = "model.predict on one big array, two workers"

PROCESSES = 2
SIZES = (4, 8, 16, 32, 64, 128, 256, 512)


class BareProcesses:
    """Processes that hold the model and do nothing else."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def predict(
        self, data: npt.NDArray[np.float32], batch_size: int
    ) -> npt.NDArray[np.float32]:
        """Run the model over the rows, an equal share in each process."""
        for pipe, share in zip(
            self._pipes, np.array_split(data, len(self._pipes)), strict=True
        ):
            pipe.send((share, batch_size))
        return np.concatenate([pipe.recv() for pipe in self._pipes])


@contextmanager
def bare_processes(count: int) -> Iterator[BareProcesses]:
    """Start processes that have loaded the model."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        yield BareProcesses(pipes)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    net = load_model()
    pipe.send("ready")
    with torch.inference_mode():
        while True:
            rows, batch_size = pipe.recv()
            batches = torch.from_numpy(rows).split(batch_size)
            pipe.send(torch.cat([net(batch) for batch in batches]).numpy())


def run(smoke: bool = False) -> list[Ratio]:
    """Compare with bare processes, and watch the scheduler's memory."""
    rows, rounds, sizes = (2_000, 1, SIZES[2::3]) if smoke else (20_000, 7, SIZES)
    images, _ = load_digits()
    data = np.resize(images, (rows, *images.shape[1:]))
    with (
        bare_processes(PROCESSES) as bare,
        cluster(PROCESSES) as client,
    ):
        model = daskinfer.deploy(
            client,
            factory="daskinfer.demo.digits:load_model",
            name="digits",
            batching=daskinfer.BatchPolicy(max_batch_size=max(SIZES)),
            warmup=images[:1],
        )
        with torch.inference_mode():
            expected = load_model()(torch.from_numpy(data)).numpy()

        def timed(predict: Callable[[], npt.NDArray[np.float32]]) -> float:
            started = perf_counter()
            outputs = predict()
            seconds = perf_counter() - started
            np.testing.assert_allclose(outputs, expected, rtol=1e-3, atol=1e-4)
            return seconds

        sweep = medians(
            alternate(
                {str(n): partial(timed, partial(bare.predict, data, n)) for n in sizes},
                max(rounds // 2, 1),
            )
        )
        best = int(min(sweep, key=sweep.__getitem__))
        seconds = medians(
            alternate(
                {
                    "bare": partial(timed, partial(bare.predict, data, best)),
                    "model": partial(timed, partial(model.predict, data)),
                },
                rounds,
            )
        )
        few, many = (
            _scheduler_peak(client, model, np.resize(data, (n, *data.shape[1:])))
            for n in (rows, 10 * rows)
        )
    return [
        Ratio(
            f"against {PROCESSES} bare processes, batches of {best}",
            seconds["bare"] / seconds["model"],
            0.85,
            detail=f"{rows / seconds['model']:,.0f} rows/s of "
            f"{rows / seconds['bare']:,.0f} rows/s",
        ),
        Ratio(
            "scheduler's peak memory, ten times the rows",
            many / few,
            1.05,
            at_most=True,
            detail=f"{many / 2**20:.0f} MiB of {few / 2**20:.0f} MiB",
        ),
    ]


def _scheduler_peak(
    client: Client, model: daskinfer.Model, data: npt.NDArray[np.float32]
) -> int:
    with peak_memory(client) as peak:
        outputs = model.predict(data)
        assert len(outputs) == len(data)
        return peak()
