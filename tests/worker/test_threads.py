from __future__ import annotations

import asyncio
import threading
import traceback
import weakref
from concurrent.futures import Future

import pytest
from distributed.threadpoolexecutor import ThreadPoolExecutor

from daskinfer.worker.threads import run_on


class Model:
    """Something large."""

    def fail(self) -> None:
        raise ValueError("no memory")


def test_what_a_thread_was_given_is_free_before_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error that is kept, its frames cleared, does not keep it either."""
    goes_on = threading.Event()
    tell = Future.set_exception

    def tell_and_stay(future: Future[None], error: BaseException | None) -> None:
        tell(future, error)
        assert goes_on.wait(60)

    monkeypatch.setattr(Future, "set_exception", tell_and_stay)

    async def main() -> tuple[weakref.ref[Model], BaseException]:
        model = Model()
        running, left = run_on(threads, model.fail), weakref.ref(model)
        del model
        await asyncio.wait([running])
        error = running.exception()
        assert error is not None
        traceback.clear_frames(error.__traceback__)
        return left, error

    threads = ThreadPoolExecutor(1)
    try:
        left, error = asyncio.run(main())
        assert left() is None and str(error) == "no memory"
    finally:
        goes_on.set()
        threads.shutdown()
