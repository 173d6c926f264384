"""Inputs that come one after the other, and may never end."""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import operator
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import dask
import dask.array
import dask.bag
import numpy as np
import pytest
from distributed import Client
from distributed.utils_test import gen_cluster

import daskinfer
from tests.cluster.helpers import PATIENCE, Probe, until
from tests.cluster.imap_helpers import (
    ONE_WORKER,
    TWO_WORKERS,
    Source,
    first,
    orders,
    reading_threads,
    rest,
    row,
    values,
)
from tests.cluster.scheduling_helpers import ONE, deploy, nothing_is_left, queued

# Results


@orders
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_list(c: Client, s: Any, a: Any, b: Any, ordered: bool) -> None:
    model = await deploy(c, Probe())
    found = values(await rest(model.aimap(map(row, range(500)), ordered=ordered)))
    assert (found if ordered else sorted(found)) == [2.0 * i for i in range(500)]
    await until(lambda: not reading_threads())
    await nothing_is_left(s, a, b)
    assert not c.futures


@orders
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_a_list_in_a_thread(
    c: Client, s: Any, a: Any, b: Any, ordered: bool
) -> None:
    model = await deploy(c, Probe())

    def iterate() -> list[float]:
        return values(list(model.imap([row(i) for i in range(500)], ordered=ordered)))

    found = await asyncio.to_thread(iterate)
    assert (found if ordered else sorted(found)) == [2.0 * i for i in range(500)]
    await nothing_is_left(s, a, b)
    assert not c.futures


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_results_come_in_order_or_as_they_are_there(
    c: Client, s: Any, a: Any, b: Any
) -> None:
    model = (await deploy(c, Probe())).options(workers=[a.address])

    def inputs(late: Probe) -> list[Any]:
        return [c.submit(late, 0, workers=[b.address]), row(1), row(2), row(3)]

    late = Probe(row, is_open=False)
    async with model.aimap(inputs(late), ordered=False) as results:
        assert sorted(values(await first(results, 3))) == [2.0, 4.0, 6.0]
        late.open()
        assert values(await rest(results)) == [0.0]
    late = Probe(row, is_open=False)
    async with model.aimap(inputs(late)) as results:
        due = asyncio.ensure_future(anext(results))
        await until(lambda: len(results._flow._window._ready) == 3)
        assert not due.done()
        late.open()
        assert values([await due, *await rest(results)]) == [0.0, 2.0, 4.0, 6.0]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_keywords_go_to_the_model_and_tuples_are_inputs(
    c: Client, s: Any, a: Any
) -> None:
    model = await deploy(c, lambda pair, scale: pair[0] * scale + pair[1], name="pair")
    found = model.aimap([(row(1), row(2)), (row(3), row(4))], scale=10)
    assert values(await rest(found)) == [12.0, 34.0]


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_inputs_may_be_futures(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    found = model.aimap(c.submit(row, i) for i in range(20))
    assert values(await rest(found)) == [2.0 * i for i in range(20)]
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_large_results_are_fetched(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, lambda x: np.repeat(x, 300_000, axis=1), name="m")
    found = await rest(model.aimap(row(i) for i in range(10)))
    assert [r.shape for r in found] == [(1, 300_000)] * 10
    assert values(found) == [float(i) for i in range(10)]
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_options_apply_to_every_request(c: Client, s: Any, a: Any) -> None:
    probe = Probe()
    model = await deploy(c, probe, warmup=ONE)
    probe.close()
    results = model.options(timeout="10ms").aimap([ONE, ONE], on_error="return")
    errors = await rest(results)
    assert [type(error) for error in errors] == [daskinfer.DeadlineExceeded] * 2
    probe.open()
    with pytest.raises(ValueError, match="key= names one result; aimap sends many"):
        model.options(key="k").aimap([ONE])


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_annotations_apply_to_every_request(c: Client, s: Any, a: Any) -> None:
    probe = Probe()
    model = await deploy(c, probe, warmup=ONE)
    probe.close()
    with dask.annotate(daskinfer={"timeout": "10ms"}):
        results = model.aimap([ONE], on_error="return")
        (error,) = await rest(results)
    assert isinstance(error, daskinfer.DeadlineExceeded)
    probe.open()


# Inputs without end


@orders
@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_no_more_is_read_than_is_wanted(
    c: Client, s: Any, a: Any, b: Any, ordered: bool
) -> None:
    """The count of what was read and not taken is bounded, also while nobody takes."""
    model = await deploy(c, Probe(), warmup=ONE)
    source = Source()
    async with model.aimap(source, ordered=ordered, max_in_flight=10) as results:
        assert source.read == 0
        for count in range(1, 300):
            await anext(results)
            assert source.read - count <= 10
        await until(lambda: results._flow._window.unanswered == 0)
        assert source.read <= 299 + 10
        assert len(s.tasks) <= 10
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_as_many_are_on_their_way_as_keep_the_workers_busy(
    c: Client, s: Any, a: Any, b: Any
) -> None:
    probe = Probe(is_open=False)
    model = await deploy(c, probe, max_batch_size=4, allowed_batch_sizes=[4])
    source = Source()
    async with model.aimap(source) as results:
        taking = asyncio.ensure_future(first(results, 200))
        # Six batches of four for each of two workers.
        await until(lambda: source.read == 48)
        await queued(s, 48 - 4 * len(s.plugins["daskinfer"].dispatcher.running.batches))
        probe.open()
        assert values(await taking) == [2.0 * i for i in range(200)]
        window = results._flow._window
        assert window.bounds == (48, 96)
        # Nobody takes any more.
        await until(lambda: not window.unanswered)
        assert source.read <= 200 + 96
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_requests_of_many_rows_are_fewer(c: Client, s: Any, a: Any) -> None:
    probe = Probe(is_open=False)
    model = await deploy(c, probe, allowed_batch_sizes=[4])
    read = []

    def inputs() -> Iterator[np.ndarray]:
        for number in itertools.count():
            read.append(number)
            yield np.full((8, 1), float(number))

    async with model.aimap(inputs()) as results:
        taking = asyncio.ensure_future(first(results, 10))
        await probe.entered()
        await until(lambda: results._flow._reader_waits)
        assert len(read) == 3
        probe.open()
        assert values(await taking) == [2.0 * i for i in range(10)]


@gen_cluster(
    client=True, nthreads=ONE_WORKER, config={"daskinfer.imap.memory": "1 MiB"}
)
async def test_large_inputs_are_fewer(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, lambda x: x.sum(1), name="m", warmup=ONE)
    read = 0

    def inputs() -> Iterator[np.ndarray]:
        nonlocal read
        for number in itertools.count():
            read += 1
            yield np.full((1, 2**15), float(number))

    async with model.aimap(inputs()) as results:
        for count in range(1, 100):
            await anext(results)
            # Of a quarter of a MiB each.
            assert read - count <= 4


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_bounds_follow_the_learned_batch_size(
    c: Client, s: Any, a: Any, b: Any
) -> None:
    model = await deploy(c, Probe())
    async with model.aimap(Source()) as results:
        window = results._flow._window
        await anext(results)
        bounds = {window.bounds}
        # A batch costs the same whatever its size, which is found out step by step.
        while max(bounds).in_flight < 200:
            await anext(results)
            bounds.add(window.bounds)
        assert len(bounds) > 1
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_was_answered_is_let_go_of_when_it_is_quiet(
    c: Client, s: Any, a: Any
) -> None:
    model = await deploy(c, Probe())
    goes_on = threading.Event()

    def inputs() -> Iterator[np.ndarray]:
        yield from map(row, range(50))
        goes_on.wait(PATIENCE)

    async with model.aimap(inputs()) as results:
        await first(results, 50)
        await nothing_is_left(s, a)
        goes_on.set()


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_few_that_were_answered_are_held(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe(), allowed_batch_sizes=[4])
    with mock.patch("daskinfer.imap.pace._HELD", 30):
        async with model.aimap(Source()) as results:
            await first(results, 200)
            # Those on their way, those that were not taken, and those held.
            assert len(s.tasks) <= 24 + 48 + 30
            assert len(results._flow._requests._held) <= 30
    await nothing_is_left(s, a)


# Side by side


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_two_at_a_time(c: Client, s: Any, a: Any, b: Any) -> None:
    double = await deploy(c, Probe(), name="double")
    triple = await deploy(c, lambda x: x * 3, name="triple")
    both = await asyncio.gather(
        rest(double.aimap(map(row, range(300)))),
        rest(double.aimap(map(row, range(300, 600)))),
        rest(triple.aimap(map(row, range(300)))),
    )
    for found, factor, start in zip(both, (2, 2, 3), (0, 300, 0), strict=True):
        assert values(found) == [factor * float(i) for i in range(start, start + 300)]
    del both, found
    await nothing_is_left(s, a, b)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_one_after_the_other(c: Client, s: Any, a: Any) -> None:
    """The results of one are the inputs of another, without end."""
    double = await deploy(c, Probe(), name="double")
    triple = await deploy(c, lambda x: x * 3, name="triple")

    def iterate() -> list[Any]:
        with triple.imap(double.imap(Source())) as results:
            return list(itertools.islice(results, 100))

    assert values(await asyncio.to_thread(iterate)) == [6.0 * i for i in range(100)]
    gc.collect()
    await until(lambda: not reading_threads())
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_threads_share_the_results(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())

    def iterate() -> list[float]:
        results = model.imap(map(row, range(400)))
        shares: list[list[Any]] = [[], [], []]
        threads = [
            threading.Thread(target=lambda s=share: s.extend(results))
            for share in shares
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return values(list(itertools.chain.from_iterable(shares)))

    assert sorted(await asyncio.to_thread(iterate)) == [2.0 * i for i in range(400)]


@gen_cluster(client=True, nthreads=TWO_WORKERS)
async def test_inside_a_task(c: Client, s: Any, a: Any, b: Any) -> None:
    model = await deploy(c, Probe())

    def task(model: Any) -> float:
        return float(sum(result[0, 0] for result in model.imap(map(row, range(50)))))

    assert await c.submit(task, model) == 2.0 * sum(range(50))


# What can be told of them


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_length(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    known = model.aimap([ONE] * 5)
    assert (len(known), operator.length_hint(known)) == (5, 5)
    await first(known, 2)
    assert (len(known), operator.length_hint(known)) == (3, 3)
    hinted = model.aimap(iter([ONE] * 5))
    assert operator.length_hint(hinted) == 5
    with pytest.raises(TypeError, match="not known"):
        len(hinted)
    unknown = model.aimap(ONE for _ in range(5))
    assert operator.length_hint(unknown, -1) == -1
    with pytest.raises(TypeError, match="not known"):
        len(unknown)
    assert known and hinted and unknown
    assert repr(unknown) == "<AsyncImap of <Model 'm'> not started>"
    assert repr(known) == "<AsyncImap of <Model 'm'> running>"
    await rest(known)
    assert repr(known) == "<AsyncImap of <Model 'm'> ended>"
    assert len(known) == 0 and known


def test_tqdm_knows_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from tqdm import tqdm

    # Its own watch over bars outlives them.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)

    @gen_cluster(client=True, nthreads=ONE_WORKER)
    async def run(c: Client, s: Any, a: Any) -> None:
        model = await deploy(c, Probe())

        def iterate(inputs: Any) -> tuple[int | None, int]:
            with tqdm(model.imap(inputs), file=io.StringIO()) as bar:
                return bar.total, len(list(bar))

        assert await asyncio.to_thread(iterate, [ONE] * 5) == (5, 5)
        assert await asyncio.to_thread(iterate, iter([ONE] * 5)) == (None, 5)

    run()


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"max_in_flight": 0}, ValueError, "max_in_flight must be at least 1, got 0"),
        ({"max_in_flight": -1}, ValueError, "max_in_flight must be at least 1, got -1"),
        ({"max_in_flight": 1.5}, TypeError, "max_in_flight must be an integer"),
        ({"max_in_flight": True}, TypeError, "max_in_flight must be an integer"),
        ({"max_in_flight": None}, TypeError, "max_in_flight must be an integer"),
        ({"max_in_flight": "8"}, ValueError, "must be \"auto\" or an integer, not '8'"),
        ({"on_error": "skip"}, ValueError, "on_error must be 'raise' or 'return'"),
        ({"ordered": "yes"}, TypeError, "ordered must be True or False, not 'yes'"),
        ({"iterable": "text"}, TypeError, "not one str; put it into a list"),
        ({"iterable": b"text"}, TypeError, "not one bytes; put it into a list"),
        ({"iterable": 5}, TypeError, "an iterable of inputs, not int"),
        ({"iterable": None}, TypeError, "an iterable of inputs, not NoneType"),
        ({"iterable": np.float64(1)}, TypeError, "iterable"),
    ],
)
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_bad_arguments_are_refused_at_once(
    c: Client, s: Any, a: Any, arguments: Any, error: Any, match: str
) -> None:
    model = await deploy(c, Probe())
    arguments = {"iterable": [ONE], **arguments}
    for way in (model, model.options(priority=1)):
        with pytest.raises(error, match=match):
            way.aimap(**arguments)
        with pytest.raises(error, match=match):
            await asyncio.to_thread(lambda way=way: way.imap(**arguments))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_dask_collections_that_are_no_bags(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    with pytest.raises(TypeError, match="not a dask Array; compute it, or use model"):
        model.aimap(dask.array.ones((4, 1)))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_an_asynchronous_client_cannot_wait(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    with pytest.raises(RuntimeError, match="cannot wait here; use aimap"):
        model.imap([ONE])


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_odd_inputs(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe(), warmup=ONE)
    assert await rest(model.aimap([])) == []
    assert await rest(model.aimap(iter(()), max_in_flight=1)) == []
    assert values(await rest(model.aimap([ONE], max_in_flight=1))) == [2.0]
    found = await rest(model.aimap(map(row, range(20)), max_in_flight=1))
    assert values(found) == [2.0 * i for i in range(20)]
    shapes = [(1, 3), (2, 3), (0, 3), (1, 5), (4, 2, 2)]
    found = await rest(model.aimap([np.ones(shape) for shape in shapes * 10]))
    assert [result.shape for result in found] == shapes * 10
    # As many as a huge limit allows.
    found = await rest(model.aimap(map(row, range(50)), max_in_flight=10**12))
    assert values(found) == [2.0 * i for i in range(50)]
