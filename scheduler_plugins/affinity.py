"""Requests go where their result is, if that is faster than computing it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from daskinfer.cache import CacheKey
from scheduler_plugins.batching import Send
from scheduler_plugins.line import LaneKey
from scheduler_plugins.residency import ID_BYTES, Residency

if TYPE_CHECKING:
    from scheduler_plugins.line import Line
    from scheduler_plugins.load import DeviceLoad, Link
    from scheduler_plugins.queueing import Lane
    from scheduler_plugins.request import Request

#: Requests that are remembered, waiting or not, before those are let go that do not.
_FEW = 1024


def is_faster(
    now: float,
    *,
    requests: int,
    ahead: int,
    each: float,
    outbound: float,
    elsewhere: float,
) -> bool:
    """Whether results are found sooner than they could be computed.

    Parameters
    ----------
    now
        Monotonic time in seconds.
    requests
        How many would be looked up.
    ahead
        How many the worker is looking up already.
    each, outbound
        Seconds that one look-up takes, and the message.
    elsewhere
        When a device would have computed them, at the earliest.

    Examples
    --------
    A worker that is busy with look-ups is given no more than it can do in time:

    >>> about = dict(requests=10, each=2e-4, outbound=1e-3, elsewhere=0.010)
    >>> is_faster(0.0, ahead=0, **about), is_faster(0.0, ahead=100, **about)
    (True, False)
    """
    return now + outbound + (ahead + requests) * each <= elsewhere


class Affinity:
    """Knows where results are, and sends requests there while that is faster.

    A result that many ask for at once is computed a second time rather than waited
    for, and then found on two workers.

    Parameters
    ----------
    link
        What messages take.
    """

    def __init__(self, link: Link) -> None:
        self.residency = Residency()
        self._link = link
        self._turns = count()
        self._awaiting: defaultdict[tuple[str, bytes], list[Request]]
        self._awaiting = defaultdict(list)
        self._awaited = 0
        self._most = _FEW

    def __repr__(self) -> str:
        return f"<Affinity {self.residency!r}>"

    # Where results are

    def holder(self, request: Request, line: Line) -> str | None:
        """The worker to look a request up at; None if no worker has its result.

        Then the request is remembered until one has.
        """
        if request.content is None or not line.affinity:
            return None
        if request.tried or request.group is not None:
            return None
        now, gate = request.arrived, line.hit_gate
        if not gate.is_open(now):
            return None
        name = request.name
        result = CacheKey.of(name, line.digest, request.content).digest[:ID_BYTES]
        holders = self.residency.holders(name, result)
        gate.looked_up(1, bool(holders), now)
        if not holders:
            self._await(name, result, request)
            return None
        # In turns: whoever has it shall do its share.
        return holders[next(self._turns) % len(holders)]

    def reported(
        self, name: str, address: str, added: bytes, dropped: bytes
    ) -> list[Request]:
        """Take in a worker's report; return who waits for what it has."""
        self.residency.report(name, address, added, dropped)
        found: list[Request] = []
        for start in range(0, len(added), ID_BYTES):
            waiting = self._awaiting.pop((name, added[start : start + ID_BYTES]), ())
            self._awaited -= len(waiting)
            found += [request for request in waiting if request.waiting]
        return found

    def worker_lost(self, address: str) -> None:
        """A worker is gone, and its cache with it."""
        self.residency.worker_lost(address)

    def clear(self) -> None:
        """Forget all requests."""
        self._awaiting.clear()
        self._awaited = 0

    def _await(self, name: str, result: bytes, request: Request) -> None:
        if self._awaited >= self._most:
            self._clean()
        self._awaiting[name, result].append(request)
        self._awaited += 1

    def _clean(self) -> None:
        """Let go of requests that wait no more."""
        left = {
            key: [request for request in requests if request.waiting]
            for key, requests in self._awaiting.items()
        }
        self._awaiting.clear()
        self._awaiting.update(
            {key: waiting for key, waiting in left.items() if waiting}
        )
        self._awaited = sum(map(len, self._awaiting.values()))
        self._most = max(2 * self._awaited, _FEW)

    # Deciding

    def decide(
        self, line: Line, lane: Lane, devices: Sequence[DeviceLoad], now: float
    ) -> Send | None:
        """Have requests of a lane looked up where their results are, if it pays."""
        holder = lane.key.holder if isinstance(lane.key, LaneKey) else None
        if holder is None:
            return None
        device = next((d for d in devices if d.name == holder), None)
        # Where a batch may kill the worker, nothing else shall be.
        if device is None or device.isolated:
            return None
        rows = min(lane.rows, line.policy.max_batch_size)
        requests = min(lane.count, rows)
        outbound, each = self._link.outbound, line.hit_cost.seconds
        # Looked up they are there, too, before they are computed.
        ready = now + outbound + requests * each
        elsewhere = min(
            max(ready, d.expected_free(now, self._link))
            + line.latency.seconds(d.name, d.device_class, rows)
            for d in devices
        )
        if is_faster(
            now,
            requests=requests,
            ahead=device.lookups,
            each=each,
            outbound=outbound,
            elsewhere=elsewhere,
        ):
            return Send(device, rows, False, "cached")
        return None
