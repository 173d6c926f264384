"""One request's life, for whoever asks why it took so long, or where it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Any, overload

from dask.typing import Key


@dataclass(frozen=True, slots=True)
class StoryEntry:
    """Something that has happened to a request.

    Attributes
    ----------
    time
        When, in seconds since the epoch, by the scheduler's clock.
    source
        Who tells: ``"engine"``, ``"dask"``, which moves the request's task from one
        state to another, or the address of a worker.
    event, detail
        What it was, in a word or two, and more about it.
    stimulus_id
        By which it is found in Dask's logs, and in the engine's; may be empty.
    """

    time: float
    source: str
    event: str
    detail: str = ""
    stimulus_id: str = ""


class Story(Sequence[StoryEntry]):
    r"""What has happened to a request, in order; see :meth:`daskinfer.Model.story`.

    Printed, it is a table; a notebook shows it as one.

    Parameters
    ----------
    key, name
        The request, and the deployment that it was sent to.
    state
        How it is with it now, such as ``"queued"`` or ``"answered"``.
    entries
        What has happened.
    problem
        Why it is not served, where that is so.

    Examples
    --------
    >>> story = Story(
    ...     "m-1",
    ...     "m",
    ...     "answered",
    ...     (
    ...         StoryEntry(1e9, "engine", "submitted"),
    ...         StoryEntry(1e9 + 0.0125, "engine", "sent", "in batch m-7", "run-m-7"),
    ...     ),
    ... )
    >>> print("\n".join(str(story).splitlines()[1:]))
    after     who     what       about
     +0.0 ms  engine  submitted
    +12.5 ms  engine  sent       in batch m-7 [run-m-7]
    >>> len(story), story[-1].event
    (2, 'sent')
    """

    def __init__(
        self,
        key: Key,
        name: str,
        state: str,
        entries: Sequence[StoryEntry],
        problem: str | None = None,
    ) -> None:
        self.key = key
        self.name = name
        self.state = state
        self.problem = problem
        self._entries = tuple(entries)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Story:
        """Rebuild from plain data as the scheduler sends it."""
        entries = [StoryEntry(*entry) for entry in message["entries"]]
        about = message["key"], message["name"], message["state"]
        return cls(*about, entries, message["problem"])

    def __repr__(self) -> str:
        return f"<Story of {self.key!r}: {self.state}, entries: {len(self)}>"

    @overload
    def __getitem__(self, index: int) -> StoryEntry: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[StoryEntry]: ...

    def __getitem__(self, index: int | slice) -> StoryEntry | Sequence[StoryEntry]:
        return self._entries[index]

    def __iter__(self) -> Iterator[StoryEntry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def events(self) -> list[str]:
        """What the engine tells, in a word or two each."""
        return [entry.event for entry in self if entry.source == "engine"]

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(_TITLES, *rows, strict=True)]
        lines = [self._title()]
        for after, *others in (_TITLES, *rows):
            is_title = after == _TITLES[0]
            align = str.ljust if is_title else str.rjust
            cells = [align(after, widths[0])]
            cells += [c.ljust(w) for c, w in zip(others, widths[1:], strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{title}</th>" for title in _TITLES)
        rows = (
            "".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._rows()
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return (
            f"<p>{escape(self._title())}</p><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )

    def _title(self) -> str:
        problem = f": {self.problem}" if self.problem else ""
        since = ""
        if self:
            since = f", since {datetime.fromtimestamp(self[0].time):%Y-%m-%d %H:%M:%S}"
        return f"{self.key!r} of {self.name!r}{since}: {self.state}{problem}"

    def _rows(self) -> list[tuple[str, ...]]:
        began = self[0].time if self else 0.0
        return [
            (
                f"+{1e3 * (entry.time - began):,.1f} ms",
                entry.source,
                entry.event,
                f"{entry.detail} [{entry.stimulus_id}]".strip()
                if entry.stimulus_id
                else entry.detail,
            )
            for entry in self
        ]


_TITLES = ("after", "who", "what", "about")
