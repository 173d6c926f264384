"""Deploying: what travels to the cluster once, and how it is to be served there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import dask
from dask.utils import parse_timedelta
from distributed import Client

from daskinfer.exceptions import DeploymentExists, DeploymentFailed, DeployTimeout
from daskinfer.failure import load_failure
from daskinfer.handle import Model
from daskinfer.installation import calls, install
from daskinfer.planning import Plan, plan_of
from daskinfer.uploading import uploaded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskinfer.breaker import BreakerPolicy
    from daskinfer.caching import CachePolicy
    from daskinfer.policy import BatchPolicy
    from daskinfer.retry import RetryPolicy
    from daskinfer.streaming import StreamPolicy


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
    streaming: StreamPolicy | None = None,
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
    streaming
        How many streams a worker runs at once, and how long a step may take, where the
        model answers piece by piece.
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
    plan = plan_of(
        model,
        factory=factory,
        factory_kwargs=factory_kwargs,
        path=path,
        trusted=trusted,
        name=name,
        version=version,
        device=device,
        resources=resources,
        batching=batching,
        warmup=warmup,
        placement=placement,
        retry=retry,
        request_timeout=request_timeout,
        batch_timeout=batch_timeout,
        max_queue=max_queue,
        breaker=breaker,
        cache=cache,
        keep_loaded=keep_loaded,
        streaming=streaming,
    )
    timeout = deploy_timeout(wait_timeout)
    handle = client.sync(_deploy, client, plan, timeout if wait else None)
    return cast(Model, handle)


async def _deploy(client: Client, plan: Plan, timeout: float | None) -> Model:
    await install(client)
    async with uploaded(client, plan.artifact):
        answer = await calls(client).daskinfer_deploy(
            **plan.to_message(), client=client.id
        )
    if answer["status"] == "exists":
        raise DeploymentExists(answer["message"])
    if answer["status"] == "error":
        raise ValueError(answer["message"])
    if timeout is not None:
        await _wait_ready(client, plan.name, plan.version, timeout)
    cached = plan.options["cache"] is not None
    return Model(plan.name, None, plan.policy.batch_dim, cached, client=client)


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


def deploy_timeout(given: str | float | None) -> float:
    """Seconds to wait until a version is ready; None takes the config."""
    if given is None:
        given = dask.config.get("daskinfer.deploy.wait-timeout")
    return float(parse_timedelta(given))
