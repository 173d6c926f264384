"""What a worker says of its streams twice, or what is lost on the way."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from distributed.utils_test import gen_cluster

from daskinfer import InferenceError
from daskinfer.protocol import CHUNKS, ENDED
from tests.cluster.helpers import until
from tests.cluster.scheduling_helpers import deploy, engine, nothing_is_left
from tests.cluster.stream_helpers import Feed, read

ONE_WORKER = [("127.0.0.1", 1)]


def twice(scheduler: Any, *ops: str) -> Any:
    """Have the scheduler take all such messages, and each once more."""

    def repeated(handler: Any) -> Any:
        def handle(**message: Any) -> None:
            handler(**message)
            handler(**message)

        return mock.Mock(side_effect=handle)

    handlers = scheduler.stream_handlers
    return mock.patch.dict(handlers, {op: repeated(handlers[op]) for op in ops})


@pytest.mark.parametrize("length", [0, 1, 30])
@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_chunks_and_ends_that_come_twice_count_once(c, s, a, length):
    feed = Feed(length=length)
    model = await deploy(c, feed)
    line = engine(s).dispatcher.lines["m", "1"]
    tasks = engine(s).dispatcher.streams._tasks
    with (
        twice(s, CHUNKS, ENDED),
        mock.patch.object(line.pace, "ended", wraps=line.pace.ended) as learned,
        mock.patch.object(tasks, "tell", wraps=tasks.tell) as told,
    ):
        stream = model.stream(5)
        found = []
        for _ in range(length):
            feed.let()
            found.append(await anext(stream))
        feed.let()
        assert await read(stream) == []
        assert found == list(range(5, 5 + length))
        assert await stream.future == found
        assert s.stream_handlers[ENDED].call_count == 1
    # Nor is the reader told twice.
    messages = [call.args[1] for call in told.call_args_list]
    counts = [sum(m["counts"]) for m in messages if m["op"] == CHUNKS]
    assert sum(counts) == length
    assert [call.args for call in learned.call_args_list] == [(length,)]
    measures = line.figures.measures.streams
    assert measures.chunks == length
    assert measures.outcomes == {"ended": 1}
    assert (await model.status()).successes == 1
    del stream
    await nothing_is_left(s, a)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_chunks_that_are_lost_on_the_way_are_said_to_be(c, s, a):
    feed = Feed()
    model = await deploy(c, feed)
    streams = engine(s).dispatcher.streams
    stream = model.stream()
    feed.let()
    assert await anext(stream) == 0
    with mock.patch.object(streams, "chunks") as lost:
        feed.let()
        await until(lambda: lost.call_count == 1)
    feed.let()
    with pytest.raises(InferenceError, match="chunks 1 to 1 of a stream are lost"):
        await anext(stream)
    stream.close()
    feed.open()
    del stream
    await nothing_is_left(s, a)
