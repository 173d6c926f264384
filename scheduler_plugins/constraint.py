"""Where the user allows a request to run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constraint:
    """Where the user allows a request to run.

    Parameters
    ----------
    workers
        Worker addresses, or None for any.
    hosts
        Host names; a worker in ``workers`` or on one of them will do.
    resources
        ``(name, amount)`` pairs a worker must have declared.
    preferred_only
        Whether ``workers`` and ``hosts`` are only a preference.

    Examples
    --------
    >>> Constraint().anywhere
    True
    """

    workers: frozenset[str] | None = None
    hosts: frozenset[str] | None = None
    resources: tuple[tuple[str, float], ...] = ()
    preferred_only: bool = False

    @property
    def anywhere(self) -> bool:
        """Whether every worker will do."""
        return self.workers is None and self.hosts is None and not self.resources

    def __str__(self) -> str:
        parts = []
        if self.workers is not None or self.hosts is not None:
            places = sorted((self.workers or set()) | (self.hosts or set()))
            parts.append("workers " + ", ".join(places))
        if self.resources:
            parts.append(
                "resources " + ", ".join(f"{name}={n:g}" for name, n in self.resources)
            )
        return " and ".join(parts) or "any worker"


ANYWHERE = Constraint()
