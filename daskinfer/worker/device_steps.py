"""The two methods of a model that advances step by step, called on its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from daskinfer import payload
from daskinfer.artifact import is_module
from daskinfer.stepping import Stepped, slot_numbers, slots_of, step_once

if TYPE_CHECKING:
    from daskinfer.device import Device
    from daskinfer.worker.execution import Call


class DeviceSteps:
    """Starts and steps requests; states stay on the device, outputs come to the CPU.

    Parameters
    ----------
    model
        A :class:`~daskinfer.stepping.StepModel`, on the device.
    device
        Where it is.

    Attributes
    ----------
    room
        How many rows the model has room for; None if that is not limited.

    Notes
    -----
    Belongs to the device's thread.

    Examples
    --------
    >>> import torch
    >>> from daskinfer.device import open_device
    >>> class Doubling:
    ...     def start(self, x):
    ...         return x
    ...
    ...     def step(self, state):
    ...         return state, state > 4, 2 * state
    >>> steps = DeviceSteps(Doubling(), open_device("cpu"))
    >>> state = steps.start(((torch.tensor([3]),), {}), [])
    >>> steps.step(state, 1)
    Stepped(outputs=tensor([3]), finished=[False], state=tensor([6]))
    """

    def __init__(self, model: Any, device: Device) -> None:
        self.room = slots_of(model)
        self._model = model
        self._device = device
        self._is_module = is_module(model)

    def __repr__(self) -> str:
        return f"<DeviceSteps of {type(self._model).__name__} on {self._device!r}>"

    def prepared(self, call: Call) -> tuple[Call, bool]:
        """A request as the model takes it, and whether it is answered in arrays."""
        if not self._is_module:
            return call, False
        prepared: Any = payload.to_tensors(call)
        return prepared  # type: ignore[no-any-return]

    def start(self, call: Call, slots: Sequence[int]) -> Any:
        """Take requests in; give their states.

        Parameters
        ----------
        call
            Joined, on the CPU.
        slots
            One for each row, if the model has any.
        """
        import torch

        args, kwargs = call
        if self.room is not None:
            kwargs = {**kwargs, "slots": slot_numbers(self._model, slots)}
        with self._device.active(), torch.inference_mode():
            on_device: Any = self._moved((args, kwargs), self._device.put)
            state = self._model.start(*on_device[0], **on_device[1])
            # What takes long is to be known, and errors are to come, before the step.
            self._device.synchronize()
        return state

    def step(self, state: Any, rows: int | None) -> Stepped:
        """Advance by one step; ``rows`` with padding, None where nobody knows."""
        import torch

        with self._device.active():
            with torch.inference_mode():
                stepped = step_once(self._model, state, rows)
            outputs = self._moved(stepped.outputs, self._device.to_host)
        return stepped._replace(outputs=outputs)

    def _moved(self, tree: Any, move: Callable[[Any], Any]) -> Any:
        import torch

        if self._device.kind == "cpu":
            return tree
        return payload.map_arrays(
            tree, lambda array: move(array) if torch.is_tensor(array) else array
        )
