"""Processes that are killed while they write, and processes that share a directory."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.cache.helpers import files_in, same
from tests.cache.writer import fill, open_cache, use, value_of
from tests.forking import fork_server

KILLS = 50

pytestmark = pytest.mark.process


@pytest.fixture
def server() -> ForkServerContext:
    return fork_server()


def start(
    server: ForkServerContext, work: object, directory: Path, number: int
) -> tuple[BaseProcess, Connection]:
    hears, says = server.Pipe(duplex=False)
    child = server.Process(
        target=work,  # type: ignore[arg-type]
        args=(str(directory), number, says),
        daemon=True,
    )
    child.start()
    says.close()
    return child, hears


def rest_of(said: Connection) -> Iterator[int]:
    """What a process that was killed had said before."""
    with said:
        try:
            while True:
                yield said.recv()
        except (EOFError, OSError):  # the end, or in the middle of a message
            return


def test_killed_at_any_moment_it_starts_clean_and_serves_what_was_complete(
    server: ForkServerContext, tmp_path: Path
) -> None:
    drawn = random.Random(0)
    first = 0
    for _ in range(KILLS):
        writer, said = start(server, fill, tmp_path, first)
        complete = [said.recv()]  # it is at work
        time.sleep(drawn.uniform(0, 0.02))
        writer.kill()
        complete += rest_of(said)
        writer.join()

        cache = open_cache(str(tmp_path))
        for number in complete:
            assert same(cache.get(str(number)), value_of(number))
        # Saying so may have been cut off, and so may writing: there or not, no part.
        for number in range(complete[-1] + 1, complete[-1] + 3):
            found = cache.get(str(number))
            assert found is None or same(found, value_of(number))
        assert all(path.suffix == ".v1" for path in files_in(tmp_path))
        entries = cache.stats()["disk"].entries
        assert entries == len(files_in(tmp_path)) >= len(complete)
        first = complete[-1] + 3


def test_two_processes_on_one_directory_do_not_corrupt_each_other(
    server: ForkServerContext, tmp_path: Path
) -> None:
    children = [start(server, use, tmp_path, seed) for seed in range(2)]
    for child, said in children:
        with said:
            assert said.recv() > 100
        child.join()
        assert child.exitcode == 0
    cache = open_cache(str(tmp_path))
    found = [cache.get(str(number)) for number in range(30)]
    assert all(v is None or same(v, value_of(n)) for n, v in enumerate(found))
    assert any(v is not None for v in found)
    assert all(path.suffix == ".v1" for path in files_in(tmp_path))
