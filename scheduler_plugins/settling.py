"""What becomes of the requests of a batch that its worker has answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.metrics import monotonic, time

from daskinfer import protocol
from daskinfer.failure import type_of
from daskinfer.wording import counted
from scheduler_plugins.outcomes import INPUTS, cause_on_worker

if TYPE_CHECKING:
    from scheduler_plugins.line import Batch
    from scheduler_plugins.request import Request
    from scheduler_plugins.taskstate import TaskStates

#: How often an input may be found missing before its request fails.
_FETCH_ATTEMPTS = 5


class Settlement:
    """Gives the requests of answered batches their ends, or their next attempts.

    Parameters
    ----------
    tasks
        Dask's side of the requests.
    """

    def __init__(self, tasks: TaskStates) -> None:
        self._tasks = tasks

    def __repr__(self) -> str:
        return f"<Settlement by {self._tasks!r}>"

    def settle(
        self,
        batch: Batch,
        requests: dict[Key, Request],
        message: protocol.DoneMessage,
        address: str,
    ) -> None:
        """Give every request of a batch its end, or its next attempt."""
        share = message["ran"] / max(len(message["keys"]), 1)
        stop = time()
        about = {
            "name": batch.line.name,
            "version": batch.line.version,
            "digest": batch.line.digest,
            "worker": address,
            "device": message["device"],
            "batch_size": sum(p["rows"] for p in message["passes"]),
            "compute_seconds": message["ran"],
            "cached": False,
        }
        cached = {message["keys"][place] for place in message["cached"]}
        found = {**about, "cached": True}

        def metadata(key: Key) -> dict[str, Any]:
            request = requests.get(key)
            told = found if key in cached else about
            if request is None:
                return {**told, "queue_seconds": 0.0, "attempts": 1}
            waited = request.dispatched - request.arrived
            return {**told, "queue_seconds": waited, "attempts": request.attempts}

        run_ids = batch.run_ids
        if batch.given_up:
            requests |= batch.given_up
            # Only results are taken. Whatever else is said, another attempt decides.
            run_ids = {k: i for k, i in run_ids.items() if k not in batch.given_up}
            late = [
                key
                for key in message["keys"]
                if key in batch.given_up and not batch.given_up[key].forgotten
            ]
            run_ids |= self._tasks.adopt(late, address, message["stimulus_id"])
        for key in cached & requests.keys():
            requests[key].was_cached = True
        startstop = {"action": "compute", "start": stop - share, "stop": stop}
        clients = {key: request.client for key, request in requests.items()}
        self._tasks.complete(message, run_ids, address, clients, metadata, startstop)
        failed = {k: f for k, f in message["failed"].items() if k in run_ids}
        if failed:
            for key in failed:
                if key in requests:
                    # Should the user's `retries=` allow another attempt.
                    requests[key].tried |= {address}
                    requests[key].cause = cause_on_worker(failed[key])
                    why = f"{type_of(failed[key])} was raised on {address}"
                    requests[key].trail.interrupt(monotonic(), why)
            self._tasks.fail_running(failed, run_ids, address, message["stimulus_id"])
        missing = [
            key
            for key in message["missing"]
            if key in requests and key not in batch.given_up
        ]
        batch.line.figures.measures.interrupted[INPUTS] += len(missing)
        self._retry_missing(requests, missing, address, message["stimulus_id"])
        if message["broken"]:
            told = {*message["keys"], *message["failed"], *missing, *batch.given_up}
            left = [key for key in requests if key not in told]
            self._tasks.release_running(left, message["stimulus_id"])

    def _retry_missing(
        self,
        requests: dict[Key, Request],
        missing: list[Key],
        address: str,
        stimulus_id: str,
    ) -> None:
        """Park requests whose inputs a worker could not fetch; others are to try.

        They had moved when it looked for them, or it does not reach their holders.
        """
        for key in missing:
            request = requests[key]
            request.misses += 1
            told = f"its inputs were not where {address} looked for them"
            request.trail.interrupt(monotonic(), told)
            request.tried |= {address}
            if request.misses >= _FETCH_ATTEMPTS:
                request.error = RuntimeError(
                    f"the inputs of {key!r} could not be fetched from the workers "
                    "that should hold them, in "
                    f"{counted(request.misses, 'attempt')}"
                )
        # Last: it lets them wait again, or fail with the error they have by now.
        self._tasks.release_running(missing, stimulus_id)
