"""What one call may ask for apart from the model's own keywords."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from dask.core import validate_key
from distributed.protocol.pickle import dumps

from daskinfer import config
from daskinfer.fields import timeout_of

if TYPE_CHECKING:
    from dask.typing import Key

    from daskinfer.protocol import StreamOrder


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What one call may ask for apart from the model's own keywords.

    They mean what they mean in :meth:`distributed.Client.submit`.

    Parameters
    ----------
    key
        The future's key. Equal keys are one task.
    priority
        Higher overtakes. One unit is worth ``daskinfer.priority-age`` of waiting.
    retries
        How often a failing request is run again.
    workers
        Addresses, names or host names the request must run on.
    allow_other_workers
        Whether ``workers`` is only a preference.
    resources
        Resources the worker must have declared, such as ``{"NPU": 1}``.
    timeout
        Seconds (or ``"2s"``) from the arrival at the scheduler within which the
        request is answered or fails with :class:`~daskinfer.DeadlineExceeded`; None:
        as the deployment has it.
    combine
        Makes the result of all chunks, where the model answers piece by piece; None:
        it is a list of them.
    keep
        Whether there is to be a result, where chunks are read. Without, a stream may be
        endless.
    resume
        ``"replay"``: if the worker is lost, another one begins anew, and what has been
        read is left out. For models that always give the same chunks.
    """

    key: Key | None = None
    priority: float = 0
    retries: int = 0
    workers: tuple[str | int, ...] | None = None
    allow_other_workers: bool = False
    resources: tuple[tuple[str, float], ...] | None = None
    timeout: float | None = None
    combine: Callable[[list[Any]], Any] | None = None
    keep: bool = True
    resume: str | None = None

    def __post_init__(self) -> None:
        if self.key is not None:
            validate_key(self.key)
            if self.key in ("", ()):
                raise ValueError("key must not be empty")
            check_sendable(self.key, "key")
        if isinstance(self.priority, bool) or not isinstance(self.priority, Real):
            raise TypeError(f"priority must be a number, not {self.priority!r}")
        if isinstance(self.retries, bool) or not isinstance(self.retries, Integral):
            raise TypeError(f"retries must be an int, not {self.retries!r}")
        if type(self.priority) not in (int, float):
            # NumPy's, for instance, which no message carries.
            object.__setattr__(self, "priority", float(self.priority))
        object.__setattr__(self, "retries", int(self.retries))
        if self.retries < 0:
            raise ValueError(f"retries must not be negative, got {self.retries}")
        check_sendable(self.priority, "priority")
        check_sendable(self.retries, "retries")
        for worker in self.workers or ():
            if isinstance(worker, bool) or not isinstance(worker, (str, int)):
                raise TypeError(
                    f"workers must be addresses, names or host names, not {worker!r}"
                )
            check_sendable(worker, "workers")
        if self.allow_other_workers and self.workers is None:
            raise ValueError("allow_other_workers needs workers=")
        object.__setattr__(self, "timeout", timeout_of("timeout", self.timeout))
        if not isinstance(self.keep, bool):
            raise TypeError(f"keep must be True or False, not {self.keep!r}")
        if self.combine is not None and not callable(self.combine):
            raise TypeError(f"combine must be a function, not {self.combine!r}")
        if self.combine is not None and not self.keep:
            raise ValueError(
                "combine makes a result, which is not kept with keep=False"
            )
        if self.resume not in (None, "replay"):
            raise ValueError(f"resume must be None or 'replay', not {self.resume!r}")

    @classmethod
    def of(
        cls,
        *,
        workers: str | int | Iterable[str | int] | None = None,
        resources: Mapping[str, float] | None = None,
        **others: Any,
    ) -> CallOptions:
        """Make options of what Dask takes: one worker or many, a dict of resources.

        >>> CallOptions.of(workers="tcp://10.0.0.1:1", priority=2).workers
        ('tcp://10.0.0.1:1',)
        """
        names = [workers] if isinstance(workers, (str, int)) else workers
        return cls(
            workers=None if names is None else tuple(names),
            resources=resource_amounts(resources),
            **others,
        )

    def within(self, annotations: Mapping[str, Any], key: Key) -> CallOptions:
        """These options, completed by what :func:`dask.annotate` has set around them.

        As in Dask, an option that was given goes before an annotation, and an
        annotation may be a function of the key.
        """
        wanted = {
            name: value(key) if callable(value) else value
            for name, value in annotations.items()
            if name in _ANNOTATIONS
        }
        for name in _ANNOTATIONS:
            given = getattr(self, name)
            if given != getattr(NO_OPTIONS, name):
                wanted[name] = dict(given) if name == "resources" else given
        if wanted.get("workers") is None:
            wanted.pop("allow_other_workers", None)
        timeout = self.timeout
        if timeout is None:
            own = annotations.get("daskinfer")
            timeout = annotated_timeout(own(key) if callable(own) else own)
        own = {name: getattr(self, name) for name in ("combine", "keep", "resume")}
        return CallOptions.of(key=self.key, timeout=timeout, **own, **wanted)

    def names(self) -> list[str]:
        """Those that differ from the defaults.

        >>> CallOptions(priority=2, timeout="2s").names()
        ['priority', 'timeout']
        """
        return [
            name
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(NO_OPTIONS, name)
        ]


def stream_order(options: CallOptions, *, read: bool) -> StreamOrder | None:
    """How the answer of a call is to be streamed; None: nothing is said of that.

    Raises
    ------
    Exception
        ``combine`` cannot be pickled.
    """
    if not read and options.combine is None and options.keep and not options.resume:
        return None
    combine = None if options.combine is None else dumps(options.combine)
    return {
        "read": read,
        "nbytes": config.nbytes("streaming.window"),
        "chunks": config.integer("streaming.window-chunks"),
        "keep": options.keep,
        "combine": combine,
        "replay": options.resume == "replay",
        "skip": 0,
    }


def resource_amounts(
    resources: Mapping[str, float] | None,
) -> tuple[tuple[str, float], ...] | None:
    """Check what a user asks of a worker's resources, and bring it into order.

    Raises
    ------
    TypeError, ValueError
        If it is no mapping of names to positive numbers.

    Examples
    --------
    >>> resource_amounts({"NPU": 1, "GPU": 2})
    (('GPU', 2), ('NPU', 1))
    """
    if resources is None:
        return None
    wanted = 'resources must map names to positive numbers, such as {"NPU": 1}, not'
    if not isinstance(resources, Mapping):
        raise TypeError(f"{wanted} {resources!r}")
    for name, amount in resources.items():
        number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not isinstance(name, str) or not number:
            raise TypeError(f"{wanted} {resources!r}")
        if not 0 < amount <= _LARGEST:
            raise ValueError(f"{wanted} {resources!r}")
        check_sendable(name, "resources")
    return tuple(sorted(resources.items()))


def annotated_timeout(annotation: object) -> float | None:
    """Read what ``dask.annotate(daskinfer={"timeout": "2s"})`` has set.

    Raises
    ------
    TypeError, ValueError
        If it is no mapping, or holds anything but a timeout.

    Examples
    --------
    >>> annotated_timeout({"timeout": "2s"})
    2.0
    """
    if annotation is None:
        return None
    if not isinstance(annotation, Mapping):
        raise TypeError(
            'the annotation daskinfer must be a dict such as {"timeout": "2s"}, '
            f"not {annotation!r}"
        )
    unknown = sorted(map(str, annotation.keys() - {"timeout"}))
    if unknown:
        raise ValueError(
            f"the annotation daskinfer has {', '.join(unknown)}; it knows timeout only"
        )
    return timeout_of("timeout", annotation.get("timeout"))


def mistaken_option(error: BaseException, kwargs: Mapping[str, Any]) -> str | None:
    """Say how to set an option that went to the model, which has refused it.

    Parameters
    ----------
    error
        What the model raised.
    kwargs
        The keywords that it was called with.

    Returns
    -------
    str or None
        None where the error is about something else.

    Examples
    --------
    >>> error = TypeError("forward() got an unexpected keyword argument 'retries'")
    >>> mistaken_option(error, {"retries": 2})
    "'retries' went to the model; to set an option use model.options(retries=...)"
    """
    said = str(error) if isinstance(error, TypeError) else ""
    for name in CallOptions.__dataclass_fields__:
        if name in kwargs and "keyword" in said and f"'{name}'" in said:
            return (
                f"{name!r} went to the model; to set an option use "
                f"model.options({name}=...)"
            )
    return None


def check_sendable(value: object, field: str) -> None:
    """Refuse what a message cannot carry; sent, it would end the connection.

    Raises
    ------
    ValueError
        For a text that is no valid Unicode, an integer beyond 64 bits, and nan,
        which is not equal to itself.
    """
    if isinstance(value, tuple):
        for part in value:
            check_sendable(part, field)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{field} is no valid text: {error}") from None
    elif isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{field} must not be beyond 64 bits, got {value}")
    elif value != value:
        raise ValueError(f"{field} must not be nan")


#: The largest integer that every message can carry.
_LARGEST = 2**63 - 1

_ANNOTATIONS = ("priority", "retries", "workers", "allow_other_workers", "resources")

NO_OPTIONS = CallOptions()
