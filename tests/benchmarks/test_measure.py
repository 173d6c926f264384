from __future__ import annotations

import pytest

from benchmarks import measure


def test_ways_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []

    def way(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    measured = measure.alternate(
        {name: lambda name=name: way(name) for name in "ab"}, rounds=2
    )
    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert measured == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
    assert measure.medians(measured) == {"a": 4.5, "b": 4.5}


def test_waiting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, False, True])
    measure.wait_for(lambda: next(answers))
    assert list(answers) == []

    monkeypatch.setattr(measure, "_SETTLED_WITHIN", 0.0)
    with pytest.raises(TimeoutError, match="not settled"):
        measure.wait_for(lambda: False)


@pytest.mark.process
def test_a_cluster_of_processes_is_measured_and_leaves_nothing() -> None:
    import os

    import psutil

    with measure.cluster(1) as client:
        scheduler = psutil.Process(client.run_on_scheduler(os.getpid))
        workers = [psutil.Process(pid) for pid in client.run(os.getpid).values()]
        processes = [scheduler, *workers]
        assert len({os.getpid(), *(process.pid for process in processes)}) == 3

        before = measure.scheduler_cpu(client)
        with measure.peak_memory(client) as peak:
            future = client.submit(sum, [1, 2])
            assert future.result() == 3
            assert measure.count_tasks(client) == 1
            assert peak() >= scheduler.memory_info().rss / 2
        assert measure.scheduler_cpu(client) > before
        del future
        measure.settle(client)
        assert measure.count_tasks(client) == 0
    assert not any(process.is_running() for process in processes)
