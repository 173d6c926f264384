"""Which version answers a request.

Each change of what is active, or of a canary's share, makes a new *edition*: what was
active together, for all deployments. The steps of a pipeline are answered by one
edition, for as long as its versions are there.

Pure: no clock, no event loop, no Dask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from dask.typing import Key

if TYPE_CHECKING:
    from scheduler_plugins.deployment import Version
    from scheduler_plugins.registry import Registry
    from scheduler_plugins.request import Request


def point_of(key: Key) -> float:
    """Where a key stands between 0 and 1, the same in every process.

    >>> 0 <= point_of("resnet50-1") < 1, point_of("a") == point_of("a")
    (True, True)
    """
    digest = blake2b(str(key).encode(), digest_size=8).digest()
    # More bits than a float has could round up to 1.
    return (int.from_bytes(digest, "big") >> 11) / 2**53


@dataclass(frozen=True, slots=True)
class Route:
    """Which versions of one deployment answer.

    Parameters
    ----------
    active
        The version that answers.
    canary, share
        The one that answers a share of the requests instead, between 0 and 1.

    Examples
    --------
    >>> route = Route("1", "2", 0.05)
    >>> route.pick(0.04), route.pick(0.06)
    ('2', '1')
    """

    active: str
    canary: str | None = None
    share: float = 0.0

    def pick(self, point: float) -> str:
        """The version for requests of this point."""
        if self.canary is not None and point < self.share:
            return self.canary
        return self.active


@dataclass(frozen=True, slots=True)
class Edition:
    """What was active together: the routes by deployment, and which edition it is."""

    number: int = 0
    routes: Mapping[str, Route] = field(default_factory=dict)


class Routing:
    """Tells the version for each request.

    Parameters
    ----------
    registry
        What is deployed.

    Attributes
    ----------
    edition
        What is active now.
    """

    def __init__(self, registry: Registry) -> None:
        self.edition = Edition()
        self._registry = registry
        self._has_switched = False

    def __repr__(self) -> str:
        return f"<Routing edition: {self.edition.number}>"

    def publish(self) -> None:
        """The route of a deployment has changed."""
        routes = {d.name: d.route for d in self._registry}
        changed = (
            name for name, route in routes.items() if route != self._route_of(name)
        )
        self._has_switched |= any(name in self.edition.routes for name in changed)
        self.edition = Edition(self.edition.number + 1, routes)

    def version(self, request: Request) -> Version:
        """The version that is to answer a request.

        Raises
        ------
        UnknownDeployment
            If the deployment is not there, or the version that was asked for.
        """
        if request.pinned is not None:
            return self._registry.version(request.name, request.pinned)
        deployment = self._registry.deployment(request.name)
        if not request.is_bound and deployment.route.canary is None:
            return deployment.versions[deployment.active]
        for route in (self._bound(request), deployment.route):
            if route is None:
                continue
            point = 0.0 if route.canary is None else self._point(request)
            found = deployment.versions.get(route.pick(point))
            if found is not None and found.version not in deployment.leaving:
                is_active = found.version == deployment.active
                if is_active or found.ready() or found.cold:
                    return found
        return deployment.versions[deployment.active]

    def bind(self, request: Request, key: Key) -> None:
        """Have a request answered by what is active now, as the others of ``key``."""
        request.edition, request.point = self.edition, point_of(key)
        request.is_bound = True

    def follow(self, request: Request, inputs: Iterable[Request]) -> None:
        """Have a request answered by what has answered its inputs.

        By the latest of them, where they differ.
        """
        editions = [r for r in inputs if r.edition is not None]
        if editions:
            last = max(editions, key=_number)
            request.edition, request.point = last.edition, self._point(last)
            request.is_bound = True

    @property
    def has_switched(self) -> bool:
        """Whether any deployment's answers have ever come from two versions."""
        return self._has_switched

    def _route_of(self, name: str) -> Route | None:
        return self.edition.routes.get(name)

    def _bound(self, request: Request) -> Route | None:
        if not request.is_bound or request.edition is None:
            return None
        return request.edition.routes.get(request.name)

    def _point(self, request: Request) -> float:
        if request.point is None:
            request.point = point_of(request.key)
        return request.point


def _number(request: Request) -> int:
    assert request.edition is not None
    return request.edition.number
