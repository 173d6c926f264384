"""What several transitions ask for, applied together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dask.typing import Key

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


class Changes:
    """Collects recommendations and messages, and applies them in one step.

    Parameters
    ----------
    scheduler
        Whose transitions they are.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._recommendations: dict[Key, Any] = {}
        self._client_msgs: dict[str, list[Any]] = {}
        self._worker_msgs: dict[str, list[Any]] = {}

    def add(self, changes: tuple[Any, dict[str, Any], dict[str, Any]]) -> None:
        """Collect what one transition asks for."""
        recommendations, client_msgs, worker_msgs = changes
        self._recommendations.update(recommendations)
        for client, messages in client_msgs.items():
            self._client_msgs.setdefault(client, []).extend(messages)
        for worker, messages in worker_msgs.items():
            self._worker_msgs.setdefault(worker, []).extend(messages)

    def tell_worker(self, address: str, message: dict[str, Any]) -> None:
        """Collect one more message to a worker."""
        self._worker_msgs.setdefault(address, []).append(message)

    def tell_client_first(self, client: str, message: Mapping[str, Any]) -> None:
        """Collect a message that a client shall get ahead of all others."""
        self._client_msgs.setdefault(client, []).insert(0, dict(message))

    def apply(self, stimulus_id: str) -> None:
        """Run what follows from the transitions, and send the messages."""
        s = self._scheduler
        s._transitions(
            self._recommendations, self._client_msgs, self._worker_msgs, stimulus_id
        )
        s.send_all(self._client_msgs, self._worker_msgs)
