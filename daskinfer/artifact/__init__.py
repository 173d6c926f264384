"""A model as content-addressed parts that travel once.

``model``
    :class:`Artifact`: the parts, and how a worker makes the model of them
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

from daskinfer.artifact.model import Artifact, DamagedArtifact, is_module

__all__ = ["Artifact", "DamagedArtifact", "is_module"]
