"""Small results that go to their clients with the word that they exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dask.typing import Key

from daskinfer import protocol

if TYPE_CHECKING:
    from daskinfer.protocol import AnswersMessage, Pack


class Answers:
    """Who gets which values of a batch's pack.

    Parameters
    ----------
    pack
        What came from the worker, forwarded unread; None: nothing is sent.

    Examples
    --------
    >>> answers = Answers({"header": b"", "frames": []})
    >>> answers.add("client-1", "a", 0)
    >>> answers.add("client-1", "c", 2)
    >>> [(client, m["keys"], m["places"]) for client, m in answers.messages()]
    [('client-1', ['a', 'c'], [0, 2])]
    """

    def __init__(self, pack: Pack | None) -> None:
        self._pack = pack
        self._places: dict[str, dict[Key, int]] = {}

    def __repr__(self) -> str:
        return f"<Answers to {len(self._places)} clients>"

    def add(self, client: str | None, key: Key, place: int) -> None:
        """Note that a client waits for a value."""
        if client is not None and self._pack is not None:
            self._places.setdefault(client, {})[key] = place

    def messages(self) -> Iterator[tuple[str, AnswersMessage]]:
        """What to send to whom."""
        if self._pack is None:
            return
        for client, places in self._places.items():
            yield (
                client,
                {
                    "op": protocol.ANSWERS,
                    "keys": list(places),
                    "places": list(places.values()),
                    "pack": self._pack,
                },
            )
