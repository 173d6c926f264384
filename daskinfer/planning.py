"""What is to be deployed, checked and made ready to be sent."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import dask
from distributed.protocol.serialize import to_serialize

from daskinfer import protocol, transport
from daskinfer.breaker import BreakerPolicy
from daskinfer.caching import CachePolicy
from daskinfer.fields import size, timeout_of
from daskinfer.handle import Model
from daskinfer.names import check_name
from daskinfer.options import resource_amounts
from daskinfer.policy import BatchPolicy
from daskinfer.retry import RetryPolicy
from daskinfer.streaming import StreamPolicy

if TYPE_CHECKING:
    from daskinfer.artifact import Artifact

_DEVICES = ("auto", "npu", "cuda", "cpu")


@dataclass(frozen=True, slots=True)
class Plan:
    """A deployment as the scheduler is asked for it.

    Attributes
    ----------
    artifact
        The model.
    name, version
        What they are called.
    policy
        How requests are batched.
    options
        All else that was asked for, as plain data.
    """

    artifact: Artifact
    name: str
    version: str
    policy: BatchPolicy
    options: dict[str, Any]

    def to_message(self) -> dict[str, Any]:
        """What the scheduler is told, without the weights."""
        return {
            "name": self.name,
            "version": self.version,
            "policy": asdict(self.policy),
            "artifact": self.artifact.to_message(),
            **self.options,
        }


def plan_of(
    model: Callable[..., Any] | None = None,
    *,
    factory: str | None = None,
    factory_kwargs: Mapping[str, Any] | None = None,
    path: str | None = None,
    trusted: bool = False,
    name: str | None = None,
    version: str = "1",
    device: str = "auto",
    resources: Mapping[str, float] | None = None,
    batching: BatchPolicy | None = None,
    warmup: Any = None,
    placement: str | type | None = None,
    retry: RetryPolicy | None = None,
    request_timeout: str | float | None = None,
    batch_timeout: str | float | None = None,
    max_queue: int | None = None,
    breaker: BreakerPolicy | None = None,
    cache: CachePolicy | None = None,
    keep_loaded: bool = False,
    streaming: StreamPolicy | None = None,
) -> Plan:
    """Check what :func:`daskinfer.deploy` was given, and take the model apart.

    Raises
    ------
    ValueError, TypeError
        An argument is wrong.
    """
    if device not in _DEVICES:
        raise ValueError(f"device must be one of {_DEVICES}, not {device!r}")
    if name is not None:
        check_name("name", name)
    check_name("version", version)
    check_policy(batching)
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise TypeError(f"retry must be a RetryPolicy, not {retry!r}")
    if breaker is not None and not isinstance(breaker, BreakerPolicy):
        raise TypeError(f"breaker must be a BreakerPolicy, not {breaker!r}")
    if cache is not None and not isinstance(cache, CachePolicy):
        raise TypeError(f"cache must be a CachePolicy, not {cache!r}")
    if streaming is not None and not isinstance(streaming, StreamPolicy):
        raise TypeError(f"streaming must be a StreamPolicy, not {streaming!r}")
    if request_timeout is None:
        request_timeout = dask.config.get("daskinfer.request-timeout")
    if batch_timeout is None:
        batch_timeout = dask.config.get("daskinfer.batch-timeout")
    if max_queue is None:
        max_queue = dask.config.get("daskinfer.max-queue")
    amounts = resource_amounts(resources)
    artifact = artifact_of(model, factory, factory_kwargs, path, trusted)
    if name is None:
        own = _name_of(model, factory, path)
        name = check_name("the model's own name, without name=,", own)
    return Plan(
        artifact,
        name,
        version,
        batching or configured_policy(artifact),
        {
            "device": device,
            "resources": None if amounts is None else dict(amounts),
            "placement": _placement_path(placement),
            "warmup": warmup_payload(warmup),
            "retry": (retry or RetryPolicy()).to_message(),
            "request_timeout": timeout_of("request_timeout", request_timeout),
            "batch_timeout": timeout_of("batch_timeout", batch_timeout),
            "breaker": (breaker or BreakerPolicy()).to_message(),
            "cache": None if cache is None else cache.to_message(),
            "keep_loaded": bool(keep_loaded),
            "streaming": (streaming or StreamPolicy()).to_message(),
            "max_queue": None if max_queue is None else size("max_queue", max_queue),
        },
    )


def artifact_of(
    model: Callable[..., Any] | None,
    factory: str | None,
    factory_kwargs: Mapping[str, Any] | None,
    path: str | None,
    trusted: bool,
) -> Artifact:
    """Make parts of the one of them that is given.

    Raises
    ------
    TypeError
        If none is, or several are; or ``trusted`` is said of no file.
    """
    from daskinfer.artifact import Artifact

    if sum(given is not None for given in (model, factory, path)) != 1:
        raise TypeError("deploy one of: a model, factory=, path=")
    if factory_kwargs is not None and factory is None:
        raise TypeError("factory_kwargs needs factory=")
    if trusted and path is None:
        raise TypeError("trusted is said of a file: it needs path=")
    if isinstance(model, Model):
        raise TypeError(f"{model!r} is a handle, deployed already")
    if factory is not None:
        return Artifact.from_factory(factory, factory_kwargs)
    if path is not None:
        return Artifact.from_path(path, trusted=trusted)
    return Artifact.from_object(model)


def check_policy(batching: BatchPolicy | None) -> None:
    """Refuse what is no policy."""
    if batching is not None and not isinstance(batching, BatchPolicy):
        raise TypeError(f"batching must be a BatchPolicy, not {batching!r}")


def configured_policy(artifact: Artifact) -> BatchPolicy:
    """The configured policy, within what the model itself can take."""
    configured = dask.config.get("daskinfer.batching")
    policy = BatchPolicy(**{key.replace("-", "_"): v for key, v in configured.items()})
    limits = artifact.row_limits(policy.batch_dim or 0)
    if limits is None:
        return policy
    fewest, most = limits
    if fewest == most:
        return replace(
            policy, max_batch_size=most, min_batch_size=1, allowed_batch_sizes=(most,)
        )
    most = min(most, policy.max_batch_size)
    return replace(
        policy, max_batch_size=most, min_batch_size=min(policy.min_batch_size, most)
    )


def _name_of(model: Any, factory: str | None, path: str | None) -> str:
    if factory is not None:
        return factory.rpartition(":")[2]
    if path is not None:
        return os.fspath(path).replace("\\", "/").rpartition("/")[2].partition(".")[0]
    own = getattr(model, "__name__", None) or type(model).__name__
    # Two lambdas or two nets of one class are different models.
    return own if own.isidentifier() else f"model-{uuid.uuid4().hex[:8]}"


def _placement_path(placement: str | type | None) -> str:
    if placement is None:
        return cast(str, dask.config.get("daskinfer.placement"))
    if isinstance(placement, type):
        return f"{placement.__module__}.{placement.__qualname__}"
    return placement


def warmup_payload(example: Any) -> protocol.Payload | None:
    """Pickle an example that was given as ``warmup=``."""
    if example is None:
        return None
    args = example if isinstance(example, tuple) else (example,)
    return [to_serialize(frame) for frame in transport.dumps((args, {}))]
