"""Has the process of a worker whose device is broken started anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from daskinfer import protocol
from daskinfer.logs import Log

if TYPE_CHECKING:
    from scheduler_plugins.deployment import WorkerFacts
    from scheduler_plugins.dispatcher import Dispatcher
    from scheduler_plugins.registry import Registry
    from scheduler_plugins.taskstate import TaskStates

logger = Log("replacing")


_STIMULUS = "daskinfer-replace"


class Replacing:
    """Takes workers whose device is broken out of service, and knows their successors.

    Parameters
    ----------
    tasks
        Knows the workers.
    registry
        What is deployed, and where.
    dispatcher
        Gives workers their requests.
    send
        Sends a message to a worker: ``send(address, message)``.

    Notes
    -----
    A process and the one that comes in its place have the same seat: their Nanny, or
    the name that a user gave to both.
    """

    def __init__(
        self,
        tasks: TaskStates,
        registry: Registry,
        dispatcher: Dispatcher,
        send: Callable[[str, Any], None],
    ) -> None:
        self._tasks = tasks
        self._registry = registry
        self._dispatcher = dispatcher
        self._send = send
        self._awaited: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<Replacing awaits: {sorted(self._awaited)}>"

    def device_failed(self, address: str, reason: str) -> None:
        """Nothing runs on a worker's device any more."""
        worker = self._registry.workers.get(address)
        if worker is None or worker.broken is not None:
            return
        self._take_out(worker, f"its device is broken: {reason}", reason)

    def hung(self, address: str, reason: str) -> None:
        """A batch does not end on a worker's device.

        Without a Nanny the worker is left alone: it may answer yet.
        """
        worker = self._registry.workers.get(address)
        if worker is not None and self._tasks.has_nanny(address):
            self._take_out(worker, f"its device hangs: {reason}", reason)

    def _take_out(self, worker: WorkerFacts, told: str, reason: str) -> None:
        address = worker.address
        self._awaited[worker.seat] = f"its process is new: {reason}"
        replaced = self._tasks.has_nanny(address)
        if replaced:
            message: protocol.ReplaceMessage = {
                "op": protocol.REPLACE,
                "reason": told,
                "stimulus_id": _STIMULUS,
            }
            self._send(address, dict(message))
            told += "; its Nanny starts it anew"
        else:
            told += "; it has no Nanny: start it anew"
        logger.warning(
            "%s is out of service: %s",
            *(address, told),
            stimulus_id=_STIMULUS,
            limited=False,
        )
        self._registry.device_failed(address, told, replaced=replaced)
        self._dispatcher.device_failed(address, reason)

    def loading_failed(
        self, name: str, version: str, address: str, reason: str, failure: Any
    ) -> None:
        """A device broke while a version was loaded or warmed there."""
        self._registry.broke_device(name, version, address, reason, failure)
        self.device_failed(address, reason)

    def came(self, seat: str) -> str | None:
        """A worker is there; tell why its process is in place of another, if it is."""
        return self._awaited.pop(seat, None)
