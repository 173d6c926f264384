"""The errors of the engine itself.

A model's own exception travels to the caller unchanged, as in Dask. What is
raised here is what only the engine can know: that a name is not deployed, that
a model gave back something which cannot be divided among the requests, that no
worker could load it. Every message says what happened, to what, and what to do.
All of them pickle.
"""

from __future__ import annotations


class InferenceError(RuntimeError):
    """Base class of daskinfer's own errors.

    Examples
    --------
    >>> issubclass(UnknownDeployment, InferenceError)
    True
    """


class UnknownDeployment(InferenceError, LookupError):
    """A request or a call names a deployment or version that does not exist."""


class DeploymentExists(InferenceError, ValueError):
    """A deployment of this name is there already."""


class DeploymentFailed(InferenceError):
    """No worker could load the model, and none said why in an exception."""


class DeployTimeout(InferenceError, TimeoutError):
    """The deployment was not ready on any worker within ``wait_timeout``."""


class OutputMismatch(InferenceError, ValueError):
    """A model's output cannot be divided among the requests of its batch.

    Raised when an output lacks the batch axis or has another size along it than
    the input, and when a list of outputs is shorter or longer than the batch.
    """


class NotServable(InferenceError, TypeError):
    """A Dask option that makes no sense for an inference request was used."""


class ResultNotKept(InferenceError):
    """A worker could not keep a result, and its own state does not say why."""
