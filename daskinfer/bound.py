"""A handle together with the options of its calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from daskinfer.imap.calls import Iterated

if TYPE_CHECKING:
    from distributed import Future

    from daskinfer.handle import Model
    from daskinfer.options import CallOptions
    from daskinfer.stream import Stream


class BoundModel(Iterated):
    """A handle with call options; see :meth:`Model.options`.

    ``imap`` and ``aimap`` are those of :class:`Model`; the options apply to each of
    their requests.
    """

    __slots__ = ("model", "options")

    def __init__(self, model: Model, options: CallOptions) -> None:
        self.model = model
        self.options = options

    def __repr__(self) -> str:
        told = ", ".join(
            f"{name}={getattr(self.options, name)!r}" for name in self.options.names()
        )
        return f"{repr(self.model)[:-1]} with {told or 'no options'}>"

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """As :meth:`Model.submit`, with the options."""
        return self.model._submit(self.options, args, kwargs)

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """As :meth:`Model.stream`, with the options.

        Raises
        ------
        ValueError
            With ``key=``: others may share what it names.
        """
        return self.model._stream(self.options, args, kwargs)

    def map(self, *iterables: Iterable[Any], **kwargs: Any) -> list[Future[Any]]:
        """As :meth:`Model.map`, with the options.

        Raises
        ------
        ValueError
            With ``key=``: one key cannot name many results.
        """
        if self.options.key is not None:
            raise ValueError("key= names one result; use submit")
        return self.model._map(self.options, zip(*iterables, strict=False), kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`Model.__call__`, with the options."""
        return self.model._call(self.options, args, kwargs)

    def predict(self, data: Any, **kwargs: Any) -> Any:
        """As :meth:`Model.predict`; the options apply to each of its requests.

        Raises
        ------
        ValueError
            With ``key=``: one key cannot name many results; and for a dask array,
            which is computed later: give the options to ``client.compute`` then.
        """
        from daskinfer.predict import predict_with

        if self.options.key is not None:
            raise ValueError("key= names one result; predict sends many requests")
        return predict_with(self.model, self.options, data, kwargs)

    def _bound(self) -> tuple[Model, CallOptions]:
        return self.model, self.options
