"""The artifact: what is sent to a worker so that it has the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed.protocol.serialize import to_serialize

from daskinfer.artifact import archive, making
from daskinfer.artifact.building import MODULE, build_file, build_object
from daskinfer.artifact.chunks import Chunks
from daskinfer.artifact.digests import content_digest
from daskinfer.exceptions import InferenceError
from daskinfer.transport import read

if TYPE_CHECKING:
    import torch

#: Weights up to this size travel with the rest, as requests of this size do.
INLINE_BYTES = 64 * 1024


class DamagedArtifact(InferenceError):
    """What a worker received is not what was deployed, but has another ``digest``."""

    def __init__(self, message: str, digest: str = "") -> None:
        super().__init__(message)
        self.digest = digest


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """A model in parts: how to build it, and its weights.

    Made by :meth:`from_object`, :meth:`from_factory` and :meth:`from_path`; turned
    into a model by :meth:`build`, usually elsewhere. Two artifacts are equal if
    their digests are. Immutable, so that threads can share it.

    Parameters
    ----------
    format
        ``"module"``, ``"callable"``, ``"factory"``, ``"torch.export"`` or
        ``"torchscript"``.
    builder
        The pickled skeleton of the object, or of the factory's name and arguments.
        Empty for files.
    weights
        The memory of all tensors and large arrays as a safetensors blob, or the
        content of a file. None if there is nothing.
    label
        What the model is called in messages.
    digest
        SHA-256 of format, builder and weights, in hexadecimal; computed if not
        given. See the notes.
    chunks
        How the weights are divided; computed if no digest is given.
    verified
        Whether the weights were verified as they came, chunk by chunk, into memory
        that nobody else writes to: the model is built on it, without a copy.

    Notes
    -----
    Equal digests mean equal models. The reverse holds for modules and functions
    that can be imported, if they were made in the same way. It does not hold across
    processes for what lives in ``__main__`` or in a function's body, which
    cloudpickle marks with random numbers, nor for objects that hold sets, whose
    order changes from process to process.

    Examples
    --------
    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> artifact = Artifact.from_object(net)
    >>> artifact
    <Artifact Linear: module, 1.00 kiB, ...>
    >>> copy = artifact.build()
    >>> bool((copy(torch.ones(1, 2)) == net(torch.ones(1, 2))).all())
    True
    """

    format: str
    builder: bytes
    weights: memoryview | None
    label: str
    digest: str = ""
    chunks: Chunks | None = field(default=None, repr=False)
    verified: bool = False

    def __post_init__(self) -> None:
        if not self.digest:
            if self.weights is not None:
                object.__setattr__(self, "chunks", Chunks.of(self.weights))
            digest = content_digest(self.format, self.builder, self.chunks)
            object.__setattr__(self, "digest", digest)

    def __repr__(self) -> str:
        from dask.utils import format_bytes

        size = format_bytes(self.nbytes)
        return f"<Artifact {self.label}: {self.format}, {size}, {self.digest[:12]}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Artifact) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return len(self.builder) + (0 if self.weights is None else self.weights.nbytes)

    # --- making one ---------------------------------------------------------------

    @classmethod
    def from_object(cls, model: Any) -> Artifact:
        """Take a module or any other callable apart, as :func:`making.of_object`."""
        return cls(*making.of_object(model))

    @classmethod
    def from_factory(
        cls, factory: str, kwargs: Mapping[str, Any] | None = None
    ) -> Artifact:
        """Let each worker build the model itself, as :func:`making.of_factory`."""
        return cls(*making.of_factory(factory, kwargs))

    @classmethod
    def from_path(
        cls, path: str | os.PathLike[str], *, trusted: bool = False
    ) -> Artifact:
        """Take a model file, as :func:`making.of_path`."""
        return cls(*making.of_path(path, trusted=trusted))

    def row_limits(self, axis: int) -> tuple[int, int] | None:
        """Fewest and most rows along an axis, where the model itself limits them."""
        if self.format != archive.EXPORT or self.weights is None:
            return None
        return archive.row_limits(self.weights, axis)

    # --- on the way -----------------------------------------------------------------

    @property
    def is_inline(self) -> bool:
        """Whether the message holds the weights too, which are small or none."""
        return self.weights is None or self.weights.nbytes <= INLINE_BYTES

    def to_message(self) -> dict[str, Any]:
        """Return the manifest, with what Dask sends without looking at it.

        That is the artifact without its weights, unless these are small, but with the
        hashes of their chunks.
        """
        inline = self.is_inline and self.weights is not None
        return {
            "format": self.format,
            "builder": to_serialize(self.builder),
            "chunks": None if self.chunks is None else self.chunks.to_message(),
            "weights": to_serialize(self.weights) if inline else None,
            "label": self.label,
            "digest": self.digest,
            "nbytes": self.nbytes,
        }

    @classmethod
    def from_message(
        cls, message: Mapping[str, Any], weights: memoryview | None = None
    ) -> Artifact:
        """Make an artifact of a message as it arrived, or as it was made.

        Parameters
        ----------
        message
            What :meth:`to_message` returned.
        weights
            Those that the message does not hold, each chunk of them verified, in
            memory that can be written to.
        """
        chunks, inline = message["chunks"], read(message["weights"])
        return cls(
            format=message["format"],
            builder=bytes(read(message["builder"])),
            weights=weights if inline is None else memoryview(inline).cast("B"),
            label=message["label"],
            digest=message["digest"],
            chunks=None if chunks is None else Chunks.from_message(chunks),
            verified=weights is not None,
        )

    # --- on the worker ----------------------------------------------------------------

    def build(self, device: torch.device | str | None = None) -> Callable[..., Any]:
        """Verify the parts and make the model.

        Parameters
        ----------
        device
            Where a module shall be. None: where it is when it is made, which is the
            CPU except for factories.

        Returns
        -------
        callable
            A module is in evaluation mode, on the device. Any other callable is
            left alone: what modules it holds, and where they are, is its own affair.
            On the CPU it owns its memory, or that of a verified artifact, which can
            be dropped.

        Raises
        ------
        DamagedArtifact
            If the parts do not have the digest.
        ValueError
            If the module is quantised for the CPU and ``device`` is another.
        TypeError
            If the factory returns nothing that can be called.
        Exception
            Whatever building raises, such as ImportError.
        """
        self._verify()
        if self.format in (archive.EXPORT, archive.TORCHSCRIPT):
            content = memoryview(b"") if self.weights is None else self.weights
            return build_file(self.format, content, device)
        # A module that moves to a device is copied by that.
        moves = device is not None and not str(device).startswith("cpu")
        copied = self.format == MODULE and moves
        return build_object(
            self.format,
            self.builder,
            self.weights,
            device,
            self.label,
            own_memory=not (self.verified or copied),
        )

    def _verify(self) -> None:
        chunks = self.chunks
        if not self.verified and self.weights is not None:
            size = None if chunks is None else chunks.chunk_size
            chunks = Chunks.of(self.weights, size)
        found = content_digest(self.format, self.builder, chunks)
        if found != self.digest:
            raise DamagedArtifact(
                f"{self.label} arrived damaged: its digest is {found[:12]}, not "
                f"{self.digest[:12]}; deploy it again",
                found,
            )
