"""Who has a claim to a worker's memory, as it is the next to get room there.

Pure: claims and the time in, who may look for room out.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

#: A worker's address, and a kind of device.
_Device = tuple[str, str]


class _Claimant(Protocol):
    name: str
    version: str
    served: float


class _Claim(NamedTuple):
    which: tuple[str, str]
    served: float
    until: float


class Claims:
    """Keeps small models from taking, one by one, the room that a large one needs.

    Those who must go for it stay, and answer, until all of them may go. Meanwhile
    nobody else comes in there, unless it was given less device time.

    Examples
    --------
    >>> from types import SimpleNamespace as Line
    >>> large = Line(name="large", version="1", served=0.5)
    >>> small = Line(name="small", version="1", served=0.7)
    >>> claims = Claims()
    >>> claims.claim(large, ("tcp://w:1", "npu"), until=10.0)
    >>> [claims.admits(small, ("tcp://w:1", "npu"), now) for now in (9.0, 10.0)]
    [False, True]
    """

    def __init__(self) -> None:
        self._claims: dict[_Device, _Claim] = {}

    def __repr__(self) -> str:
        return f"<Claims to {len(self._claims)} devices>"

    def claim(self, line: _Claimant, device: _Device, until: float) -> None:
        """A version is the next on a device.

        It claims that again before ``until``, or does not need it any more.
        """
        self._claims[device] = _Claim((line.name, line.version), line.served, until)

    def drop(self, line: _Claimant) -> None:
        """A version has got room."""
        for device, claim in list(self._claims.items()):
            if claim.which == (line.name, line.version):
                del self._claims[device]

    def admits(self, line: _Claimant, device: _Device, now: float) -> bool:
        """Whether a version may take room on a device."""
        claim = self._claims.get(device)
        if claim is not None and claim.until <= now:
            del self._claims[device]
            claim = None
        return (
            claim is None
            or claim.which == (line.name, line.version)
            or line.served < claim.served
        )
