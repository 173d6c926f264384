"""Models that advance step by step, so that requests join and leave at each step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from daskinfer import payload
from daskinfer.exceptions import OutputMismatch
from daskinfer.payload.tree import is_array


@runtime_checkable
class StepModel(Protocol):
    """What a model offers that is batched anew at every step.

    Any object with these two methods is such a model: a :class:`torch.nn.Module` or
    an instance of a class of its own. Requests that are under way take part in every
    step together; one that has finished leaves, and one that waits joins.

    Attributes
    ----------
    slots : int, optional
        How many rows the model has room for, where it keeps something for each (a KV
        cache). :meth:`start` is then called with ``slots=``.

    Notes
    -----
    A state is a tree of arrays: dicts, lists, tuples, named tuples and dataclasses of
    tensors or NumPy arrays, with the batch axis first (or where ``batch_dim`` of the
    :class:`~daskinfer.BatchPolicy` says), one row for each row of the inputs. Lists
    without arrays hold one entry per row. What a step is given is a copy; a model may
    change it in place. States stay on the device.

    Rows of one step come from requests that began at different times, so that what
    differs between them (a position, a length) belongs into the state, and shapes
    apart from the batch axis must not: requests whose states have other shapes step
    apart.

    A step that raises is run again with fewer requests, to find the one to blame, and
    padding repeats a row. What a model changes besides the state must come out the
    same when it is done twice: a KV cache is written at the position that the state
    holds, and the position moves on in the new state.

    Examples
    --------
    >>> import numpy as np
    >>> class Countdown:
    ...     def start(self, x):
    ...         return {"left": x}
    ...
    ...     def step(self, state):
    ...         state["left"] = state["left"] - 1
    ...         return state["left"], state["left"] <= 0
    >>> isinstance(Countdown(), StepModel)
    True
    >>> [chunk.tolist() for chunk in run_steps(Countdown(), np.array([3]))]
    [[2], [1], [0]]
    """

    def start(self, *inputs: Any, **options: Any) -> Any:
        """Take requests in, and return their states.

        Parameters
        ----------
        inputs, options
            As for the call of an ordinary model: requests of one signature are
            joined along the batch axis.
        slots : int64 array of shape (rows,), optional
            Where to keep what belongs to each row, below the model's own ``slots``;
            a tensor on the device for a module. Only if the model has such an
            attribute. A slot is free again when its request has ended: the next one
            that is given it writes over what is there.
        """

    def step(self, state: Any, /) -> Any:
        """Advance every row by one step.

        Returns
        -------
        outputs
            What the requests are told in this step: one row each, as an ordinary
            model's output. A request whose rows are None is told nothing.
        finished : bool array of shape (rows,), list of bool, or bool
            Which rows have come to their end. Their outputs of this step are the
            last ones.
        state : optional
            The new state, unless the one that was given has been changed.
        """


class Stepped(NamedTuple):
    """What one step came to, whatever the model returned.

    Attributes
    ----------
    outputs
        As the model gave them.
    finished
        One bool per row.
    state
        The new one.
    """

    outputs: Any
    finished: list[bool]
    state: Any


def is_step_model(model: object) -> bool:
    """Whether a model advances step by step.

    Examples
    --------
    >>> is_step_model(abs)
    False
    """
    # Not by the protocol: that overlooks methods which wrappers pass on.
    methods = (getattr(model, name, None) for name in ("start", "step"))
    return not isinstance(model, type) and all(map(callable, methods))


def slots_of(model: object) -> int | None:
    """How many rows a model has room for; None if that is not limited.

    Raises
    ------
    TypeError, ValueError
        If its ``slots`` are no number of rows.
    """
    slots = getattr(model, "slots", None)
    if slots is None:
        return None
    if not isinstance(slots, int) or isinstance(slots, bool):
        raise TypeError(f"slots of a model must be an int, not {slots!r}")
    if slots < 1:
        raise ValueError(f"slots of a model must be at least 1, got {slots}")
    return slots


def step_once(model: Any, state: Any, rows: int | None) -> Stepped:
    """Call a model's ``step`` and read what it returns.

    Parameters
    ----------
    model
        A :class:`StepModel`.
    state
        With so many ``rows``, padding included.
    rows
        None where nobody knows, and all of them are one request's.

    Raises
    ------
    OutputMismatch
        If the model returned something else than is described there.
    """
    returned = model.step(state)
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise OutputMismatch(
            "step() must return (outputs, finished) or (outputs, finished, state), "
            f"not {_described(returned)}"
        )
    outputs, finished = returned[:2]
    new = returned[2] if len(returned) == 3 else state
    return Stepped(outputs, _flags(finished, rows), new)


def run_steps(
    model: Any, *inputs: Any, batch_dim: int | None = 0, **options: Any
) -> Iterator[Any]:
    """Run one request alone, and yield what its stream would.

    For trying a model out, without a cluster.

    Parameters
    ----------
    model
        A :class:`StepModel`.
    inputs, options
        Of the request. Not changed.
    batch_dim
        The axis along which requests would be joined; None if each is one sample.

    Yields
    ------
    Any
        The outputs of each step, until all rows have finished.
    """
    call: Any = (inputs, options)
    answer_arrays = False
    if _is_module(model):
        call, answer_arrays = payload.to_tensors(call)
    args, kwargs = call
    rows = payload.measure(args, kwargs, batch_dim).rows
    args, kwargs = payload.collate([(args, kwargs)], batch_dim)
    if not rows:
        return
    if (room := slots_of(model)) is not None:
        if rows > room:
            raise ValueError(f"{rows} rows do not fit into the model's {room} slots")
        kwargs["slots"] = slot_numbers(model, range(rows))
    with _without_gradients():
        state = model.start(*args, **kwargs)
    finished = [False]
    while not all(finished):
        # Not around the loop: who takes the chunks is no part of the model.
        with _without_gradients():
            outputs, finished, state = step_once(model, state, rows)
        chunk = payload.split(outputs, [rows], batch_dim)[0]
        if tells(chunk):
            yield payload.to_numpy(chunk) if answer_arrays else chunk


def slot_numbers(model: object, numbers: Sequence[int]) -> Any:
    """Slots in the form that a model takes them in.

    >>> slot_numbers(abs, [1, 0])
    array([1, 0])
    """
    import numpy as np

    array = np.array(numbers, dtype=np.int64)
    return payload.to_tensors(((array,), {}))[0][0][0] if _is_module(model) else array


def tells(chunk: Any) -> bool:
    """Whether a chunk is anything that a request is told.

    >>> tells([None, None]), tells(None), tells([0])
    (False, False, True)
    """
    if isinstance(chunk, list):
        return not chunk or any(entry is not None for entry in chunk)
    return chunk is not None


def _without_gradients() -> contextlib.AbstractContextManager[object]:
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch.inference_mode()


def _is_module(model: object) -> bool:
    from daskinfer.artifact import is_module

    return is_module(model)


def _flags(finished: Any, rows: int | None) -> list[bool]:
    flags = finished.tolist() if is_array(finished) else finished
    if isinstance(flags, bool):
        return [flags] * (rows or 1)
    if not isinstance(flags, list) or len(flags) != (rows or len(flags)):
        raise OutputMismatch(
            f"finished must have one bool for each of {rows} rows, or be one bool for "
            f"all, not {_described(finished)}"
        )
    if any(not isinstance(flag, bool) for flag in map(_plain, flags)):
        raise OutputMismatch(f"finished must hold bools, not {_described(finished)}")
    return [bool(flag) for flag in flags]


def _plain(flag: Any) -> Any:
    """A bool of Python for one of NumPy or torch."""
    return flag.item() if hasattr(flag, "item") else flag


def _described(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if is_array(value) else ""
    if isinstance(value, (tuple, list)):
        shape = f" of length {len(value)}"
    return f"{type(value).__name__}{shape}"
