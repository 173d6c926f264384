"""What a worker tells the scheduler of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from daskinfer import protocol
from daskinfer.failure import describe
from daskinfer.worker.inputs import MissingInput
from daskinfer.worker.results import dump_errors, packed, store

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.worker.execution import Outcome
    from daskinfer.worker.job import Job
    from daskinfer.worker.live import Live, Part
    from daskinfer.worker.models import ResidentModel


class Reporter:
    """Tells the scheduler what becomes of batches.

    Parameters
    ----------
    worker
        Whose they are.

    Notes
    -----
    Lives on the worker's event loop.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __repr__(self) -> str:
        return f"<Reporter of {self._worker.address}>"

    # Progress

    def waits(self, job: Job, waits_for: str) -> None:
        """Tell, unless that is known, what a batch waits for but its turn."""
        if job.waits_for != waits_for:
            job.waits_for = waits_for
            self._tell_progress(job)

    def begins(self, job: Job) -> None:
        """Tell that a batch runs, if it was said to wait."""
        self.waits(job, "")

    def _tell_progress(self, job: Job) -> None:
        message: protocol.ProgressMessage = {
            "op": protocol.PROGRESS,
            "batch": job.batch,
            "waits_for": job.waits_for,
        }
        self._worker.batched_send(dict(message))

    def not_found(self, job: Job, dropped: bytes) -> None:
        """Tell that a batch which should be in the cache needs the device."""
        job.held = False
        message: protocol.NotFoundMessage = {
            "op": protocol.NOT_FOUND,
            "batch": job.batch,
            "dropped": dropped,
        }
        self._worker.batched_send(dict(message))

    # The end

    def done(
        self,
        batch: str,
        outcome: Outcome,
        job: Job | None = None,
        missing: set[Key] | frozenset[Key] = frozenset(),
    ) -> None:
        """Store results, and tell how every request ended.

        Parameters
        ----------
        batch, outcome
            Which, and what became of it.
        job
            The batch itself; None if it could not be run.
        missing
            Inputs that could not be fetched.
        """
        stimulus_id = f"daskinfer-done-{batch}"
        stored = store(self._worker, outcome.results, stimulus_id)
        again = [
            key
            for key, error in outcome.errors.items()
            if isinstance(error, MissingInput) and error.key in missing
        ]
        errors = {k: e for k, e in outcome.errors.items() if k not in again}
        message: dict[str, Any] = {
            "op": protocol.DONE,
            "batch": batch,
            **stored,
            "failed": stored["failed"] | dump_errors(errors),
            "missing": again,
            "passes": outcome.passes,
            "cached": [i for i, k in enumerate(stored["keys"]) if k in outcome.cached],
            "look_up": outcome.look_up,
            "kept": outcome.kept,
            "streaming": outcome.streaming,
            "out_of_memory": outcome.out_of_memory,
            "waited": job.waited if job else 0.0,
            "ran": job.ran if job else 0.0,
            "device": str(job.model.device.torch_device) if job else "",
            "pack": _pack(stored, outcome.results, job.inline) if job else None,
            "struck": outcome.struck,
            "broken": "" if outcome.broken is None else describe(outcome.broken),
            "stimulus_id": stimulus_id,
        }
        self._worker.batched_send(message)

    # Streams

    def chunks(self, batch: str, parts: Sequence[Part]) -> None:
        """Send chunks of some streams."""
        message: protocol.ChunksMessage = {
            "op": protocol.CHUNKS,
            "batch": batch,
            "keys": [part.key for part in parts],
            "firsts": [part.first for part in parts],
            "counts": [part.count for part in parts],
            "nbytes": [part.nbytes for part in parts],
            "more": [part.more for part in parts],
            "packs": [part.pack for part in parts],
        }
        self._worker.batched_send(dict(message))

    def slots(self, model: ResidentModel, slots: int, seconds: float) -> None:
        """Tell how many requests of a model shall advance together."""
        message: protocol.SlotsMessage = {
            "op": protocol.SLOTS,
            "name": model.name,
            "version": model.version,
            "slots": slots,
            "seconds": seconds,
        }
        self._worker.batched_send(dict(message))

    def ended(
        self,
        job: Job,
        streams: Sequence[Live],
        results: dict[Key, Any],
        errors: dict[Key, Any],
    ) -> None:
        """Store what has come of streams, and tell that they have ended."""
        stimulus_id = f"daskinfer-ended-{job.batch}"
        stored = store(self._worker, results, stimulus_id)
        # Who has read it chunk by chunk does not need it once more.
        is_read = any(live.is_read for live in streams)
        message: dict[str, Any] = {
            "op": protocol.ENDED,
            "batch": job.batch,
            **stored,
            "failed": stored["failed"] | dump_errors(errors),
            "counts": {live.key: live.count for live in streams},
            "device": str(job.model.device.torch_device),
            "pack": None if is_read else _pack(stored, results, job.inline),
            "broken": "",
            "stimulus_id": stimulus_id,
        }
        self._worker.batched_send(message)

    def broken(self, job: Job, error: BaseException) -> None:
        """Tell that the device broke under streams."""
        message: protocol.EndedMessage = {
            "op": protocol.ENDED,
            "batch": job.batch,
            "keys": [],
            "nbytes": [],
            "type_index": [],
            "types": [],
            "typenames": [],
            "failed": {},
            "counts": {},
            "device": str(job.model.device.torch_device),
            "pack": None,
            "broken": describe(error),
            "stimulus_id": f"daskinfer-ended-{job.batch}",
        }
        self._worker.batched_send(dict(message))


def _pack(
    stored: dict[str, Any], results: dict[Key, Any], limit: int
) -> protocol.Pack | None:
    """What has just been stored, if all of it is small enough for a message."""
    if not stored["keys"] or sum(stored["nbytes"]) > limit:
        return None
    return packed([results[key] for key in stored["keys"]])
