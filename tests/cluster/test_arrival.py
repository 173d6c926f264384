"""Small results that come to their client without being asked for."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from distributed import Client, Future, wait
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer.future import NOTHING, taken
from tests.payload.structures import assert_same

X = np.arange(6.0).reshape(3, 2)


def twice(x: Any) -> Any:
    """A model."""
    return x * 2


class CountedCalls:
    """How often a scheduler was asked for results."""

    def __init__(self, scheduler: Any) -> None:
        self.count = 0
        for name in ("gather", "daskinfer_gather", "who_has"):
            self._wrap(scheduler.handlers, name)

    def _wrap(self, handlers: dict[str, Any], name: str) -> None:
        handler = handlers[name]

        async def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            answer = handler(*args, **kwargs)
            return await answer if hasattr(answer, "__await__") else answer

        handlers[name] = counted


@gen_cluster(client=True)
async def test_a_small_result_needs_no_round_trip(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, twice)
    calls = CountedCalls(scheduler)
    assert_same(await model.submit(X), X * 2)
    assert_same(await model(X), X * 2)
    assert_same(await daskinfer.gather(model.map([X, X + 1])), [X * 2, X * 2 + 2])
    assert calls.count == 0
    # Those of a graph are fetched as ever: nobody said that they are wanted here.
    assert_same(await client.submit(model, X), X * 2)
    assert calls.count == 1


@gen_cluster(client=True)
async def test_each_fetch_gives_an_object_of_its_own(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, twice)
    future = model.submit(X)
    first = await future
    first += 100
    second = await future
    assert_same(second, X * 2)
    assert_same(await client.gather(future), X * 2)


@gen_cluster(client=True, config={"daskinfer.gather.inline-limit": 100})
async def test_what_is_not_small_is_fetched_when_wanted(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, twice)
    small, large = model.submit(X[:1]), model.submit(np.ones((100, 2)))
    await wait([small, large])
    assert taken(large) is NOTHING
    assert_same(await large, np.full((100, 2), 2.0))
    assert_same(await small, X[:1] * 2)


@gen_cluster(client=True)
async def test_pickled_it_is_a_plain_future(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, twice)
    future = model.submit(X)
    copy = pickle.loads(pickle.dumps(future))
    assert type(copy) is Future and isinstance(future, Future)
    copy.bind_client(client)
    assert_same(await copy, X * 2)
    assert_same(await client.submit(np.sum, future), (X * 2).sum())


@gen_cluster(client=True)
async def test_a_result_outlives_a_worker_only_as_a_new_one(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, twice)
    future = model.options(workers=a.address, allow_other_workers=True).submit(X)
    await wait(future)
    await a.close()
    assert_same(await future, X * 2)
    assert_same(await future, X * 2)


@gen_cluster(client=True)
async def test_an_error_is_no_result(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, twice)
    future = model.submit(X)
    failing = model.submit({"not": "numbers"})
    assert_same(await future, X * 2)
    error = await failing.exception()
    assert isinstance(error, TypeError)


@gen_cluster(client=True)
async def test_two_clients_and_one_key(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, twice)
    future = model.submit(X)
    async with Client(scheduler.address, asynchronous=True) as other:
        await client.publish_dataset(future, name="shared")
        same = await other.get_dataset("shared")
        assert same.client is other
        assert_same(await same, X * 2)
        assert_same(await future, X * 2)


@gen_cluster(client=True)
async def test_gather_of_dask_is_packed_for_clients_of_ours_only(
    client: Client, scheduler: Any, a: Any, b: Any
) -> None:
    model = await daskinfer.deploy(client, twice)
    packed: list[int] = []
    plugin = scheduler.plugins["daskinfer"]
    answer = plugin.fetching.packed

    async def counted(keys: Any) -> Any:
        packed.append(len(keys))
        return await answer(keys)

    plugin.fetching.packed = counted
    futures = client.map(model, [X, X + 1, X + 2], pure=False)
    wanted = [X * 2, X * 2 + 2, X * 2 + 4]
    assert_same(await client.gather(futures), wanted)
    assert packed == [3]
    async with Client(scheduler.address, asynchronous=True) as other:
        await client.publish_dataset(futures, name="kept")
        found = await other.get_dataset("kept")
        # It may have no daskinfer to read a pack with.
        assert_same(await other.gather(found), wanted)
        assert packed == [3]
    plain = client.submit(np.sum, X)
    assert_same(await client.gather([*futures, plain]), [*wanted, X.sum()])
    assert packed == [3]
