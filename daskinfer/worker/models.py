"""The models of one worker: loaded, warmed, called."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from daskinfer import payload
from daskinfer.device import moving
from daskinfer.protocol import ASYNC_STREAM, PLAIN, STEPS
from daskinfer.stepping import is_step_model
from daskinfer.worker.device_steps import DeviceSteps
from daskinfer.worker.execution import BatchRun, Call, Item, Outcome, PassSizes
from daskinfer.worker.explaining import explain
from daskinfer.worker.footprint import Footprint
from daskinfer.worker.iterating import AsyncOutputs, Outputs, entry_of, kind_of
from daskinfer.worker.rehearsing import Rehearsal
from daskinfer.worker.slots import Slots
from daskinfer.worker.stepping import StepProducer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from daskinfer.artifact import Artifact
    from daskinfer.device import Device
    from daskinfer.worker.async_producing import AsyncThread


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
    example
        What it is known to take; None: nothing is known yet.
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
    example: Call | None = field(default=None, repr=False)
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
        rehearsal = Rehearsal(self)
        run = BatchRun(
            self,
            self.batch_dim,
            sizes,
            rehearsal.as_zero_rows,
            self.device,
            None if self.example is None else rehearsal.probe,
            self._footprint,
            alone=self.kind == ASYNC_STREAM,
            about=about or {"deployment": self.name, "version": self.version},
        )
        outcome = run(items)
        if outcome.errors:
            explain(self, items, outcome.errors)
        if self.example is None:
            rehearsal.remember(items, outcome)
        return outcome

    def warmup(
        self, example: Call, *, brief: bool = False
    ) -> Iterator[tuple[int, float] | None]:
        """As :meth:`~daskinfer.worker.rehearsing.Rehearsal.warmup`."""
        return Rehearsal(self).warmup(example, brief=brief)


def _mover(tensor_type: type, move: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda array: move(array) if isinstance(array, tensor_type) else array


__all__ = ["ResidentModel"]
