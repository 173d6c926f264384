"""Asking what is deployed, through the client that a handle speaks through."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from distributed import Client, Future, default_client
from distributed.metrics import monotonic
from distributed.worker import get_client, get_worker

from daskinfer import config
from daskinfer.exceptions import InferenceError, UnknownDeployment
from daskinfer.fields import given_duration
from daskinfer.handle import Model
from daskinfer.installation import calls, install, is_same_scheduler
from daskinfer.logs import Log
from daskinfer.loss import is_lost, scheduler_lost
from daskinfer.status import DeploymentStatus, RequestInfo
from daskinfer.story import Story

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dask.typing import Key

logger = Log("client")

#: Digits of a version's digest by which keys of tasks tell models apart.
_DIGEST = 16
#: Seconds that a request may take longer to the scheduler than a question about it.
_COMING = 2.0


def client_of(name: str, own: Client | None) -> Client:
    """Return the client for a handle to speak through.

    Parameters
    ----------
    name
        The deployment's name.
    own
        The client that the handle was made with, if any.

    Raises
    ------
    RuntimeError
        If the handle's own client is closed, and the current one is not connected
        to the same scheduler: another may have something else of this name.
    SchedulerLost
        If the handle's own client has closed because its scheduler is gone.
    ValueError
        If the handle has no client, and there is no current one.
    """
    if own is None:
        return current_client()
    if own.status not in ("closing", "closed"):
        return own
    try:
        current = current_client()
    except ValueError:
        current = None
    if current is None or not is_same_scheduler(own, current):
        if is_lost(own):
            raise scheduler_lost()
        raise RuntimeError(
            f"the client that deployed {name!r}, or got the handle, is closed; get a "
            f"handle from the new client with daskinfer.get(client, {name!r})"
        )
    return current


def current_client() -> Client:
    """Return the client of the task that this runs in, or else the default one.

    Raises
    ------
    ValueError
        If there is none: make one with ``Client(address)``.
    """
    try:
        get_worker()
    except ValueError:
        client: Client = default_client()
        return client
    return get_client()


def get(client: Client, name: str, version: str | None = None) -> Model:
    """Return a handle to what is deployed under ``name``.

    Raises
    ------
    UnknownDeployment
        If it is not there; the message lists what is.
    """
    return cast(Model, client.sync(_get, client, name, version))


async def _get(client: Client, name: str, version: str | None) -> Model:
    about = await describe_one(client, name)
    if version is not None and version not in about["versions"]:
        raise UnknownDeployment(
            f"{name!r} has no version {version!r}; "
            f"it has {', '.join(map(repr, about['versions']))}"
        )
    digest = "" if version is None else about["versions"][version][:_DIGEST]
    return Model(
        name, version, about["batch_dim"], about["cached"], digest, client=client
    )


def deployments(client: Client) -> list[Model]:
    """Return a handle for each deployment of the cluster, by name."""
    return cast("list[Model]", client.sync(_deployments, client))


async def _deployments(client: Client) -> list[Model]:
    found = await _describe(client)
    return [
        Model(name, None, about["batch_dim"], about["cached"], client=client)
        for name, about in sorted(found.items())
    ]


async def _describe(client: Client) -> dict[str, Any]:
    await install(client)
    answer: dict[str, Any] = await calls(client).daskinfer_describe()
    return answer


async def describe_one(client: Client, name: str) -> dict[str, Any]:
    """What the scheduler says of one deployment.

    Raises
    ------
    UnknownDeployment
        If it is not there; the message lists what is.
    """
    found = await _describe(client)
    if name not in found:
        raise UnknownDeployment(_unknown(name, found))
    about: dict[str, Any] = found[name]
    return about


def status(model: Model) -> DeploymentStatus:
    """Return what :meth:`Model.status` documents."""
    client = model.client
    return cast(DeploymentStatus, client.sync(status_of, client, model.name))


async def status_of(client: Client, name: str) -> DeploymentStatus:
    """As :func:`status`, awaited on the client's own event loop."""
    await install(client)
    answer = await calls(client).daskinfer_status(name=name)
    if answer["status"] == "unknown":
        raise UnknownDeployment(answer["message"])
    return DeploymentStatus.from_message(answer["deployment"])


def cache_clear(model: Model) -> None:
    """Forget cached results, as :meth:`Model.cache_clear` documents."""
    client = model.client
    return cast(None, client.sync(_cache_clear, client, model.name))


async def _cache_clear(client: Client, name: str) -> None:
    await install(client)
    answer = await calls(client).daskinfer_clear(name=name)
    if answer["status"] == "unknown":
        raise UnknownDeployment(answer["message"])
    if answer["silent"]:
        raise InferenceError(
            f"the cached results of {name!r} may still be on "
            f"{', '.join(answer['silent'])}, which did not answer: try again"
        )


def undeploy(model: Model, wait_timeout: str | float | None) -> None:
    """Remove a deployment, as :meth:`Model.undeploy` documents."""
    client = model.client
    if wait_timeout is None:
        wait_timeout = config.seconds("undeploy.wait-timeout")
    timeout = given_duration("wait_timeout", wait_timeout)
    return cast(None, client.sync(_undeploy, client, model.name, timeout))


async def _undeploy(client: Client, name: str, timeout: float) -> None:
    await install(client)
    answer = await calls(client).daskinfer_undeploy(name=name, timeout=timeout)
    if answer["status"] == "unknown":
        raise UnknownDeployment(answer["message"])
    if timeout and answer["unfreed"]:
        logger.warning(
            "%r is undeployed, but %s had not freed its memory after %g s",
            name,
            ", ".join(answer["unfreed"]),
            timeout,
            deployment=name,
            stimulus_id=f"daskinfer-undeploy-{name}",
        )


def info(future: Future[Any]) -> RequestInfo:
    """Tell how the answer of a finished future came about.

    Parameters
    ----------
    future
        A future of :meth:`Model.submit` or of ``client.submit(model, ...)``.

    Raises
    ------
    ValueError
        If it is not finished, or no deployment made it.
    """
    return cast(RequestInfo, future.client.sync(_info, future.client, future))


async def _info(client: Client, future: Future[Any]) -> RequestInfo:
    if future.status == "pending":
        raise ValueError(f"{future.key!r} is pending; wait for it first")
    if future.status != "finished":
        raise ValueError(
            f"{future.key!r} has no answer to tell of: its status is {future.status!r}"
        )
    answer = await calls(client).daskinfer_info(key=future.key)
    if answer is None:
        raise ValueError(f"{future.key!r} was not made by a deployment")
    return RequestInfo(**answer)


def story(model: Model, future: Future[Any] | Key) -> Story:
    """Tell one request's life, as :meth:`Model.story` documents."""
    client = model.client
    key = future.key if isinstance(future, Future) else future
    # The request itself travels another way, and may come after this question.
    is_coming = isinstance(future, Future) and future.status == "pending"
    waits = _COMING if is_coming else 0.0
    return cast(Story, client.sync(_story, client, model.name, key, waits))


async def _story(client: Client, name: str, key: Key, waits: float) -> Story:
    await install(client)
    until = monotonic() + waits
    answer = await calls(client).daskinfer_story(name=name, key=key)
    while answer["status"] == "unknown" and monotonic() < until:
        await asyncio.sleep(0.01)
        answer = await calls(client).daskinfer_story(name=name, key=key)
    if answer["status"] == "unknown":
        raise ValueError(
            f"the scheduler knows of no request {key!r}: give a future of the model, "
            "or its key; requests whose futures are gone are forgotten after a while"
        )
    if answer["status"] == "other":
        own = answer["name"]
        raise ValueError(
            f"{key!r} is a request to {own!r}, not to {name!r}: ask "
            f"daskinfer.get(client, {own!r}).story(...)"
        )
    return Story.from_message(answer)


def _unknown(name: str, found: Mapping[str, Any]) -> str:
    there = ", ".join(map(repr, sorted(found))) or "nothing"
    return f"no deployment is named {name!r}; there is {there}"
