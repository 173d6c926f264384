"""Who fetches what from whom, in a simulated network."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_plugins.swarm import ORIGIN, Swarm, Transfer


class Network:
    """Sources that send one chunk per unit of time, in the order of asking.

    A transfer that a source cannot complete, because it is gone or sends damage, fails
    when it would have ended.
    """

    def __init__(self, chunks: int, workers: int, seed: int = 0) -> None:
        self.swarm = Swarm(chunks)
        self.chunks = chunks
        self.now = 0.0
        self.have: dict[str, set[int]] = {f"w{i}": set() for i in range(workers)}
        self.liars: set[str] = set()
        self.done_at: dict[str, float] = {}
        self.served: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._free_at: Counter[str] = Counter()
        self._events: list[tuple[float, int, Transfer]] = []
        self._numbers = count()
        self._active: Counter[str] = Counter()
        for worker in self.have:
            self.swarm.wants(worker)

    def leave(self, worker: str) -> None:
        if self.have.pop(worker, None) is not None:
            self._active.subtract(
                t.source for _, _, t in self._events if t.worker == worker
            )
        self.swarm.left(worker)
        self._decide()

    def run(self, leaving: dict[int, str] | None = None, lost: float = 0.0) -> None:
        """Until nothing is on its way; workers leave after so many transfers."""
        self._decide()
        ended = 0
        while self._events:
            self.now, _, transfer = heapq.heappop(self._events)
            if transfer.worker in self.have:
                self._active[transfer.source] -= 1
                self._end(transfer, lost)
            ended += 1
            if leaving and ended in leaving:
                self.leave(leaving.pop(ended))
            self._decide()
            assert ended < 100_000

    def _end(self, transfer: Transfer, lost: float) -> None:
        worker, chunk, source = transfer
        gone = source != ORIGIN and chunk not in self.have.get(source, set())
        if gone or source in self.liars or self._random.random() < lost:
            self.swarm.failed(worker, chunk, source)
            return
        assert chunk not in self.have[worker]
        self.have[worker].add(chunk)
        self.swarm.got(worker, chunk)
        self.served[source] += 1
        if len(self.have[worker]) == self.chunks:
            self.done_at[worker] = self.now

    def _decide(self) -> None:
        for transfer in self.swarm.decide():
            source = transfer.source
            assert source != transfer.worker
            self._active[source] += 1
            assert self._active[source] <= 2
            begins = max(self._free_at[source], self.now)
            self._free_at[source] = begins + 1
            heapq.heappush(self._events, (begins + 1, next(self._numbers), transfer))

    def is_complete(self) -> bool:
        return all(len(have) == self.chunks for have in self.have.values())


@settings(deadline=None)
@given(chunks=st.integers(1, 60), workers=st.integers(1, 12))
def test_everybody_gets_everything_and_the_origin_sends_each_chunk_twice_at_most(
    chunks: int, workers: int
) -> None:
    network = Network(chunks, workers)
    network.run()
    assert network.is_complete()
    assert max(network.swarm.sent) <= 2
    assert sum(network.served.values()) == chunks * workers


@settings(deadline=None)
@given(chunks=st.integers(40, 130), workers=st.integers(2, 16))
def test_many_workers_take_little_longer_than_one(chunks: int, workers: int) -> None:
    one = Network(chunks, 1)
    one.run()
    assert one.now == chunks
    many = Network(chunks, workers)
    many.run()
    assert many.now <= 1.5 * one.now


@settings(deadline=None)
@given(data=st.data(), chunks=st.integers(1, 40), workers=st.integers(1, 8))
def test_it_ends_whoever_leaves_lies_or_loses(
    data: st.DataObject, chunks: int, workers: int
) -> None:
    network = Network(chunks, workers, data.draw(st.integers(0, 1000)))
    names = list(network.have)
    network.liars = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    moments = st.dictionaries(
        st.integers(1, 2 * chunks), st.sampled_from(names), max_size=workers
    )
    network.run(data.draw(moments), lost=data.draw(st.sampled_from([0.0, 0.1, 0.4])))
    assert network.is_complete()


def test_work_is_spread_over_all_who_have_something() -> None:
    network = Network(100, 5)
    network.run()
    peers = [network.served[worker] for worker in network.have]
    assert min(peers) > 0.3 * max(peers)
    assert network.served[ORIGIN] < 0.5 * sum(peers)


def test_what_some_worker_has_is_not_asked_of_the_origin() -> None:
    network = Network(20, 3)
    network.have["w0"] = set(range(20))
    network.swarm.wants("w0", (1 << 20) - 1)
    network.swarm._busy[ORIGIN] = 2  # it has no time
    network.run()
    assert network.is_complete()
    assert sum(network.swarm.sent) == 0


def test_a_liar_is_asked_once_by_each() -> None:
    network = Network(20, 3)
    network.liars = {"w0"}
    network.have["w0"] = set(range(20))
    network.swarm.wants("w0", (1 << 20) - 1)
    network.run()
    assert network.is_complete()
    assert network.served["w0"] == 0


def test_nobody_counts_on_a_worker_that_says_nothing() -> None:
    swarm = Swarm(1)
    swarm.wants("a")
    swarm.wants("b")
    assert swarm.decide() == [("a", 0, ORIGIN), ("b", 0, ORIGIN)]
    swarm.wants("c")
    assert swarm.decide() == []  # it will come from one of them
    swarm.stalled("a")
    swarm.stalled("b")
    assert swarm.decide() == [("c", 0, ORIGIN)]
    swarm.got("a", 0)  # it was slow only
    swarm.wants("d")
    assert swarm.decide() == [("d", 0, "a")]


def test_a_chunk_that_another_source_did_not_give_is_asked_for_again() -> None:
    """A worker that is still busy with the first does not ask the second."""
    swarm = Swarm(1)
    for peer in ("a", "b"):
        swarm.wants(peer, 1)
    swarm.wants("w")
    (first,) = swarm.decide()
    swarm.wants("w")  # it begins anew, and is told of another source
    (second,) = swarm.decide()
    assert {first.source, second.source} == {"a", "b"}
    swarm.failed("w", 0, first.source)
    assert [t.source for t in swarm.decide()] == [second.source]
