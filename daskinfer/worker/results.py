"""Results into the worker's memory, as if its tasks had made them."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from dask.utils import typename
from distributed.protocol.serialize import to_serialize
from distributed.worker_state_machine import FreeKeysEvent, UpdateDataEvent

from daskinfer import protocol, transport
from daskinfer.exceptions import ResultNotKept
from daskinfer.failure import dump_failure, origin
from daskinfer.logs import Log
from daskinfer.wording import counted

if TYPE_CHECKING:
    from distributed import Worker

    from daskinfer.protocol import Failure

logger = Log("results")


def store(worker: Worker, results: dict[Key, Any], stimulus_id: str) -> dict[str, Any]:
    """Put results under their keys, and say what was really kept.

    Dask may be unable to keep a value: one beyond the memory target that cannot be
    serialized to be spilled.

    Parameters
    ----------
    worker
        Whose memory it is; call this on its event loop.
    results
        Values by key.
    stimulus_id
        For Dask's logs.

    Returns
    -------
    dict
        The part of a :class:`~daskinfer.protocol.DoneMessage` that concerns
        results, ``failed`` included.
    """
    state = worker.state
    # A copy from an attempt of the past would silently stay instead.
    forget(worker, results, stimulus_id)
    worker.handle_stimulus(UpdateDataEvent(data=results, stimulus_id=stimulus_id))
    types: dict[type, int] = {}
    keys, nbytes, index, lost = [], [], [], []
    for key in results:
        ts = state.tasks.get(key)
        if ts is None or ts.state != "memory" or ts.type is None:
            lost.append(key)
            continue
        keys.append(key)
        nbytes.append(ts.nbytes)
        index.append(types.setdefault(ts.type, len(types)))
    failed = {key: _why_lost(worker, key) for key in lost}
    if lost:
        worker.handle_stimulus(FreeKeysEvent(keys=lost, stimulus_id=stimulus_id))
    return {
        "keys": keys,
        "nbytes": nbytes,
        "type_index": index,
        "types": [_dump_type(kind) for kind in types],
        "typenames": [typename(kind) for kind in types],
        "failed": failed,
    }


def forget(worker: Worker, keys: Iterable[Key], stimulus_id: str) -> None:
    """Drop whatever the worker has under some keys; call this on its event loop."""
    stale = [key for key in keys if key in worker.state.tasks]
    if stale:
        worker.handle_stimulus(FreeKeysEvent(keys=stale, stimulus_id=stimulus_id))


def _why_lost(worker: Worker, key: Key) -> Failure:
    ts = worker.state.tasks.get(key)
    if ts is not None and ts.state == "error":
        return {
            "exception": ts.exception,
            "traceback": ts.traceback,
            "exception_text": ts.exception_text,
            "traceback_text": ts.traceback_text,
        }
    return dump_failure(
        ResultNotKept(f"{worker.address} did not keep the result of {key!r}")
    )


def _dump_type(kind: type) -> bytes:
    try:
        return pickle.dumps(kind)
    except Exception:
        # Local classes: Dask's client shows the name then.
        return pickle.dumps(typename(kind))


def pack_small(worker: Worker, keys: list[Key], limit: int) -> dict[str, Any]:
    """Pack the results that are here and have no more than ``limit`` bytes."""
    found = [key for key in keys if _is_small(worker, key, limit)]
    pack = packed([worker.data[key] for key in found])
    if pack is None:
        return {**pack_small(worker, [], limit), "missing": keys}
    missing = list(set(keys).difference(found))
    return {"keys": found, "missing": missing, **pack}


def _is_small(worker: Worker, key: Key, limit: int) -> bool:
    ts = worker.state.tasks.get(key)
    return (
        ts is not None
        and ts.state == "memory"
        and ts.nbytes is not None
        and ts.nbytes <= limit
    )


def packed(values: list[Any]) -> protocol.Pack | None:
    """Values as a message carries them; None if one of them cannot be pickled."""
    try:
        return pack_all(values)
    except Exception as error:
        # Clients fetch them one by one, and hear then from Dask which cannot be sent.
        told = counted(len(values), "result")
        logger.info("Could not pack %s: %s", told, origin(error))
        return None


def pack_all(values: list[Any]) -> protocol.Pack:
    """Values as a message carries them.

    Raises
    ------
    Exception
        What pickling one of them raises.
    """
    header, frames = transport.pack(values)
    return {"header": header, "frames": [_as_part(frame) for frame in frames]}


def _as_part(frame: transport.Frame) -> Any:
    """A frame as a message carries it best: large ones uncopied."""
    small = memoryview(frame).nbytes < transport.OUT_OF_BAND_BYTES
    return bytes(frame) if small else to_serialize(frame)


def dump_errors(errors: dict[Any, Any]) -> dict[Key, protocol.Failure]:
    """Failures by key; requests that failed together share one traceback."""
    dumped: dict[int, protocol.Failure] = {}
    for error in errors.values():
        if id(error) not in dumped:
            dumped[id(error)] = dump_failure(error)
    return {key: dumped[id(error)] for key, error in errors.items()}
