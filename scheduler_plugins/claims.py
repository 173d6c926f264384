"""Who has a claim to a worker's memory, as it is the next to get room there.

Pure: claims and the time in, who may look for room out.
"""

from __future__ import annotations

from typing import NamedTuple

from scheduler_plugins.room import Which

#: A worker's address, and a kind of device.
_Device = tuple[str, str]


class _Claim(NamedTuple):
    which: Which
    served: float
    until: float


class Claims:
    """Keeps small models from taking, one by one, the room that a large one needs.

    Those who must go for it stay until all of them may go, so that no memory lies idle
    meanwhile. Only the places where some have gone before are not given to others,
    unless these were given less device time.

    Examples
    --------
    >>> claims = Claims()
    >>> claims.claim(("large", "1"), 0.5, ("tcp://w:1", "npu"), until=10.0)
    >>> claims.admits(("small", "1"), 0.7, ("tcp://w:1", "npu"), now=9.0)
    False
    >>> claims.admits(("small", "1"), 0.3, ("tcp://w:1", "npu"), now=9.0)
    True
    >>> claims.admits(("small", "1"), 0.7, ("tcp://w:1", "npu"), now=10.0)
    True
    """

    def __init__(self) -> None:
        self._claims: dict[_Device, _Claim] = {}

    def __repr__(self) -> str:
        return f"<Claims to {len(self._claims)} devices>"

    def claim(self, which: Which, served: float, device: _Device, until: float) -> None:
        """A version that was given so much device time is the next on a device.

        It claims that again before ``until``, or does not need it any more.
        """
        self._claims[device] = _Claim(which, served, until)

    def drop(self, which: Which) -> None:
        """A version has got room."""
        for device, claim in list(self._claims.items()):
            if claim.which == which:
                del self._claims[device]

    def admits(self, which: Which, served: float, device: _Device, now: float) -> bool:
        """Whether a version may take room on a device."""
        claim = self._claims.get(device)
        if claim is not None and claim.until <= now:
            del self._claims[device]
            claim = None
        return claim is None or claim.which == which or served < claim.served
