"""The errors of the engine itself.

A model's own exception travels to the caller unchanged, as in Dask, with a note on
where it was raised. What is raised here is what only the engine can know: that a name
is not deployed, that a model gave back something which cannot be divided among the
requests, that a worker died under it. Every message says what happened, to what, and
what to do. All of them pickle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from dask.typing import Key
from distributed.scheduler import KilledWorker


class InferenceError(RuntimeError):
    """Base class of daskinfer's own errors.

    Attributes
    ----------
    retryable
        Whether :class:`~daskinfer.RetryPolicy` may have a request that failed so
        tried again: another attempt can end otherwise.

    Examples
    --------
    >>> issubclass(UnknownDeployment, InferenceError)
    True
    """

    retryable: ClassVar[bool] = False


class UnknownDeployment(InferenceError, LookupError):
    """A request or a call names a deployment or version that does not exist."""


class DeploymentExists(InferenceError, ValueError):
    """A deployment of this name is there already."""


class DeploymentFailed(InferenceError):
    """No worker could load the model, and none said why in an exception."""


class ModelTooLarge(InferenceError):
    """A model takes more memory than models may take of a worker's device.

    The message tells both, and the settings that decide.
    """


class DeployTimeout(InferenceError, TimeoutError):
    """The deployment was not ready on any worker within ``wait_timeout``."""

    # RuntimeError's, which is found first, makes no TimeoutError.
    if not TYPE_CHECKING:
        __new__ = TimeoutError.__new__


class UpdateFailed(InferenceError):
    """Too few workers could load a new version; the one before it stays active.

    The message tells the workers' reasons; the cause is what the first of them raised.
    """


class UpdateAborted(UpdateFailed):
    """An update was given up, by a user or by its ``auto_abort``."""


class UpdateInProgress(InferenceError):
    """A deployment is being updated already; one update at a time."""


class VersionExists(DeploymentExists):
    """A deployment has, or had, another version of this label."""


class VersionNotReady(InferenceError):
    """A version cannot take requests yet: too few workers have loaded it."""


class NoUpdate(InferenceError, LookupError):
    """There is no update under way that could be promoted or given up."""


class NoPreviousVersion(InferenceError, LookupError):
    """There is no version before the active one that is still loaded."""


class OutputMismatch(InferenceError, ValueError):
    """A model's output cannot be divided among the requests of its batch.

    Raised when an output lacks the batch axis or has another size along it than
    the input, and when a list of outputs is shorter or longer than the batch.
    """


class NotServable(InferenceError, TypeError):
    """A Dask option that makes no sense for an inference request was used."""


class ResultNotKept(InferenceError):
    """A worker could not keep a result, and its own state does not say why."""


class RequestFailed(InferenceError):
    """Base class of what can happen to a request while the engine has it.

    Parameters
    ----------
    message
        What happened, and what to do.
    key
        The request's key; None where the error is about many of them.
    name, version
        The deployment and version it was for.
    worker
        Address of the last worker that had it; None if none had.
    attempts
        How often it was sent to a worker.
    chunks
        How many chunks of a stream were delivered before; 0 for other requests.

    Examples
    --------
    >>> import pickle
    >>> error = DeviceError("the device is gone", name="resnet50", attempts=3)
    >>> again = pickle.loads(pickle.dumps(error))
    >>> again, again.name, again.attempts
    (DeviceError('the device is gone'), 'resnet50', 3)
    """

    def __init__(
        self,
        message: str,
        *,
        key: Key | None = None,
        name: str | None = None,
        version: str | None = None,
        worker: str | None = None,
        attempts: int = 0,
        chunks: int = 0,
    ) -> None:
        super().__init__(message)
        self.key = key
        self.name = name
        self.version = version
        self.worker = worker
        self.attempts = attempts
        self.chunks = chunks


class LostWorker(NamedTuple):
    """What is known of a worker that is gone."""

    address: str


class WorkerLost(RequestFailed, KilledWorker):
    """The workers that ran a request died, each time.

    Most likely the request is the cause: it was alone in its batch when the last one
    died. Also caught by ``except distributed.scheduler.KilledWorker``.
    """

    retryable = True

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def task(self) -> Any:
        """The request's key, under Dask's name for it."""
        return self.key

    @property
    def last_worker(self) -> Any:
        """The worker that died last."""
        return LostWorker(self.worker or "")

    @property
    def allowed_failures(self) -> int:
        """How many deaths were not yet too many."""
        return self.attempts - 1


class StreamStalled(RequestFailed, TimeoutError):
    """A model gave a stream no chunk for ``idle_timeout``, though it had its turn.

    ``chunks`` says how many it gave before.
    """

    if not TYPE_CHECKING:
        __new__ = TimeoutError.__new__


class BatchTimeout(RequestFailed, TimeoutError):
    """A request's batches ran for longer than ``batch_timeout``."""

    retryable = True
    if not TYPE_CHECKING:
        __new__ = TimeoutError.__new__


class DeviceError(RequestFailed):
    """The device failed under a request, so that nothing runs on it any more."""

    retryable = True


class OutOfDeviceMemory(RequestFailed):
    """A request does not fit the device's memory, not even alone.

    It is not tried again: the batch has been cut down to the smallest pass already.
    """


class Overloaded(RequestFailed):
    """A request was turned away: as many as ``max_queue`` allows are waiting."""


class DeadlineExceeded(RequestFailed, TimeoutError):
    """A request had no answer when its ``timeout`` had passed."""

    if not TYPE_CHECKING:
        __new__ = TimeoutError.__new__


class NoReadyWorker(DeadlineExceeded):
    """A request's ``timeout`` passed while no worker was ready to serve it."""


class SchedulerLost(RequestFailed, ConnectionError):
    """The scheduler is gone, and with it what was not answered yet."""

    if not TYPE_CHECKING:
        __new__ = ConnectionError.__new__
