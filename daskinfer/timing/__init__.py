"""How long passes of so many rows take, learned from those that were measured.

Pure: neither clocks nor devices. The scheduler learns whole batches with it, and a
worker the steps of models that advance step by step.

``curve``
    :class:`Curve`: seconds against rows, between measured points
``ceilings``
    :class:`Ceilings`: the most rows that fit into one pass
``latency``
    :class:`LatencyModel`: both, by device class, from what is observed
"""

from __future__ import annotations

from daskinfer.timing.ceilings import Ceilings
from daskinfer.timing.curve import Curve
from daskinfer.timing.latency import LatencyModel

__all__ = ["Ceilings", "Curve", "LatencyModel"]
