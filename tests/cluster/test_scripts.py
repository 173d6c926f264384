"""Calls in a script, where the client is not asynchronous."""

from __future__ import annotations

import threading
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, get_client

import daskinfer
from tests.cluster.helpers import PATIENCE

X = np.arange(6.0).reshape(3, 2)


def double(x: Any) -> Any:
    return x * 2


@pytest.fixture(scope="module")
def client() -> Any:
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            dashboard_address=":0",
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def model(client: Client) -> Any:
    model = daskinfer.deploy(client, double, name="double")
    yield model
    model.undeploy()


def test_submit(client: Client, model: Any) -> None:
    assert (client.submit(model, X).result() == X * 2).all()
    assert (model.submit(X).result() == X * 2).all()
    assert (model.options(priority=1).submit(X).result() == X * 2).all()


def test_map(client: Client, model: Any) -> None:
    for futures in (client.map(model, [X, X]), model.map([X, X])):
        first, second = client.gather(futures)
        assert (first == X * 2).all() and (second == X * 2).all()


def test_map_several_iterables(client: Client) -> None:
    model = daskinfer.deploy(client, lambda x, y, z: x + y + z, name="sum")
    futures = model.map([X, X], (X for _ in range(5)), z=X)
    assert len(futures) == 2
    assert (futures[1].result() == X * 3).all()
    model.undeploy()


def test_call(model: Any) -> None:
    assert (model(X) == X * 2).all()
    assert (model.options(priority=1)(X) == X * 2).all()


def test_call_from_many_threads(model: Any) -> None:
    answers: dict[int, Any] = {}

    def call(i: int) -> None:
        answers[i] = model(X + i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for i in range(20):
        np.testing.assert_array_equal(answers[i], (X + i) * 2)


def test_delayed(model: Any) -> None:
    lazy = dask.delayed(sum)([dask.delayed(model)(X), dask.delayed(model)(X)])
    assert (lazy.compute() == X * 4).all()


def test_all_the_rest_is_synchronous(client: Client, model: Any) -> None:
    future = model.submit(X)
    assert (daskinfer.gather([future])[0] == X * 2).all()
    assert daskinfer.info(future).name == "double"
    assert model.status().name == "double"
    assert daskinfer.get(client, "double") == model
    assert daskinfer.deployments(client) == [model]


def test_without_naming_the_client(model: Any) -> None:
    # A handle that travelled has none: it takes the current one.
    assert (daskinfer.Model("double")(X) == X * 2).all()


def test_predict(model: Any) -> None:
    assert (model.predict(X) == X * 2).all()
    lazy = model.predict(da.from_array(X, chunks=(1, 2)))
    assert (lazy.sum().compute(), lazy.numblocks) == ((X * 2).sum(), (3, 1))


def test_map_blocks(model: Any) -> None:
    doubled = da.from_array(X, chunks=(1, 2)).map_blocks(model)
    assert doubled.dtype == X.dtype
    assert (doubled.compute() == X * 2).all()


def test_undeploy(client: Client) -> None:
    model = daskinfer.deploy(client, double, name="short-lived")
    model.undeploy()
    with pytest.raises(daskinfer.UnknownDeployment, match="'short-lived'"):
        model(X)


def test_deploy_in_a_task(client: Client) -> None:
    def task() -> Any:
        model = daskinfer.deploy(get_client(), double, name="from-a-task")
        try:
            return model(X), model.predict(X), model.status().successes
        finally:
            model.undeploy()

    called, predicted, successes = client.submit(task).result()
    assert (called == X * 2).all() and (predicted == X * 2).all()
    assert successes == 2
