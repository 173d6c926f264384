"""The message that carries a batch to its worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.protocol.serialize import to_serialize

from daskinfer import protocol, transport
from daskinfer.failure import dump_failure

if TYPE_CHECKING:
    from scheduler_plugins.line import Batch, Line
    from scheduler_plugins.taskstate import TaskStates


def pickle_inputs(
    tasks: TaskStates, keys: Iterable[Key]
) -> tuple[dict[Key, protocol.Payload], dict[Key, protocol.Failure]]:
    """Pickled inputs by key; and the failures of those that cannot be pickled."""
    payloads: dict[Key, protocol.Payload] = {}
    failures: dict[Key, protocol.Failure] = {}
    for key in keys:
        try:
            payloads[key] = tasks.payload(key, _pickle)
        except Exception as error:
            failures[key] = dump_failure(error)
    return payloads, failures


def run_message(
    tasks: TaskStates, batch: Batch, payloads: dict[Key, protocol.Payload]
) -> protocol.RunMessage:
    """Ask a worker to run a batch."""
    sizes, rows = pass_sizes(batch.line, batch.device.device_class, batch.rows)
    contents = [batch.requests[key].content for key in payloads]
    return {
        "op": protocol.RUN,
        "batch": batch.batch_id,
        "name": batch.line.name,
        "version": batch.line.version,
        "keys": list(payloads),
        "payloads": list(payloads.values()),
        "who_has": tasks.who_has(payloads),
        "pass_sizes": sizes,
        "pass_rows": rows,
        "held": batch.looked_up,
        "contents": contents if any(contents) else [],
        "streams": {
            key: {**request.stream, "skip": request.delivered}
            for key, request in batch.requests.items()
            if key in payloads and request.stream is not None
        },
        "idle_timeout": batch.line.idle_timeout,
        "inline": max((r.inline for r in batch.requests.values()), default=0),
        "stimulus_id": batch.stimulus_id,
    }


def pass_sizes(line: Line, device_class: str, rows: int) -> tuple[list[int], int]:
    """How a worker cuts a batch that is larger than one pass.

    Returns
    -------
    sizes, rows
        Rows of the first passes, which measure what was never measured, and of all
        others.
    """
    limit = line.latency.ceiling(device_class)
    if rows <= limit:
        return [], limit
    measured = set(line.latency.sizes(device_class))
    candidates = line.policy.allowed_batch_sizes or [
        1 << i for i in range(limit.bit_length())
    ]
    unknown = [n for n in candidates if n <= limit and n not in measured]
    # Each twice: the first run of a size is distrusted.
    trials = [n for n in unknown for _ in range(2)]
    affordable = sum(trials) <= rows / 2
    best = line.batcher.best_size(device_class)
    return (trials if affordable else []), (limit if unknown else best)


def _pickle(inputs: Any) -> protocol.Payload:
    frames = transport.dumps(inputs)
    if len(frames) == 1:
        return bytes(frames[0])
    return [to_serialize(frame) for frame in frames]
