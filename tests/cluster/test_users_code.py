"""Code of the user's that fails, in a model or before it."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
from distributed import Client
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import BatchPolicy, InferenceError, OutputMismatch
from tests.cluster.helpers import Probe

X = np.arange(6.0).reshape(3, 2)


class Unmeasurable:
    """A constant that cannot be compared, as pickling it fails."""

    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle of me")


class Deteriorating:
    """A constant that can be pickled once."""

    def __reduce__(self) -> Any:
        return Unmeasurable, ()


class Unloadable:
    """An input that cannot be unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise RuntimeError("not on a worker")


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_user_code_that_fails_while_a_request_is_sized(
    client: Client, scheduler: Any, worker: Any
) -> None:
    probe = Probe(lambda x, **_: x * 2, is_open=False)
    model = await daskinfer.deploy(client, probe)
    with pytest.raises(RuntimeError, match="no pickle of me"):
        model.submit(X, option=Unmeasurable())
    first = model.submit(X)
    await probe.entered()
    # The bad one is between two others, and in one message with them.
    good = model.submit(X)
    bad = model.submit(X, option=[Unloadable()])
    also_good = model.submit(X)
    probe.open()
    with pytest.raises(RuntimeError, match="not on a worker"):
        await bad
    for future in (first, good, also_good):
        np.testing.assert_array_equal(await future, X * 2)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_user_code_that_fails_while_a_graph_is_sized(
    client: Client, scheduler: Any, worker: Any
) -> None:
    model = await daskinfer.deploy(client, lambda x, option=None: x * 2, name="double")
    bad = client.submit(model, X, option=Deteriorating())
    good = client.submit(model, X)
    with pytest.raises(RuntimeError, match="no pickle of me"):
        await bad
    np.testing.assert_array_equal(await good, X * 2)


class Picky(dict[str, Any]):
    """An input that takes arrays of any length but that of the padded ones."""

    def __setitem__(self, name: str, value: Any) -> None:
        if len(value) == 16:
            raise RuntimeError("too long for me")
        super().__setitem__(name, value)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_user_code_that_fails_while_a_request_is_padded(
    client: Client, scheduler: Any, worker: Any
) -> None:
    probe = Probe(lambda picky: picky["x"] * 2)
    model = await daskinfer.deploy(
        client, probe, batching=BatchPolicy(allowed_batch_sizes=(1, 3, 16))
    )
    long, fits, other = np.ones((5, 2)), X, np.ones((2, 4))
    bad = model.submit(Picky(x=long))
    good = model.submit(Picky(x=fits))
    with pytest.raises(RuntimeError, match="too long for me"):
        await bad
    np.testing.assert_array_equal(await good, fits * 2)
    # Another kind of input, padded too, by the same worker.
    np.testing.assert_array_equal(await model.submit({"x": other}), other * 2)
    status = await model.status()
    assert (status.successes, status.failures) == (2, 1)


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_user_code_that_fails_in_the_model(
    client: Client, scheduler: Any, worker: Any
) -> None:
    def fail_on_negative(x: Any) -> Any:
        if (x < 0).any():
            raise ArithmeticError("negative")
        return x

    model = await daskinfer.deploy(client, fail_on_negative)
    with pytest.raises(ArithmeticError, match="negative"):
        await model.submit(-X)
    assert (await model.submit(X) == X).all()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_model_that_ends_the_process(
    client: Client, scheduler: Any, worker: Any
) -> None:
    model = await daskinfer.deploy(
        client, lambda x: sys.exit(3) if (x < 0).any() else x, name="exit"
    )
    with pytest.raises(InferenceError, match=r"would end its process: SystemExit\(3\)"):
        await model.submit(-X)
    assert (await model.submit(X) == X).all()


class LockedError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.lock = threading.Lock()


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_exception_that_cannot_be_pickled(
    client: Client, scheduler: Any, worker: Any
) -> None:
    def fail(x: Any) -> Any:
        raise LockedError("what happened")

    model = await daskinfer.deploy(client, fail)
    for future in (model.submit(X), client.submit(model, X)):
        with pytest.raises(Exception, match=r"LockedError\('what happened'\)"):
            await future


@pytest.mark.parametrize("by", [-1, 1], ids=["too few", "too many"])
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_number_of_outputs(
    client: Client, scheduler: Any, worker: Any, by: int
) -> None:
    def count(xs: list[str]) -> list[int]:
        answers = [len(x) for x in xs]
        if "bad" not in xs:
            return answers
        return answers[:by] if by < 0 else [*answers, 0]

    model = await daskinfer.deploy(
        client,
        count,
        batching=BatchPolicy(
            batch_dim=None, min_batch_size=3, max_batch_size=3, max_wait="50ms"
        ),
    )
    for future in model.map(["one", "bad", "three"]):
        with pytest.raises(OutputMismatch, match=r"output is a list of [24] entries"):
            await future
    assert await model.submit("fine") == 4
