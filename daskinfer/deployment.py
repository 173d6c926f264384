"""Deploying: what travels to the cluster once, and how it is to be served there."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

import dask
from dask.utils import parse_timedelta
from distributed import Client
from distributed.protocol.serialize import to_serialize

from daskinfer import protocol, transport
from daskinfer.breaker import BreakerPolicy
from daskinfer.caching import CachePolicy
from daskinfer.exceptions import DeploymentExists, DeploymentFailed, DeployTimeout
from daskinfer.failure import load_failure
from daskinfer.fields import size, timeout_of
from daskinfer.handle import Model
from daskinfer.installation import calls, install
from daskinfer.options import check_sendable, resource_amounts
from daskinfer.policy import BatchPolicy
from daskinfer.retry import RetryPolicy
from daskinfer.uploading import uploaded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskinfer.artifact import Artifact

_DEVICES = ("auto", "npu", "cuda", "cpu")


def deploy(
    client: Client,
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
    wait: bool = True,
    wait_timeout: str | float | None = None,
) -> Model:
    """Ship a model to the cluster once and return a handle to it.

    Exactly one of ``model``, ``factory`` and ``path`` says what to deploy. Workers
    that join later load it too; on an empty cluster it loads when the first
    worker joins.

    Parameters
    ----------
    client
        A connected :class:`distributed.Client`.
    model
        A :class:`torch.nn.Module` (deployed in eval mode; yours stays as it is), or
        any callable that takes a batch and returns one.
    factory
        ``"package.module:function"``, called on each worker with
        ``factory_kwargs`` to build the model there.
    path
        A ``.pt2`` file of :func:`torch.export.save`, or TorchScript (``.ts``,
        ``.pt``).
    trusted
        Whether the file may be a pickled module, which is unpickled here. That runs
        whatever code its maker has put into it: only for files that you trust as you
        trust a program.
    name
        What it is called; by default the model's own name.
    version
        A label for this version.
    device
        ``"npu"``, ``"cuda"``, ``"cpu"``, or ``"auto"``: the best a worker has.
    resources
        What a worker must have declared, such as ``{"NPU": 1}``.
    batching
        How requests are batched; None takes the ``daskinfer.batching`` config, within
        what an exported program says that it takes.
    warmup
        An example input (or a tuple of positional inputs) with one or more rows.
        Each worker runs it at every batch size before it takes requests, so that
        no request pays for first calls, and the batcher starts with a measured
        curve.
    placement
        ``"least-loaded"``, ``"round-robin"`` or the path of a
        :class:`scheduler_plugins.placement.Placement`; None takes the config.
    retry
        How often a request is tried again after failures of the engine, such as a
        worker that died; None: as :class:`RetryPolicy` does by default.
    request_timeout
        Seconds (or ``"2s"``) from its arrival within which a request is answered or
        fails with :class:`DeadlineExceeded`, wherever it is then; None takes the
        config. A call's own ``timeout`` goes before it.
    batch_timeout
        Seconds (or ``"10s"``) that a batch may run on its device. Then it is given up:
        its requests are tried elsewhere, and its worker gets no more for a while. None
        takes the config.
    max_queue
        How many requests may wait. While so many do, new ones fail at once with
        :class:`Overloaded`. None takes the config.
    breaker
        After which failures a worker gets no more requests, and for how long; None:
        as :class:`BreakerPolicy` does by default.
    cache
        How results are cached on the workers; None: they are not, and nothing is spent
        on it.
    keep_loaded
        Whether it stays in the memory of every worker, even where others have to be
        loaded again and again for want of room. Else the models that were used least
        recently make room for one that is asked for.
    wait
        Whether to return only when every worker has tried, and at least one is
        ready.
    wait_timeout
        How long at most, such as ``"5m"``; None takes the config.

    Returns
    -------
    Model
        Awaitable with an asynchronous client.

    Raises
    ------
    DeploymentExists
        There is one of this name; it says how to replace it.
    DeployTimeout
        Nothing was ready in time; it says what each worker is at. The deployment
        stays and goes on loading.
    Exception
        What loading the model raised, with the worker's traceback, if it failed
        on every worker. The deployment is removed then.
    ValueError, TypeError
        An argument is wrong; nothing was deployed.
    """
    if not isinstance(client, Client):
        raise TypeError(
            f"deploy takes a connected distributed.Client first, as in "
            f"deploy(client, net), not {type(client).__name__}"
        )
    if device not in _DEVICES:
        raise ValueError(f"device must be one of {_DEVICES}, not {device!r}")
    for field, label in (("name", name), ("version", version)):
        if label is not None and not (isinstance(label, str) and label):
            raise ValueError(f"{field} must be a text that is not empty, not {label!r}")
        check_sendable(label, field)
    check_policy(batching)
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise TypeError(f"retry must be a RetryPolicy, not {retry!r}")
    if breaker is not None and not isinstance(breaker, BreakerPolicy):
        raise TypeError(f"breaker must be a BreakerPolicy, not {breaker!r}")
    if cache is not None and not isinstance(cache, CachePolicy):
        raise TypeError(f"cache must be a CachePolicy, not {cache!r}")
    if request_timeout is None:
        request_timeout = dask.config.get("daskinfer.request-timeout")
    if batch_timeout is None:
        batch_timeout = dask.config.get("daskinfer.batch-timeout")
    if max_queue is None:
        max_queue = dask.config.get("daskinfer.max-queue")
    amounts = resource_amounts(resources)
    artifact = artifact_of(model, factory, factory_kwargs, path, trusted)
    timeout = deploy_timeout(wait_timeout)
    handle = client.sync(
        _deploy,
        client,
        artifact,
        name or _name_of(model, factory, path),
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
            "max_queue": None if max_queue is None else size("max_queue", max_queue),
        },
        timeout if wait else None,
    )
    return cast(Model, handle)


async def _deploy(
    client: Client,
    artifact: Artifact,
    name: str,
    version: str,
    policy: BatchPolicy,
    options: dict[str, Any],
    timeout: float | None,
) -> Model:
    await install(client)
    async with uploaded(client, artifact):
        answer = await calls(client).daskinfer_deploy(
            name=name,
            version=version,
            policy=asdict(policy),
            artifact=artifact.to_message(),
            client=client.id,
            **options,
        )
    if answer["status"] == "exists":
        raise DeploymentExists(answer["message"])
    if answer["status"] == "error":
        raise ValueError(answer["message"])
    if timeout is not None:
        await _wait_ready(client, name, version, timeout)
    cached = options["cache"] is not None
    return Model(name, None, policy.batch_dim, cached, client=client)


async def _wait_ready(client: Client, name: str, version: str, timeout: float) -> None:
    answer = await calls(client).daskinfer_wait_ready(
        name=name, version=version, timeout=timeout
    )
    if answer["status"] == "ready":
        return
    if answer["status"] == "timeout":
        raise DeployTimeout(answer["message"])
    await calls(client).daskinfer_undeploy(name=name)
    error = load_failure(answer["failure"]) if answer["failure"] else None
    if error is None:
        raise DeploymentFailed(answer["message"])
    raise error


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


def deploy_timeout(given: str | float | None) -> float:
    """Seconds to wait until a version is ready; None takes the config."""
    if given is None:
        given = dask.config.get("daskinfer.deploy.wait-timeout")
    return float(parse_timedelta(given))


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
        return path.replace("\\", "/").rpartition("/")[2].partition(".")[0]
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
