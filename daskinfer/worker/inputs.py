"""The inputs of requests: unpickled, with the results of other tasks put in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask._task_spec import GraphNode, TaskRef
from dask.typing import Key
from distributed.utils_comm import gather_from_workers

from daskinfer import protocol, transport
from daskinfer.worker.execution import Call

if TYPE_CHECKING:
    from distributed import Worker


class MissingInput(Exception):
    """An input could not be fetched; the request will be tried again."""

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


async def fetch_inputs(
    worker: Worker, who_has: dict[Key, list[str]]
) -> tuple[dict[Key, Any], set[Key]]:
    """Get the results of other tasks that requests need.

    Returns
    -------
    inputs, missing
        Values by key, and keys that were nowhere to be had.
    """
    inputs = {key: worker.data[key] for key in who_has if key in worker.data}
    elsewhere = {key: held for key, held in who_has.items() if key not in inputs}
    if not elsewhere:
        return inputs, set()
    fetched, missing, failed, _ = await gather_from_workers(
        elsewhere, rpc=worker.rpc, who=worker.address
    )
    return inputs | fetched, {*missing, *failed}


def load_call(body: protocol.Payload, inputs: dict[Key, Any] | None) -> Call:
    """Unpickle a request and resolve its references to other tasks.

    Parameters
    ----------
    body
        The pickled request.
    inputs
        The results of other tasks that could be had; None where no request of the
        batch has a reference.

    Raises
    ------
    MissingInput
        If one of them is not in ``inputs``.
    """
    args, kwargs = transport.loads(frames(body))
    if inputs is not None:
        args = tuple(_resolve(value, inputs) for value in args)
        kwargs = {name: _resolve(value, inputs) for name, value in kwargs.items()}
    return args, kwargs


def frames(body: protocol.Payload) -> list[Any]:
    """The frames of a payload, be it one or many."""
    return [body] if isinstance(body, bytes) else list(body)


def _resolve(value: Any, inputs: dict[Key, Any]) -> Any:
    try:
        if isinstance(value, GraphNode):
            return value({key: inputs[key] for key in value.dependencies})
        if isinstance(value, TaskRef):
            return inputs[value.key]
    except KeyError as error:
        raise MissingInput(error.args[0]) from None
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return _resolve_inside(value, inputs)
    return value


def _resolve_inside(value: Any, inputs: dict[Key, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _resolve(item, inputs) for key, item in value.items()}
    items = [_resolve(item, inputs) for item in value]
    return value._make(items) if hasattr(value, "_make") else type(value)(items)
