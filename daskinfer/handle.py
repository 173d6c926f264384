"""The handle of a deployed model: tiny, picklable, called like the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from daskinfer.bound import BoundModel
from daskinfer.imap.calls import Iterated
from daskinfer.options import NO_OPTIONS, CallOptions, stream_order
from daskinfer.versions import Versioned

if TYPE_CHECKING:
    from dask.typing import Key
    from distributed import Client, Future

    from daskinfer.status import DeploymentStatus
    from daskinfer.story import Story
    from daskinfer.stream import Stream

__all__ = ["NO_OPTIONS", "BoundModel", "CallOptions", "Model"]


class Model(Iterated, Versioned):
    """A handle to a deployed model.

    Made by :func:`daskinfer.deploy` and :func:`daskinfer.get`. It holds a name, no
    weights: a few hundred bytes pickled, importable without torch, equal to any
    other handle of the same deployment. Use it wherever Dask takes a function::

        future = client.submit(model, x)
        futures = client.map(model, xs)
        array.map_blocks(model, dtype="float32")

    or through its own methods, which cost far less per call.

    Parameters
    ----------
    name
        The deployment's name.
    version
        A version to stay with; None follows the active one.
    batch_dim
        The axis along which requests are joined; None stacks samples.
    cached
        Whether results of the deployment are cached, so that requests are to be told
        apart by what they say.
    digest
        What the version that it stays with is known by, or a part of that: under the
        same name and label there may be another model later.

    Notes
    -----
    Thread-safe: a handle is immutable. It speaks through the client that deployed or
    got it. One that was pickled has none, and takes the current client when it needs
    one (inside a task, the worker's). So does one whose client was closed, if the
    current client is connected to the same scheduler; else it is a RuntimeError.

    Examples
    --------
    >>> model = Model("resnet50")
    >>> model
    <Model 'resnet50'>
    >>> import pickle
    >>> pickle.loads(pickle.dumps(model)) == model
    True
    >>> len(pickle.dumps(model)) < 300
    True
    """

    __slots__ = (
        "__name__",
        "__weakref__",
        "batch_dim",
        "cached",
        "digest",
        "name",
        "version",
    )

    def __init__(
        self,
        name: str,
        version: str | None = None,
        batch_dim: int | None = 0,
        cached: bool = False,
        digest: str = "",
        *,
        client: Client | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.batch_dim = batch_dim
        self.cached = cached
        self.digest = digest
        # Dask makes the key prefix of a task from its function's name.
        self.__name__ = name if version is None else f"{name}@{version}"
        self._client = client

    def __reduce__(self) -> tuple[type[Model], tuple[Any, ...]]:
        about = self.name, self.version, self.batch_dim, self.cached, self.digest
        return Model, about

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return ("daskinfer.Model", self.name, self.version, self.digest)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Model)
            and self.name == other.name
            and self.version == other.version
        )

    def __hash__(self) -> int:
        return hash((Model, self.name, self.version))

    def __repr__(self) -> str:
        version = "" if self.version is None else f" version {self.version!r}"
        return f"<Model {self.name!r}{version}>"

    def __call__(self, *args: Any, computing_meta: bool = False, **kwargs: Any) -> Any:
        """Run the model on one input and wait for the result.

        Works in the script, and inside a task on any worker: the request needs no
        task slot, so a task that waits for it cannot deadlock.

        Parameters
        ----------
        *args, **kwargs
            What the model is called with.
        computing_meta
            Set by :mod:`dask.array` when it asks with empty arrays what kind of
            array comes back, which cannot wait for an answer on the event loop.

        Returns
        -------
        The model's output on the CPU; with an asynchronous client something to
        await that gives it.

        Raises
        ------
        RuntimeError
            ``computing_meta`` on the event loop; Dask then goes by ``dtype=`` alone.
        """
        if computing_meta and self.client.asynchronous:
            raise RuntimeError("an asynchronous client cannot wait here; pass meta=")
        return self._call(NO_OPTIONS, args, kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send one request; all keywords go to the model.

        The same plain Dask future as ``client.submit(model, ...)`` gives, far
        cheaper per call.

        Returns
        -------
        distributed.Future
            Its result has the container and dtype that the model itself returns.
        """
        return self._submit(NO_OPTIONS, args, kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """Send one request, and read its answer as it comes, piece by piece.

        For models whose call returns an iterator: generator functions, asynchronous
        ones too, and modules with a ``stream`` method. All keywords go to the model.

        Returns
        -------
        Stream
            To be read with ``for`` or ``async for``. Its ``future`` is the Dask future
            of the whole. A model that asks another one on its own worker gets a plain
            iterator.
        """
        return self._stream(NO_OPTIONS, args, kwargs)

    def map(self, *iterables: Iterable[Any], **kwargs: Any) -> list[Future[Any]]:
        """Send one request for each element of the iterables, zipped.

        Parameters
        ----------
        *iterables
            As for the built-in ``map``; the shortest one ends it.
        **kwargs
            Keywords of the model, the same for every request.

        Returns
        -------
        list of distributed.Future
        """
        return self._map(NO_OPTIONS, zip(*iterables, strict=False), kwargs)

    def options(
        self,
        *,
        key: Key | None = None,
        priority: float = 0,
        retries: int = 0,
        workers: str | int | Iterable[str | int] | None = None,
        allow_other_workers: bool = False,
        resources: dict[str, float] | None = None,
        timeout: str | float | None = None,
        combine: Callable[[list[Any]], Any] | None = None,
        keep: bool = True,
        resume: str | None = None,
    ) -> BoundModel:
        """Bind per-call options, as :meth:`distributed.Client.submit` knows them.

        ``timeout`` is the engine's own: seconds (or ``"2s"``) within which a request
        is answered or fails with :class:`~daskinfer.DeadlineExceeded`. So are those for
        models that answer piece by piece: ``combine`` makes the result of a list of all
        chunks, on the worker; with ``keep=False`` there is no result, and a stream may
        be endless; with ``resume="replay"`` a stream whose worker is lost goes on
        elsewhere, if the model always gives the same chunks.

        Examples
        --------
        >>> Model("resnet50").options(priority=10)
        <Model 'resnet50' with priority=10>
        """
        return BoundModel(
            self,
            CallOptions.of(
                key=key,
                priority=priority,
                retries=retries,
                workers=workers,
                allow_other_workers=allow_other_workers,
                resources=resources,
                timeout=timeout,
                combine=combine,
                keep=keep,
                resume=resume,
            ),
        )

    def predict(self, data: Any, **kwargs: Any) -> Any:
        """Run the model over one big array.

        Parameters
        ----------
        data : ndarray, torch.Tensor or dask.array.Array
            Rows along the model's batch axis.
        **kwargs
            Keywords of the model.

        Returns
        -------
        An array of the same kind with all rows of the output, in order; for a
        dask array a lazy dask array.

        Notes
        -----
        The array is cut into pieces, of which ``daskinfer.predict.in-flight`` per
        worker exist at a time, and no more than ``max_queue`` allows to wait. If the
        model raises on one of them, so does this: use :meth:`map` to have bad inputs
        fail alone.
        """
        from daskinfer.predict import predict

        return predict(self, data, **kwargs)

    def status(self) -> DeploymentStatus:
        """What the scheduler knows of this deployment, at this moment.

        Returns
        -------
        daskinfer.DeploymentStatus
            Awaitable with an asynchronous client.
        """
        from daskinfer.client import status

        return status(self)

    def story(self, future: Future[Any] | Key) -> Story:
        """Tell what has happened to one request, with times.

        What the engine has done with it, what Dask remembers of its task, and what the
        workers that had it remember of its batches.

        Parameters
        ----------
        future
            A future of this model, whatever has become of it, or its key. Of requests
            whose futures are gone the scheduler remembers the latest 2,000.

        Returns
        -------
        daskinfer.Story
            Printed, a table. Awaitable with an asynchronous client.

        Raises
        ------
        ValueError
            The scheduler does not know the request, or it is not one to this model.

        Examples
        --------
        >>> import daskinfer
        >>> from distributed import Client
        >>> with Client(processes=False, dashboard_address=":0") as client:
        ...     model = daskinfer.deploy(client, lambda x: x + 1, name="next")
        ...     future = model.submit(1)
        ...     answer = future.result()
        ...     story = model.story(future)
        >>> story.state, story.events
        ('answered', ['submitted', 'queued', 'sent', 'done', 'answered'])
        """
        from daskinfer.client import story

        return story(self, future)

    def cache_clear(self) -> None:
        """Forget all cached results of this deployment, on every worker and its disk.

        Returns when they are gone; those of requests that are running are not kept.
        Nothing happens where results are not cached.

        Raises
        ------
        InferenceError
            Workers did not answer in time; the message names them.
        """
        from daskinfer.client import cache_clear

        return cache_clear(self)

    def undeploy(self, *, wait_timeout: str | float | None = None) -> None:
        """Remove the deployment; what still waits for it fails by name.

        Batches that run are answered. Returns when the workers have freed the memory
        of device and host that it took.

        Parameters
        ----------
        wait_timeout
            How long to wait for them at most, such as ``"5m"``; None takes the config.
            Workers that take longer are named in the log, and go on; 0 waits for none.
        """
        from daskinfer.client import undeploy

        return undeploy(self, wait_timeout)

    def _call(
        self, options: CallOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # Only a worker has this module loaded.
        device_queue = sys.modules.get("daskinfer.worker.device_queue")
        worker = device_queue.current_worker() if device_queue else None
        if worker is not None:
            # A model that calls a model holds the device that the other waits for.
            from daskinfer.worker.inner import call_inner

            runtime = worker.plugins["daskinfer-runtime"]
            resident = runtime.loader.find(self.name, self.version)
            if resident is not None:
                return call_inner(resident, options, (args, kwargs))
            future = self._submit(options, args, kwargs)
            resident = runtime.loader.find_before(future, self.name, self.version)
            if resident is not None:
                future.release()
                return call_inner(resident, options, (args, kwargs))
            return future.result()
        future = self._submit(options, args, kwargs)
        return future if future.client.asynchronous else future.result()

    def _bound(self) -> tuple[Model, CallOptions]:
        return self, NO_OPTIONS

    def _submit(
        self, options: CallOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        from daskinfer.submission import submitter

        order = stream_order(options, read=False)
        send = submitter(self.client)
        return send.submit(self, options, args, kwargs, order=order)

    def _stream(
        self, options: CallOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Stream:
        from daskinfer.submission import submitter

        device_queue = sys.modules.get("daskinfer.worker.device_queue")
        worker = device_queue.current_worker() if device_queue else None
        if worker is not None:
            # As for a call: what it would wait for waits for this thread.
            from daskinfer.worker.inner import stream_inner

            loader = worker.plugins["daskinfer-runtime"].loader
            call = args, kwargs
            resident = loader.find(self.name, self.version)
            if resident is not None:
                return cast("Stream", stream_inner(resident, options, call))
            stream = submitter(self.client).stream(self, options, args, kwargs)
            resident = loader.find_before(stream.begun, self.name, self.version)
            if resident is not None:
                stream.close()
                return cast("Stream", stream_inner(resident, options, call))
            return stream
        return submitter(self.client).stream(self, options, args, kwargs)

    def _map(
        self,
        options: CallOptions,
        calls: Iterator[tuple[Any, ...]],
        kwargs: dict[str, Any],
    ) -> list[Future[Any]]:
        from daskinfer.submission import submitter

        submit = submitter(self.client).submit
        order = stream_order(options, read=False)
        return [submit(self, options, args, kwargs, order=order) for args in calls]
