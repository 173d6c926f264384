"""What a worker remembers of its latest batches, for whoever tells a story."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from distributed.metrics import monotonic

if TYPE_CHECKING:
    from daskinfer.protocol import Recalled
    from daskinfer.worker.job import Job

#: Batches that are remembered.
_REMEMBERED = 1000


class Recollection:
    """When batches came, began and ended.

    Parameters
    ----------
    jobs
        Those that are not answered yet.

    Notes
    -----
    Ages are told, and no times: clocks of hosts differ.
    """

    def __init__(self, jobs: Mapping[str, Job]) -> None:
        self._jobs = jobs
        self._past: deque[tuple[str, str, float, float | None, float]] = deque(
            maxlen=_REMEMBERED
        )

    def __repr__(self) -> str:
        return f"<Recollection batches: {len(self._past)}>"

    def ended(self, job: Job) -> None:
        """A batch has been answered."""
        told = job.batch, str(job.model.device.torch_device), job.arrived, job.started
        self._past.append((*told, monotonic()))

    async def recall(self, batches: Iterable[str]) -> list[Recalled]:
        """What is known of some batches."""
        now, wanted = monotonic(), set(batches)
        found: list[Recalled] = [
            {
                "batch": batch,
                "device": device,
                "came": now - came,
                "began": None if began is None else now - began,
                "ended": now - ended,
            }
            for batch, device, came, began, ended in self._past
            if batch in wanted
        ]
        for batch in wanted & self._jobs.keys():
            job = self._jobs[batch]
            found.append(
                {
                    "batch": batch,
                    "device": str(job.model.device.torch_device),
                    "came": now - job.arrived,
                    "began": None if job.started is None else now - job.started,
                    "ended": None,
                }
            )
        return found
