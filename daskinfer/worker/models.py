"""The models of one worker: loaded, warmed, called."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from daskinfer import payload
from daskinfer.device import moving
from daskinfer.exceptions import OutOfDeviceMemory
from daskinfer.failure import note_origin
from daskinfer.options import mistaken_option
from daskinfer.protocol import ASYNC_STREAM, PLAIN, STEPS
from daskinfer.stepping import is_step_model
from daskinfer.worker.device_queue import current_worker
from daskinfer.worker.device_steps import DeviceSteps
from daskinfer.worker.execution import BatchRun, Call, Item, Outcome, PassSizes
from daskinfer.worker.footprint import Footprint
from daskinfer.worker.hollow import as_zero_rows
from daskinfer.worker.iterating import AsyncOutputs, Outputs, entry_of, kind_of
from daskinfer.worker.slots import Slots
from daskinfer.worker.stepping import StepProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distributed import Worker

    from daskinfer.artifact import Artifact
    from daskinfer.device import Device
    from daskinfer.worker.async_producing import AsyncThread

#: Seconds of warm-up after which larger sizes are left to be learned.
WARMUP_BUDGET = 10.0


@dataclass(slots=True)
class ResidentModel:
    """A model that is loaded on a device.

    Attributes
    ----------
    function
        The model itself, on the device.
    device
        Where it is.
    is_module
        Whether it takes tensors only, so that arrays are turned into some.
    nbytes
        What its weights take; of what is no module, what has travelled.
    can_park
        Whether it can leave the device and come back as it was.
    batch_dim, allowed, target
        From the deployment's policy.
    kind
        How it answers, as far as is known: see :data:`daskinfer.protocol.STREAM`.
    thread
        Where its asynchronous generators run, once there was one.
    """

    name: str
    version: str
    function: Callable[..., Any]
    device: Device
    is_module: bool
    digest: str
    resources: Mapping[str, float]
    max_rows: int
    batch_dim: int | None
    allowed: tuple[int, ...] | None
    nbytes: int = 0
    can_park: bool = False
    kind: str = PLAIN
    target: float | None = None
    _entry: Callable[..., Any] | None = field(default=None, repr=False)
    _producer: StepProducer | None = field(default=None, repr=False)
    _example: Call | None = field(default=None, repr=False)
    _footprint: Footprint | None = field(default=None, repr=False)
    thread: AsyncThread | None = field(default=None, repr=False)

    @classmethod
    def load(
        cls,
        name: str,
        version: str,
        artifact: Artifact,
        device: Device,
        resources: Mapping[str, float],
        policy: Mapping[str, Any],
    ) -> ResidentModel:
        """Verify, build and move a model to the device (in a loader thread)."""
        from daskinfer.artifact import is_module
        from daskinfer.artifact.building import FACTORY, MODULE
        from daskinfer.artifact.digests import version_digest
        from daskinfer.device.accelerator import AcceleratorDevice

        with device.active():
            function: Any = artifact.build(device.torch_device)
        entry = entry_of(function, is_module(function))
        allowed = policy["allowed_batch_sizes"]
        return cls(
            name,
            version,
            function,
            device,
            is_module(function),
            version_digest(artifact.digest, policy),
            resources,
            policy["max_batch_size"],
            policy["batch_dim"],
            None if allowed is None else tuple(allowed),
            moving.weigh(function) if is_module(function) else artifact.nbytes,
            device.kind != "cpu"
            # Programs keep constants on the device.
            and artifact.format in (MODULE, FACTORY)
            and moving.can_move(function),
            STEPS if is_step_model(function) else kind_of(entry, is_module(function)),
            policy["target_latency"],
            entry,
            # The memory of the host has no peak that could be watched.
            _footprint=Footprint(device)
            if isinstance(device, AcceleratorDevice)
            else None,
        )

    @property
    def is_on_cpu(self) -> bool:
        """Whether it takes the process's own memory."""
        return not self.device.has_own_memory

    # Off the device and back

    def park(self) -> None:
        """Move into the host's memory (on the device's thread).

        Raises
        ------
        Exception
            If there is no memory. The model is of no use then.
        """
        self._move("cpu")
        self.device.empty_cache()

    def resume(self) -> None:
        """Move back onto the device, as long as nobody calls it.

        Raises
        ------
        Exception
            If there is no memory. The model is of no use then.
        """
        self._move(self.device.torch_device)

    def _move(self, device: Any) -> None:
        function: Any = self.function
        with self.device.active():
            moving.move(function, device)
        self.nbytes = moving.weigh(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass; the output is on the CPU and complete.

        Or it is an iterator, whose every output will be.
        """
        import torch

        device = self.device
        call: Any = (args, kwargs)
        answer_arrays = False
        if self.is_module:
            call, answer_arrays = payload.to_tensors(call)
        if device.kind != "cpu":
            with device.active():
                call = payload.map_arrays(call, _mover(torch.Tensor, device.put))
        entry = self._entry or self.function
        compute = partial(self._compute, answer_arrays)
        output = compute(partial(entry, *call[0], **call[1]))
        if isinstance(output, Iterator):
            return Outputs(compute, output)
        if isinstance(output, AsyncIterator):
            # Its thread is prepared as this one is for each call.
            return AsyncOutputs(partial(self._bring, answer_arrays), output)
        return output

    def _compute(self, answer_arrays: bool, function: Callable[[], Any]) -> Any:
        import torch

        with self.device.active():
            with torch.inference_mode():
                output = function()
            return self._bring(answer_arrays, output)

    def _bring(self, answer_arrays: bool, output: Any) -> Any:
        """Have an output on the host."""
        import torch

        if self.device.kind != "cpu":
            mover = _mover(torch.Tensor, self.device.to_host)
            output = payload.map_arrays(output, mover)
        return payload.to_numpy(output) if answer_arrays else output

    @property
    def producer(self) -> StepProducer:
        """All requests under way, of a model that advances step by step."""
        if self._producer is None:
            steps = DeviceSteps(self.function, self.device)
            slots = Slots(self.max_rows, self.allowed, steps.room, self.target)
            self._producer = StepProducer(steps, slots, self.batch_dim, self.device)
        return self._producer

    def run(
        self,
        items: list[Item],
        first: list[int],
        rows: int,
        about: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Run a batch (on the device's thread), and say in log lines which it is."""
        sizes = PassSizes(min(rows, self.max_rows), tuple(first), self.allowed)
        probe = None if self._example is None else self._probe
        run = BatchRun(
            self,
            self.batch_dim,
            sizes,
            self._as_zero_rows,
            self.device,
            probe,
            self._footprint,
            alone=self.kind == ASYNC_STREAM,
            about=about or {"deployment": self.name, "version": self.version},
        )
        outcome = run(items)
        if outcome.errors:
            self.explain(items, outcome.errors)
        if self._example is None:
            self._remember(items, outcome)
        return outcome

    # Warm-up

    def warmup(
        self, example: Call, *, brief: bool = False
    ) -> Iterator[tuple[int, float] | None]:
        """Run an example at every batch size; yield what all but the first run took.

        First runs compile and allocate. A generator, so that batches of other
        models can come between. Ends at a size that the device has no memory for,
        unless it is the smallest. A ``brief`` one runs that once, where the times of
        all are known.
        """
        self._example = example
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
                    if not (sizes[0] < rows and self.device.is_out_of_memory(error)):
                        raise
                    # What the pass had computed so far hangs on its frames.
                    traceback.clear_frames(error.__traceback__)
                    self.device.empty_cache()
                    return
                seconds = perf_counter() - started
                yield (rows, seconds) if attempt else None
            if not self.allowed and perf_counter() - spent > WARMUP_BUDGET:
                return

    def _touch(self, call: Call, rows: int) -> None:
        """Run a pass for what it takes; of a stream, the first step."""
        if self.kind == STEPS:
            self.producer.passes.try_out(call, rows)
            return
        output = self(*call[0], **call[1])
        if isinstance(output, Outputs):
            next(output, None)
            output.close()

    def _warmup_sizes(self) -> list[int]:
        if self.allowed:
            return list(self.allowed)
        powers = [1 << i for i in range(self.max_rows.bit_length())]
        return sorted({n for n in powers if n < self.max_rows} | {self.max_rows})

    def _resized(self, example: Call, rows: int) -> Call:
        if self.batch_dim is None:
            return payload.collate([example] * rows, None)
        size = payload.measure(*example, self.batch_dim).rows
        if not size:
            raise ValueError(
                f"the warmup= example of {self.name!r} has no rows along axis "
                f"{self.batch_dim}; give it at least one"
            )
        one = payload.slice_rows(*example, self.batch_dim, 0, 1)
        return payload.collate([one] * rows, self.batch_dim)

    def explain(
        self,
        items: Iterable[Item],
        errors: dict[Key, BaseException],
        worker: Worker | None = None,
    ) -> None:
        """Say in errors of requests where they were raised."""
        worker = worker or current_worker()
        address = worker.address if worker is not None else "this process"
        sharing = Counter(map(id, errors.values()))
        for item in items:
            error = errors.get(item.key)
            if error is None:
                continue
            if self.device.is_out_of_memory(error):
                errors[item.key] = self._no_memory(item, error, address)
                continue
            many = sharing[id(error)]
            about = f"{many:,} requests" if many > 1 else _described(item, error)
            note_origin(error, self.name, self.version, address, about)

    def _no_memory(
        self, item: Item, error: BaseException, address: str
    ) -> OutOfDeviceMemory:
        where = f"{self.device.torch_device} of {address}"
        told = OutOfDeviceMemory(
            f"{item.key!r} of {self.name!r} does not fit the memory of {where}, not "
            f"even alone and with an emptied cache: make its input smaller. {error}",
            key=item.key,
            name=self.name,
            version=self.version,
            worker=address,
        )
        told.__cause__ = error
        return told

    def _probe(self) -> None:
        """Run the smallest pass of what has run before."""
        assert self._example is not None
        smallest = self.allowed[0] if self.allowed else 1
        self._touch(self._resized(self._example, smallest), smallest)

    # Requests without rows

    def _remember(self, items: list[Item], outcome: Outcome) -> None:
        for item in items:
            if item.rows and item.signature is not None and item.key in outcome.results:
                if self.batch_dim is not None:
                    one = payload.slice_rows(*item.call, self.batch_dim, 0, 1)
                    # A copy: a view would keep the whole request alive.
                    self._example = payload.collate([one, one], self.batch_dim)
                return

    def _as_zero_rows(self, call: Call) -> Call:
        if self._example is None or self.batch_dim is None:
            return call
        return as_zero_rows(call, self._example, self.batch_dim)


def _mover(tensor_type: type, move: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda array: move(array) if isinstance(array, tensor_type) else array


def _described(item: Item, error: BaseException) -> str:
    """Which request it was, what it brought, and what may have been meant."""
    told = f"request {item.key!r}"
    # Inputs and exceptions may have code of their own, which fails.
    with contextlib.suppress(Exception):
        if inputs := payload.outline(*item.call):
            told += f"; input: {inputs}"
        if hint := mistaken_option(error, item.call[1]):
            told += f"\n{hint}"
    return told


__all__ = ["WARMUP_BUDGET", "ResidentModel"]
