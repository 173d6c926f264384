"""How requests become one batch, and how its answer comes apart again.

A request is ``(args, kwargs)``. The rule: whatever is batched with it, a request's
result is what the model would have answered to that request alone.

``tree``
    what counts as a container and what as an array
``signature``
    :func:`measure`: which requests may share a pass, and how many rows one brings
``collate``
    :func:`collate`: many requests into one; :func:`slice_rows`: a part of a large one
``split``
    :func:`split`: one output into one per request; :func:`join_outputs`: its inverse
``outline``
    :func:`outline`: what a request's inputs look like, in a line for readers
``content``
    :func:`content_of`: which requests are equal in all they say
``convert``
    between arrays and tensors, for a module that is given arrays

Nothing here imports torch; a tensor can only be met where somebody else did.

Examples
--------
Two requests of one row and of two rows share a pass:

>>> import numpy as np
>>> requests = [((np.ones((1, 3)),), {}), ((np.zeros((2, 3)),), {})]
>>> [measure(*request) for request in requests]
[Measure(signature='n<f8(3,)', rows=1), Measure(signature='n<f8(3,)', rows=2)]
>>> args, kwargs = collate(requests)
>>> args[0].shape
(3, 3)
>>> [piece.shape for piece in split(args[0].sum(axis=1), [1, 2])]
[(1,), (2,)]
"""

from __future__ import annotations

from daskinfer.payload.collate import collate, slice_rows
from daskinfer.payload.content import NoContentError, content_of
from daskinfer.payload.convert import to_numpy, to_tensors
from daskinfer.payload.outline import outline
from daskinfer.payload.signature import Measure, measure
from daskinfer.payload.split import AmbiguousOutput, join_outputs, split
from daskinfer.payload.tree import copy_arrays, map_arrays

__all__ = [
    "AmbiguousOutput",
    "Measure",
    "NoContentError",
    "collate",
    "content_of",
    "copy_arrays",
    "join_outputs",
    "map_arrays",
    "measure",
    "outline",
    "slice_rows",
    "split",
    "to_numpy",
    "to_tensors",
]
