"""What comes of streams on a worker: chunks and ends, on their way to readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distributed.utils import offload

from daskinfer.failure import contain
from daskinfer.worker.live import Live, Part
from daskinfer.worker.producing import Emission
from daskinfer.worker.stream_run import JoinedRun, Run

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.worker.job import Job
    from daskinfer.worker.reporting import Reporter


class Sending:
    """Takes in what came of turns, and sends it as far as readers have room for it.

    Parameters
    ----------
    worker
        Whose streams they are.
    reporter
        Sends what there is to tell.

    Attributes
    ----------
    is_closing
        Whether nothing is to be sent any more.

    Notes
    -----
    Lives on the worker's event loop.
    """

    def __init__(self, worker: Worker, reporter: Reporter) -> None:
        self._in_background = worker._ongoing_background_tasks.call_soon
        self._reporter = reporter
        self.is_closing = False

    def __repr__(self) -> str:
        return f"<Sending{' nothing more' * self.is_closing}>"

    def deliver(self, run: Run, emissions: list[Emission]) -> None:
        """Take in what came of a turn."""
        for emission in emissions:
            live = run.lives.get(emission.key)
            if live is None or run.is_to_come(emission.key):
                continue
            if not (live.dropped or live.ended):
                live.take(emission)
                if live.ended and not emission.ended:
                    run.failed.append(live.key)

    def send(self, run: Run) -> None:
        """Send what may be sent, and tell who has ended."""
        if self.is_closing:
            return
        parts: list[Part] = []
        for live in run.lives.values():
            if live.dropped:
                continue
            had_ended, part = live.ended, live.part()
            if live.ended and not had_ended:
                run.failed.append(live.key)
            if part is not None:
                parts.append(part)
        for job, its in run.by_job(parts):
            self._reporter.chunks(job.batch, its)
        over = [live for live in run.lives.values() if live.is_over]
        for job, ended in run.by_job([live for live in over if not live.dropped]):
            self._tell_ended(job, ended)
        for live in over:
            run.remove(live.key)

    def slots(self, run: Run) -> None:
        """Tell what is new of how many step together."""
        if isinstance(run, JoinedRun) and run.learned():
            slots = run.model.producer.slots
            self._reporter.slots(run.model, slots.limit, slots.seconds)

    def _tell_ended(self, job: Job, over: Sequence[Live]) -> None:
        for live in over:
            if live.is_combined and live.error is None:
                self._in_background(self._combine, job, live)
        plain = [x for x in over if not x.is_combined or x.error is not None]
        results = {x.key: x.whole() for x in plain if x.error is None}
        errors = {x.key: x.error for x in plain if x.error is not None}
        if plain:
            self._reporter.ended(job, plain, results, errors)

    async def _combine(self, job: Job, live: Live) -> None:
        """Let code of the user's make a result, on a thread that has time."""
        results, errors = {}, {}
        try:
            results[live.key] = await offload(contain, live.whole)
        except Exception as error:
            errors[live.key] = error
        if not self.is_closing:
            self._reporter.ended(job, [live], results, errors)

    def broken(self, run: Run, error: BaseException) -> None:
        """Nothing runs on the device any more: the scheduler knows what there was."""
        for key in list(run.lives):
            run.remove(key)
        if not self.is_closing:
            self._reporter.broken(run.job, error)
