"""Where a model is loaded that does not fit beside all others, and what makes room.

Pure: what workers hold in, the place for one more out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

#: Name and version of a model.
Which: TypeAlias = "tuple[str, str]"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A model in the memory of a worker.

    Parameters
    ----------
    which
        Its name and version.
    nbytes
        What its weights take.
    since, used
        When it was loaded, and last answered a batch, in seconds on a monotonic clock.
    wanted_until
        Until when it is not to go, but for others that are wanted as well. Infinite
        while it has batches under way, or requests that wait.
    is_fixed
        Whether it must not go, whoever else comes.
    """

    which: Which
    nbytes: int
    since: float
    used: float
    wanted_until: float = -math.inf
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """A worker's memory for models.

    Parameters
    ----------
    address
        The worker.
    nbytes
        What its models may take together.
    tenants
        Those that it has, or is loading.
    has_parked
        Whether the model in question lies in the memory of its host.
    """

    address: str
    nbytes: float
    tenants: tuple[Tenant, ...] = ()
    has_parked: bool = False

    @property
    def free(self) -> float:
        """Bytes that are not taken; negative where too much is."""
        return self.nbytes - sum(tenant.nbytes for tenant in self.tenants)


@dataclass(frozen=True, slots=True)
class Place:
    """A worker that can load a model, once some others have left."""

    address: str
    leaving: tuple[Tenant, ...] = ()


def find_place(
    spaces: Iterable[Space], nbytes: int, now: float, turn: float, *, urgent: bool
) -> Place | float:
    """Find the worker where a model costs the others least.

    First comes a worker where nobody must leave who is wanted; then one whose host has
    the model in memory; then one with room; then that where those who must leave have
    not been used for the longest time.

    Parameters
    ----------
    spaces
        The workers that could load it.
    nbytes
        What it takes.
    now
        Monotonic time in seconds.
    turn
        Seconds for which a model that is wanted keeps its place in any case.
    urgent
        Whether requests can go nowhere else. Else only those leave for it that have
        not been used for ``turn`` seconds.

    Returns
    -------
    Place or float
        When to ask again, if there is no place and nothing happens before.

    Examples
    --------
    >>> idle = Tenant(("a", "1"), 6, since=0.0, used=10.0)
    >>> busy = Tenant(("b", "1"), 6, since=0.0, used=20.0, wanted_until=math.inf)
    >>> spaces = [Space("tcp://w:1", 10, (idle,)), Space("tcp://w:2", 10, (busy,))]
    >>> place = find_place(spaces, 8, now=21.0, turn=5.0, urgent=True)
    >>> place.address, [tenant.which for tenant in place.leaving]
    ('tcp://w:1', [('a', '1')])
    >>> find_place(spaces[1:], 8, now=3.0, turn=5.0, urgent=True)
    5.0
    """
    until = math.inf
    best: tuple[tuple[bool, bool, bool, float, float], Place] | None = None
    for space in spaces:
        leaving = _leaving(space, nbytes, now, turn, urgent)
        if isinstance(leaving, float):
            until = min(until, leaving)
            continue
        cost = (
            any(tenant.wanted_until > now for tenant in leaving),
            not space.has_parked,
            bool(leaving),
            max((tenant.used for tenant in leaving), default=0.0),
            -space.free,
        )
        if best is None or cost < best[0]:
            best = cost, Place(space.address, tuple(leaving))
    return until if best is None else best[1]


def soonest(spaces: Iterable[Space], nbytes: int, turn: float) -> str | None:
    """Find the worker where there is room first, if nobody else comes meanwhile.

    Parameters
    ----------
    spaces, nbytes, turn
        As for :func:`find_place`; the request can go nowhere else.

    Returns
    -------
    str or None
        Its address; None if there will be room on none.
    """
    fitting = [space for space in spaces if not never_fits(space, nbytes)]
    found = min(fitting, key=lambda s: _room_at(s, nbytes, turn), default=None)
    return None if found is None else found.address


def never_fits(space: Space, nbytes: int) -> bool:
    """Whether a model finds no room, even if all leave that can."""
    fixed = sum(tenant.nbytes for tenant in space.tenants if tenant.is_fixed)
    return nbytes > space.nbytes - fixed


def _leaving(
    space: Space, nbytes: int, now: float, turn: float, urgent: bool
) -> list[Tenant] | float:
    """Who has to leave, the least recently used first; or when to ask again."""
    missing = nbytes - space.free
    if missing <= 0:
        return []
    leaving: list[Tenant] = []
    until = math.inf
    for tenant in sorted(space.tenants, key=lambda t: (t.wanted_until > now, t.used)):
        if tenant.is_fixed:
            continue
        at = _may_go_at(tenant, turn, urgent)
        if at > now:
            until = min(until, at)
            continue
        leaving.append(tenant)
        missing -= tenant.nbytes
        if missing <= 0:
            return _needed(leaving, -missing)
    return until


def _room_at(space: Space, nbytes: int, turn: float) -> float:
    """When enough may go; infinite if that is not known, as some are being loaded."""
    missing, at = nbytes - space.free, -math.inf
    going = (
        (_may_go_at(t, turn, True), t.nbytes) for t in space.tenants if not t.is_fixed
    )
    for may_go_at, freed in sorted(going):
        if missing <= 0:
            break
        missing, at = missing - freed, may_go_at
    return at


def _may_go_at(tenant: Tenant, turn: float, urgent: bool) -> float:
    if urgent:
        return min(tenant.wanted_until, tenant.since + turn)
    return max(tenant.wanted_until, tenant.used + turn)


def _needed(leaving: list[Tenant], spare: float) -> list[Tenant]:
    """Without those who turn out to be too small to matter."""
    needed = []
    # Whoever was used last stays, if it can.
    for tenant in reversed(leaving):
        if tenant.nbytes <= spare:
            spare -= tenant.nbytes
        else:
            needed.append(tenant)
    return needed[::-1]
