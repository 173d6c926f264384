"""A model as content-addressed parts that travel once.

``model``
    :class:`Artifact`: the parts, and their way to a worker
``making``, ``building``
    how a client takes models apart, and how a worker makes them again
``chunks``, ``digests``
    the hashes by which parts are verified, and models told apart
``store``, ``partial``
    weights in files that the workers of a host share, and those under way
``pacing``
    a limit to what is sent in a second
``skeleton``
    any Python object without its tensors, and the storages of those tensors
``weights``
    storages in one safetensors blob
``pickling``
    who is to blame when a model cannot be pickled
``archive``
    model files: torch.export and TorchScript

Nothing here imports torch before a model is made or built.
"""

from __future__ import annotations

from daskinfer.artifact.building import is_module
from daskinfer.artifact.model import Artifact, DamagedArtifact

__all__ = ["Artifact", "DamagedArtifact", "is_module"]
