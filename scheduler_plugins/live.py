"""The streams that are under way. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dask.typing import Key

from daskinfer.protocol import STEPS

if TYPE_CHECKING:
    from scheduler_plugins.line import Line
    from scheduler_plugins.load import DeviceLoad
    from scheduler_plugins.request import Request


@dataclass(slots=True, eq=False)
class LiveStream:
    """A request that a worker answers piece by piece.

    It came to the worker with a batch, which is answered, and as its ``run_id`` says.
    ``began`` and ``latest`` are when the first and the latest of its chunks came, in
    seconds on a monotonic clock.
    """

    request: Request
    batch_id: str
    line: Line
    device: DeviceLoad
    run_id: int
    began: float
    latest: float


class LiveStreams:
    """All streams that workers have, by batch and key.

    Examples
    --------
    >>> LiveStreams()
    <LiveStreams: 0>
    """

    def __init__(self) -> None:
        self._batches: dict[str, dict[Key, LiveStream]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._batches.values()))

    def __iter__(self) -> Iterator[LiveStream]:
        for streams in self._batches.values():
            yield from streams.values()

    def __repr__(self) -> str:
        return f"<LiveStreams: {len(self)}>"

    def workers(self) -> set[str]:
        """Workers that have a stream."""
        return {stream.device.name for stream in self}

    def find(self, batch_id: str | None, key: Key) -> LiveStream | None:
        """A stream by its batch; None if it has ended, or is not wanted any more."""
        return self._batches.get(batch_id or "", {}).get(key)

    def add(self, stream: LiveStream) -> None:
        """A stream has begun."""
        line = stream.line
        if stream.batch_id not in self._batches:
            self._batches[stream.batch_id] = {}
            # Its version is not unloaded before its last stream has ended.
            line.in_flight += 1
        self._batches[stream.batch_id][stream.request.key] = stream
        line.streaming[stream.device.name] += 1

    def remove(self, stream: LiveStream) -> None:
        """A stream has ended."""
        streams = self._batches[stream.batch_id]
        del streams[stream.request.key]
        line, address = stream.line, stream.device.name
        line.streaming[address] -= 1
        if not line.streaming[address]:
            del line.streaming[address]
        if not streams:
            del self._batches[stream.batch_id]
            line.in_flight -= 1

    def on(self, address: str) -> list[LiveStream]:
        """Those of a worker."""
        return [stream for stream in self if stream.device.name == address]


def roomiest(line: Line, devices: Iterable[DeviceLoad]) -> list[DeviceLoad]:
    """The devices that should take the next streams of a version.

    Those have room for one more. Of the devices that have nothing before them, those
    with the fewest streams are preferred, as streams take turns. Where they step
    together, those that advance a request the fastest.
    """
    live = {device: line.streams_on(device.name) for device in devices}
    free = [
        device for device in live if live[device] < line.most_streams_on(device.name)
    ]
    if line.kind == STEPS:
        best = line.pace.best({device.name: n for device, n in live.items()})
        return [device for device in free if device.name in best]
    idle = [device for device in free if device.idle]
    if not idle:
        return free
    fewest = min(line.streams_on(device.name) for device in idle)
    return [device for device in idle if line.streams_on(device.name) == fewest]
