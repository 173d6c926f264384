"""What errors of requests say: where they were raised, and with what input."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dask.typing import Key

from daskinfer import payload
from daskinfer.exceptions import OutOfDeviceMemory
from daskinfer.failure import note_origin
from daskinfer.options import mistaken_option
from daskinfer.worker.device_queue import current_worker

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.worker.execution import Item
    from daskinfer.worker.models import ResidentModel


def explain(
    model: ResidentModel,
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
        if model.device.is_out_of_memory(error):
            errors[item.key] = _no_memory(model, item, error, address)
            continue
        many = sharing[id(error)]
        about = f"{many:,} requests" if many > 1 else _described(item, error)
        note_origin(error, model.name, model.version, address, about)


def _no_memory(
    model: ResidentModel, item: Item, error: BaseException, address: str
) -> OutOfDeviceMemory:
    where = f"{model.device.torch_device} of {address}"
    told = OutOfDeviceMemory(
        f"{item.key!r} of {model.name!r} does not fit the memory of {where}, not "
        f"even alone and with an emptied cache: make its input smaller. {error}",
        key=item.key,
        name=model.name,
        version=model.version,
        worker=address,
    )
    told.__cause__ = error
    return told


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
