"""Changing what a deployment answers with: another version, or the one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

from daskinfer import exceptions
from daskinfer.canary import AbortPolicy

if TYPE_CHECKING:
    from distributed import Client

    from daskinfer.artifact import Artifact
    from daskinfer.handle import Model
    from daskinfer.policy import BatchPolicy

_ACTIVATE = ("when-ready", "manual")


class Versioned:
    """What a :class:`~daskinfer.Model` can do about its versions.

    Every call is awaitable with an asynchronous client, and thread-safe: the scheduler
    does one after the other.
    """

    __slots__ = ("_client",)

    name: str
    batch_dim: int | None
    _client: Client | None

    @property
    def client(self) -> Client:
        """The Dask client this handle speaks through."""
        from daskinfer.client import client_of

        return client_of(self.name, self._client)

    def update(
        self,
        model: Callable[..., Any] | None = None,
        *,
        version: str,
        factory: str | None = None,
        factory_kwargs: Mapping[str, Any] | None = None,
        path: str | None = None,
        trusted: bool = False,
        batching: BatchPolicy | None = None,
        warmup: Any = None,
        activate: str = "when-ready",
        min_ready: float = 1.0,
        traffic: float = 0.0,
        auto_abort: AbortPolicy | None = None,
        keep_previous: bool = True,
        wait: bool = True,
        wait_timeout: str | float | None = None,
    ) -> None:
        """Replace the model by another version, without a gap.

        The old version answers until enough workers have loaded, verified and warmed
        the new one. Then all requests go to it from one moment on, those that wait
        included, which keep their places. Batches under way are answered by the old
        version, which stays loaded afterwards for :meth:`rollback`. If too many workers
        fail to load the new one, it is dropped, and the old one goes on.

        Parameters
        ----------
        model, factory, factory_kwargs, path, trusted
            The new model, given as to :func:`daskinfer.deploy`.
        version
            Its label, which no version of the deployment may have had that has
            answered requests.
        batching
            How its requests are batched; None: as those of the active version, or as
            an exported program says that it takes them. ``batch_dim`` must not change.
        warmup
            An example input, as for deploy.
        activate
            ``"when-ready"``, or ``"manual"``: it is loaded, and answers requests of
            handles that are pinned to it, until :meth:`promote` activates it.
        min_ready
            Which part of the workers that can serve the deployment must be ready; at
            least one must. Workers that join meanwhile count.
        traffic
            A share between 0 and 1 that it answers as a canary, until :meth:`promote`
            or :meth:`abort`. Which requests these are depends on their keys alone.
        auto_abort
            When a canary is given up without being asked.
        keep_previous
            Whether the version before it stays loaded.
        wait
            Whether to return only when it is active, or ready to be promoted, or
            answers its share.
        wait_timeout
            How long at most, such as ``"5m"``; None takes the config.

        Raises
        ------
        UpdateFailed
            Too few workers could load it. The message has the reasons of each, and the
            cause is what the first of them raised.
        UpdateAborted
            It was given up while this waited.
        UpdateInProgress
            Another update is under way.
        VersionExists
            There is a version of this label.
        DeployTimeout
            Too few workers were ready in time. The update goes on.
        ValueError, TypeError
            An argument is wrong; nothing was changed.

        Examples
        --------
        >>> import daskinfer
        >>> from distributed import Client
        >>> with Client(processes=False, dashboard_address=":0") as client:
        ...     model = daskinfer.deploy(client, lambda x: x + 1, name="next")
        ...     model.update(lambda x: x + 2, version="2")
        ...     future = model.submit(1)
        ...     print(future.result(), daskinfer.info(future).version)
        3 2
        """
        from daskinfer import deployment, planning
        from daskinfer.fields import number_within
        from daskinfer.names import check_name

        artifact = planning.artifact_of(model, factory, factory_kwargs, path, trusted)
        check_name("version", version)
        if activate not in _ACTIVATE:
            raise ValueError(f"activate must be one of {_ACTIVATE}, not {activate!r}")
        if auto_abort is not None and not isinstance(auto_abort, AbortPolicy):
            raise TypeError(f"auto_abort must be an AbortPolicy, not {auto_abort!r}")
        planning.check_policy(batching)
        if batching is None and artifact.row_limits(self.batch_dim or 0) is not None:
            configured = planning.configured_policy(artifact)
            batching = replace(configured, batch_dim=self.batch_dim)
        options = {
            "version": version,
            "policy": None if batching is None else asdict(batching),
            "warmup": planning.warmup_payload(warmup),
            "min_ready": number_within("min_ready", min_ready, 0, 1),
            "manual": activate == "manual",
            "share": number_within("traffic", traffic, 0, 1),
            "keep_previous": bool(keep_previous),
            "auto_abort": None if auto_abort is None else auto_abort.to_message(),
            "timeout": deployment.deploy_timeout(wait_timeout) if wait else None,
        }
        client = self.client
        return cast(None, client.sync(_update, client, self.name, artifact, options))

    def promote(self, version: str | None = None) -> None:
        """Activate the version that an update has loaded, or that is a canary.

        Parameters
        ----------
        version
            Its label, to be sure which it is; None takes the one there is.

        Raises
        ------
        NoUpdate
            There is none of this label.
        VersionNotReady
            Fewer workers are ready for it than its update asked for.
        """
        return self._change("promote", version)

    def abort(self, version: str | None = None) -> None:
        """Give up an update that is under way, or a canary; the active version stays.

        Parameters
        ----------
        version
            The new version's label, to be sure which it is; None takes any.

        Raises
        ------
        NoUpdate
            None is under way.
        """
        return self._change("abort", version)

    def rollback(self) -> None:
        """Answer with the previous version again, from this moment on.

        It is loaded still. The one that was active takes its place as the previous one:
        another rollback goes forward again.

        Raises
        ------
        NoPreviousVersion
            There is none, or no worker has it ready.
        """
        return self._change("rollback", None)

    def traffic(self, shares: Mapping[str, float]) -> None:
        """Set which share of the requests the canary answers.

        Parameters
        ----------
        shares
            The label of the new version, and its share between 0 and 1, such as
            ``{"2": 0.05}``. It must have been loaded by
            ``update(..., activate="manual")`` or ``update(..., traffic=...)``.

        Raises
        ------
        NoUpdate
            The version is not that of an update.
        VersionNotReady
            It is being loaded.
        """
        from daskinfer.fields import number_within

        if not isinstance(shares, Mapping) or len(shares) != 1:
            raise TypeError(
                'traffic takes one version and its share, such as {"2": 0.05}, not '
                f"{shares!r}"
            )
        ((version, share),) = shares.items()
        return self._change(
            "share", version, share=number_within("traffic", share, 0, 1)
        )

    def pin(self, version: str) -> Model:
        """Return a handle that stays with one version, whatever is active.

        Requests fail with :class:`UnknownDeployment` once that version is retired.

        Raises
        ------
        UnknownDeployment
            There is no such version; the message lists what there is.
        """
        from daskinfer.client import get

        return get(self.client, self.name, version)

    def _change(self, what: str, version: str | None, **about: Any) -> None:
        client = self.client
        about |= {"name": self.name, "what": what, "version": version}
        return cast(None, client.sync(_change, client, about))


async def _update(
    client: Client, name: str, artifact: Artifact, options: dict[str, Any]
) -> None:
    from daskinfer.failure import load_failure
    from daskinfer.installation import calls, install
    from daskinfer.uploading import uploaded

    await install(client)
    async with uploaded(client, artifact):
        answer = await calls(client).daskinfer_update(
            name=name, artifact=artifact.to_message(), **options
        )
    if answer["status"] == "timeout":
        raise exceptions.DeployTimeout(answer["message"])
    if answer["status"] == "aborted":
        raise exceptions.UpdateAborted(answer["message"])
    if answer["status"] == "failed":
        cause = load_failure(answer["failure"]) if answer["failure"] else None
        raise exceptions.UpdateFailed(answer["message"]) from cause
    _raise_refusal(answer)


async def _change(client: Client, about: dict[str, Any]) -> None:
    from daskinfer.installation import calls, install

    await install(client)
    _raise_refusal(await calls(client).daskinfer_change(**about))


def _raise_refusal(answer: dict[str, Any]) -> None:
    if answer["status"] == "ValueError":
        raise ValueError(answer["message"])
    if answer["status"] != "OK":
        raise getattr(exceptions, answer["status"])(answer["message"])
