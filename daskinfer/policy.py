"""What a user may ask of the batcher."""

from __future__ import annotations

from dataclasses import dataclass

from daskinfer.fields import duration, integer, size, sizes

__all__ = ["DEFAULT_MAX_WAIT", "BatchPolicy"]

#: Seconds that a batch below ``min_batch_size`` is held where no ``max_wait`` is set.
DEFAULT_MAX_WAIT = 0.05


class _Default(int):
    """A default value that can be told from the same number given by a user."""


@dataclass(frozen=True)
class BatchPolicy:
    """How the requests of one deployment are put together into batches.

    Without arguments everything is learned: the batch size follows from the measured
    time of each size, and nothing waits for company. All sizes count rows.

    Parameters
    ----------
    max_batch_size : int
        No forward pass has more rows than this. Left out while
        ``allowed_batch_sizes`` is given, it is the largest of those.
    min_batch_size : int
        Fewer waiting rows than this are held back, for ``max_wait`` at most.
    max_wait : str, float or timedelta, optional
        How long to hold back, in seconds or as ``"5ms"``; counted once, from the first
        queued arrival. Only with ``min_batch_size`` above 1; there, 50 ms if left out.
    target_latency : str, float or timedelta, optional
        Execution time (seconds, or ``"20ms"``) that a batch should not exceed. It is
        let go while the queue is so long that keeping it would make everybody later.
    allowed_batch_sizes : iterable of int, optional
        The only sizes the model ever sees; other batches are padded to the next one.
        Kept sorted, without duplicates and without sizes above ``max_batch_size``.
    batch_dim : int or None
        Axis along which requests are concatenated; None: each request is one sample,
        and samples are stacked.

    Raises
    ------
    TypeError
        A field has the wrong type (a size that is a float, a bool, ...).
    ValueError
        A field is out of range, or two of them contradict each other. The message
        names the field.

    Notes
    -----
    Immutable, so it can be shared between threads.

    Examples
    --------
    >>> BatchPolicy(max_batch_size=256).max_batch_size
    256
    >>> BatchPolicy(min_batch_size=8, max_wait="5ms").max_wait
    0.005
    >>> BatchPolicy(allowed_batch_sizes=[16, 1, 4]).max_batch_size
    16
    >>> BatchPolicy(min_batch_size=9, max_batch_size=8)
    Traceback (most recent call last):
        ...
    ValueError: min_batch_size is 9, above max_batch_size, which is 8
    """

    max_batch_size: int = _Default(64)
    min_batch_size: int = 1
    max_wait: float | None = None
    target_latency: float | None = None
    allowed_batch_sizes: tuple[int, ...] | None = None
    batch_dim: int | None = 0

    def __post_init__(self) -> None:
        largest = size("max_batch_size", self.max_batch_size)
        smallest = size("min_batch_size", self.min_batch_size)
        allowed = sizes("allowed_batch_sizes", self.allowed_batch_sizes)
        if allowed is not None:
            if isinstance(self.max_batch_size, _Default):
                largest = allowed[-1]
            if largest not in allowed:
                raise ValueError(
                    f"max_batch_size is {largest}, which is not one of "
                    f"allowed_batch_sizes, {list(allowed)}"
                )
            allowed = tuple(size for size in allowed if size <= largest)
        if smallest > largest:
            raise ValueError(
                f"min_batch_size is {smallest}, above max_batch_size, "
                f"which is {largest}"
            )
        max_wait = duration("max_wait", self.max_wait)
        if max_wait is not None and smallest == 1:
            raise ValueError(
                "max_wait needs a min_batch_size above 1: it says how long a batch "
                "that is smaller than min_batch_size is held back"
            )
        target = duration("target_latency", self.target_latency)
        if target == 0:
            raise ValueError("target_latency must be above 0")
        batch_dim = self.batch_dim
        if batch_dim is not None:
            batch_dim = integer("batch_dim", batch_dim)
            if batch_dim < 0:
                raise ValueError(f"batch_dim must be None or >= 0, got {batch_dim}")
        for field, value in (
            ("max_batch_size", largest),
            ("min_batch_size", smallest),
            ("max_wait", max_wait),
            ("target_latency", target),
            ("allowed_batch_sizes", allowed),
            ("batch_dim", batch_dim),
        ):
            object.__setattr__(self, field, value)

    @property
    def hold(self) -> float:
        """Seconds that fewer than ``min_batch_size`` rows are held back at most.

        >>> BatchPolicy().hold, BatchPolicy(min_batch_size=4).hold
        (0.0, 0.05)
        """
        if self.min_batch_size == 1:
            return 0.0
        return DEFAULT_MAX_WAIT if self.max_wait is None else self.max_wait
