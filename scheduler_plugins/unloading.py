"""Telling workers to let go of versions, and waiting until they have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

from daskinfer import protocol

if TYPE_CHECKING:
    from scheduler_plugins.deployment import Version


class Unloading:
    """What workers were told to unload, and have not said that they did.

    Parameters
    ----------
    send
        Sends a message to a worker: ``send(address, message)``.

    Examples
    --------
    >>> unloading = Unloading(lambda address, message: None)
    >>> unloading.ask("tcp://w:1", "m", "1")
    1
    >>> unloading.pending([1])
    ['tcp://w:1']
    >>> unloading.ended("tcp://w:1", 1)
    >>> unloading.pending([1])
    []
    """

    def __init__(self, send: Callable[[str, Any], None]) -> None:
        self._send = send
        self._numbers = count(1)
        self._asked: dict[int, str] = {}
        self._nbytes: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Unloading: {len(self)}>"

    def __len__(self) -> int:
        return len(self._asked)

    def ask(
        self,
        address: str,
        name: str,
        version: str,
        nbytes: int = 0,
        *,
        keep: bool = False,
    ) -> int:
        """Tell a worker to let go of a version; return the number of the message.

        It has ``nbytes`` of the device's memory. What is to be kept makes room for
        others, and may be wanted again.
        """
        number = next(self._numbers)
        message: protocol.UnloadMessage = {
            "op": protocol.UNLOAD,
            "name": name,
            "version": version,
            "unload": number,
            "keep": keep,
            "stimulus_id": f"daskinfer-unload-{name}-{version}",
        }
        self._asked[number] = address
        self._nbytes[number] = nbytes
        self._send(address, dict(message))
        return number

    def ask_all(self, version: Version) -> list[int]:
        """Tell every worker that has a version, or loads it."""
        cold = version.cold
        return [
            self.ask(a, version.name, version.version, version.nbytes * (a not in cold))
            for a in version.replicas
        ]

    def ended(self, address: str, number: int) -> None:
        """A worker has let go of it."""
        if self._asked.get(number) == address:
            del self._asked[number], self._nbytes[number]

    def left(self, address: str) -> None:
        """A worker is gone, and all that it had."""
        for number in self.under_way(address):
            del self._asked[number], self._nbytes[number]

    def under_way(self, address: str) -> list[int]:
        """What a worker was told to let go of, and has not yet."""
        return sorted(n for n, a in self._asked.items() if a == address)

    def nbytes(self, address: str) -> int:
        """What it has not freed yet."""
        return sum(self._nbytes[number] for number in self.under_way(address))

    def pending(self, numbers: Iterable[int]) -> list[str]:
        """Workers that have not answered these messages."""
        return sorted({self._asked[n] for n in numbers if n in self._asked})
