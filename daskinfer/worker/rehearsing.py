"""Runs of a model that nobody has asked for: its warm-up, and what it is tried with."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from daskinfer import payload
from daskinfer.protocol import STEPS
from daskinfer.worker.hollow import as_zero_rows
from daskinfer.worker.iterating import Outputs

if TYPE_CHECKING:
    from daskinfer.worker.execution import Call, Item, Outcome
    from daskinfer.worker.models import ResidentModel

#: Seconds of warm-up after which larger sizes are left to be learned.
WARMUP_BUDGET = 10.0


class Rehearsal:
    """Runs a model with an example, and makes others of that.

    Parameters
    ----------
    model
        Whose it is.

    Notes
    -----
    Used on the device's thread.
    """

    def __init__(self, model: ResidentModel) -> None:
        self._model = model

    def __repr__(self) -> str:
        return f"<Rehearsal of {self._model.name!r}>"

    def warmup(
        self, example: Call, *, brief: bool = False
    ) -> Iterator[tuple[int, float] | None]:
        """Run an example at every batch size; yield what all but the first run took.

        First runs compile and allocate. A generator, so that batches of other
        models can come between. Ends at a size that the device has no memory for,
        unless it is the smallest. A ``brief`` one runs that once, where the times of
        all are known.
        """
        self._model.example = example
        spent = perf_counter()
        sizes = self._warmup_sizes()
        if brief:
            sizes = sizes[:1]
        for rows in sizes:
            call = self._resized(example, rows)
            for attempt in range(1 if brief else 3):
                started = perf_counter()
                try:
                    self._touch(call, rows)
                except Exception as error:
                    device = self._model.device
                    if not (sizes[0] < rows and device.is_out_of_memory(error)):
                        raise
                    # What the pass had computed so far hangs on its frames.
                    traceback.clear_frames(error.__traceback__)
                    device.empty_cache()
                    return
                seconds = perf_counter() - started
                yield (rows, seconds) if attempt else None
            if not self._model.allowed and perf_counter() - spent > WARMUP_BUDGET:
                return

    def _touch(self, call: Call, rows: int) -> None:
        """Run a pass for what it takes; of a stream, the first step."""
        if self._model.kind == STEPS:
            self._model.producer.passes.try_out(call, rows)
            return
        output = self._model(*call[0], **call[1])
        if isinstance(output, Outputs):
            next(output, None)
            output.close()

    def _warmup_sizes(self) -> list[int]:
        model = self._model
        if model.allowed:
            return list(model.allowed)
        powers = [1 << i for i in range(model.max_rows.bit_length())]
        return sorted({n for n in powers if n < model.max_rows} | {model.max_rows})

    def _resized(self, example: Call, rows: int) -> Call:
        if self._model.batch_dim is None:
            return payload.collate([example] * rows, None)
        size = payload.measure(*example, self._model.batch_dim).rows
        if not size:
            raise ValueError(
                f"the warmup= example of {self._model.name!r} has no rows along axis "
                f"{self._model.batch_dim}; give it at least one"
            )
        one = payload.slice_rows(*example, self._model.batch_dim, 0, 1)
        return payload.collate([one] * rows, self._model.batch_dim)

    def probe(self) -> None:
        """Run the smallest pass of what has run before."""
        assert self._model.example is not None
        smallest = self._model.allowed[0] if self._model.allowed else 1
        self._touch(self._resized(self._model.example, smallest), smallest)

    # Requests without rows

    def remember(self, items: list[Item], outcome: Outcome) -> None:
        """Take an example from requests that were answered."""
        model = self._model
        for item in items:
            if item.rows and item.signature is not None and item.key in outcome.results:
                if model.batch_dim is not None:
                    one = payload.slice_rows(*item.call, model.batch_dim, 0, 1)
                    # A copy: a view would keep the whole request alive.
                    model.example = payload.collate([one, one], model.batch_dim)
                return

    def as_zero_rows(self, call: Call) -> Call:
        """Shape a call without rows as the example is."""
        example, batch_dim = self._model.example, self._model.batch_dim
        if example is None or batch_dim is None:
            return call
        return as_zero_rows(call, example, batch_dim)


__all__ = ["WARMUP_BUDGET", "Rehearsal"]
