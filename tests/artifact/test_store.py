"""Weights in files: whole or not there, shared, within a budget."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from daskinfer.artifact.partial import FilePartial, MemoryPartial
from daskinfer.artifact.store import Held, Store
from tests.artifact.store_writer import CHUNK, chunks_of, hold, weights_of, write
from tests.forking import fork_server

KILLS = 50
SIZE = chunks_of(0).size


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", 2**30)


def begin(store: Store, number: int, *, alone: bool = False) -> FilePartial:
    partial = store.begin(chunks_of(number), alone=alone)
    assert partial is not None
    return partial


def put(store: Store, number: int) -> Held:
    partial = begin(store, number)
    fill(partial, number)
    return store.finish(partial)


def fill(partial: FilePartial | MemoryPartial, number: int, count: int = 99) -> None:
    weights = weights_of(number)
    for index in range(min(count, len(partial.chunks))):
        assert partial.write(index, weights[slice(*partial.chunks.span(index))])


def get(store: Store, number: int) -> bytes | None:
    held = store.open(chunks_of(number))
    return None if held is None else bytes(held.memory)


def names(store: Store) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def file_of(store: Store, number: int) -> Path:
    return store.directory / f"{chunks_of(number).key}.v1"


# Whole or not there


def test_what_was_written_is_there(store: Store) -> None:
    assert get(store, 0) is None
    assert bytes(put(store, 0).memory) == weights_of(0)
    assert get(store, 0) == weights_of(0)
    assert get(Store(store.directory, 2**30), 0) == weights_of(0)
    assert names(store) == [file_of(store, 0).name]
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(store, 0).stat().st_mode) == 0o600


def test_writing_to_the_memory_does_not_change_the_file(store: Store) -> None:
    held = put(store, 0)
    held.memory[:5] = b"other"
    assert held.is_unchanged()
    assert get(store, 0) == weights_of(0)


@pytest.mark.parametrize("opened_before", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.truncate(SIZE // 2),
        lambda file: file.truncate(0),
        lambda file: file.truncate(SIZE + 1),
        lambda file: (file.seek(SIZE // 2), file.write(b"?")),
        lambda file: (file.seek(SIZE - 1), file.write(b"\0\0")),
    ],
    ids=["torn", "empty", "longer", "changed", "both"],
)
def test_damaged_files_are_missing_and_removed(
    store: Store, damage: Any, opened_before: bool
) -> None:
    put(store, 0)
    if not opened_before:
        store = Store(store.directory, 2**30)
    with open(file_of(store, 0), "r+b") as file:
        damage(file)
    assert get(store, 0) is None
    assert names(store) == []
    put(store, 0)
    assert get(store, 0) == weights_of(0)


def test_a_bit_that_flips_unseen_is_found_by_the_next_process(store: Store) -> None:
    put(store, 0)
    path = file_of(store, 0)
    status = path.stat()
    with open(path, "r+b") as file:
        file.write(b"?")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert get(Store(store.directory, 2**30), 0) is None
    assert names(store) == []


def test_a_held_file_tells_whether_it_was_changed(store: Store) -> None:
    held = put(store, 0)
    assert held.is_unchanged()
    path = file_of(store, 0)
    path.rename(path.with_name("elsewhere"))
    assert held.is_unchanged()  # it is removed, not changed
    put(store, 0)
    assert held.is_unchanged()  # another file has its name
    again = store.open(chunks_of(0))
    assert again is not None
    with open(path, "r+b") as file:
        file.write(b"?")
    assert not again.is_unchanged()


def test_damaged_chunks_are_not_taken(store: Store) -> None:
    for partial in (begin(store, 0), MemoryPartial(chunks_of(0))):
        assert not partial.write(1, weights_of(0)[:CHUNK])
        assert not partial.write(1, weights_of(0)[CHUNK : 2 * CHUNK - 1])
        assert partial.whole == set()
        partial.abandon()


def test_what_the_disk_garbled_is_not_published(store: Store) -> None:
    partial = begin(store, 0)
    fill(partial, 0)
    os.pwrite(partial.descriptor, b"?", 5)
    with pytest.raises(OSError, match="does not hold what was written"):
        store.finish(partial)
    partial.abandon()
    assert names(store) == []


def test_files_of_another_format_are_left_alone(store: Store) -> None:
    older = store.directory / f"{chunks_of(0).key}.v0"
    older.write_bytes(weights_of(0))
    (store.directory / "notes.txt").touch()
    assert get(store, 0) is None
    put(store, 0)
    assert older.exists()
    assert get(store, 0) == weights_of(0)


def test_links_and_paths_lead_nowhere(store: Store, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(weights_of(0))
    file_of(store, 0).symlink_to(secret)
    with pytest.raises(OSError) as caught:
        get(store, 0)
    assert caught.value.errno == errno.ELOOP
    assert store.read("../../secret", 0, 10) is None
    assert store.read("0" * 63 + "/", 0, 10) is None


def test_parts_are_passed_on(store: Store) -> None:
    key = chunks_of(0).key
    assert store.read(key, 0, 10) is None
    put(store, 0)
    assert store.read(key, 10, 20) == weights_of(0)[10:30]


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        Store(tmp_path / "file", 2**30)
    with pytest.raises(OSError):
        Store(tmp_path / "file" / "store", 2**30)


# Several writers


def test_one_writes_and_the_other_is_told(store: Store) -> None:
    other = Store(store.directory, 2**30)
    partial = begin(store, 0)
    assert other.begin(chunks_of(0)) is None
    put(other, 1)  # other weights are another matter
    before = other.last_written(chunks_of(0))
    assert before is not None
    fill(partial, 0, count=5)
    after = other.last_written(chunks_of(0))
    assert after is not None and after >= before
    partial.abandon()
    # The other one goes on where this one has stopped.
    partial = begin(other, 0)
    assert partial.whole == set(range(5))
    fill(partial, 0)
    other.finish(partial)
    assert get(store, 0) == weights_of(0)
    assert store.last_written(chunks_of(0)) is None


@pytest.mark.parametrize("alone", [False, True])
def test_what_was_completed_since_it_was_looked_for_is_not_begun_again(
    store: Store, alone: bool
) -> None:
    assert get(store, 0) is None
    put(Store(store.directory, 2**30), 0)
    before = names(store)
    assert store.begin(chunks_of(0), alone=alone) is None
    assert names(store) == before
    assert get(store, 0) == bytes(weights_of(0))


def test_one_that_does_not_wait_writes_its_own(store: Store) -> None:
    other = Store(store.directory, 2**30)
    partial = begin(store, 0)
    alone = begin(other, 0, alone=True)
    fill(alone, 0)
    held = other.finish(alone)
    fill(partial, 0)
    again = store.finish(partial)
    assert held.memory == again.memory == weights_of(0)
    assert held.is_unchanged()
    assert names(store) == [file_of(store, 0).name]


@pytest.mark.parametrize("ends", ["finished", "abandoned"])
def test_others_wait_until_one_has_written_or_gives_up(store: Store, ends: str) -> None:
    store.wait(chunks_of(0))  # at once: nobody has begun
    partial = begin(store, 0)
    others = [Store(store.directory, 2**30) for _ in range(3)]
    with ThreadPoolExecutor(len(others)) as threads:
        waits = [threads.submit(other.wait, chunks_of(0)) for other in others]
        waiting = wait(waits, timeout=0.1).not_done
        fill(partial, 0)
        if ends == "finished":
            held = store.finish(partial)
        else:
            partial.abandon()
        assert waiting == set(waits)
        assert not wait(waits, timeout=30).not_done
        assert all(waited.result() is None for waited in waits)
    if ends == "finished":
        # That it is in use does not keep them.
        assert get(others[0], 0) == bytes(held.memory)
    else:
        assert begin(others[0], 0).whole == set(range(16))


def test_leftovers_are_looked_through(store: Store) -> None:
    path = store.directory / f"{chunks_of(0).key}.v1.part"
    path.write_bytes(bytes(weights_of(0)[: CHUNK + 7]) + b"?" * SIZE)
    partial = begin(store, 0)
    assert partial.whole == {0}
    fill(partial, 0)
    assert bytes(store.finish(partial).memory) == weights_of(0)


def test_many_threads_get_the_same(store: Store) -> None:
    found: list[bytes | None] = []

    def work() -> None:
        mine = Store(store.directory, 2**30)
        while (held := mine.open(chunks_of(0))) is None:
            partial = mine.begin(chunks_of(0))
            if partial is None:
                time.sleep(0.001)
                continue
            fill(partial, 0)
            held = mine.finish(partial)
            break
        found.append(bytes(held.memory))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [bytes(weights_of(0))] * 8
    assert names(store) == [file_of(store, 0).name]


# The budget


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    store = Store(tmp_path, 3 * SIZE)
    for number in range(3):
        put(store, number)
        os.utime(file_of(store, number), ns=(number, number))
    assert get(store, 0) is not None  # used now
    put(store, 3)
    kept = [n for n in range(4) if file_of(store, n).exists()]
    assert kept == [0, 2, 3]


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    store = Store(tmp_path, SIZE)
    held = put(store, 0)
    partial = begin(store, 1)
    store.trim()
    assert get(store, 0) is not None
    fill(partial, 1)
    store.finish(partial)
    put(store, 2)
    assert not file_of(store, 1).exists()
    assert held.memory == weights_of(0)
    del held
    put(store, 3)
    assert [n for n in range(4) if file_of(store, n).exists()] == [3]


def test_leftovers_count_and_go(tmp_path: Path) -> None:
    store = Store(tmp_path, 2 * SIZE)
    begin(store, 0).abandon()
    for leftover in (tmp_path / f"{'a' * 64}.v0", tmp_path / f"{'b' * 64}.v7"):
        leftover.write_bytes(b"x" * SIZE)
        os.utime(leftover, (1, 1))
    put(store, 1)
    assert names(store) == sorted(
        [f"{chunks_of(0).key}.v1.part", file_of(store, 1).name]
    )
    put(store, 2)
    assert names(store) == sorted(file_of(store, n).name for n in (1, 2))


def test_a_full_disk_takes_what_is_not_in_use(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 0)
    held = put(store, 1)
    allocate = os.posix_fallocate

    def limited(descriptor: int, start: int, nbytes: int) -> None:
        if file_of(store, 0).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    put(store, 2)
    assert held.memory == weights_of(1)
    assert sorted(names(store)) == sorted(file_of(store, n).name for n in (1, 2))
    monkeypatch.setattr(os, "posix_fallocate", _fills_the_disk)
    with pytest.raises(OSError, match="No space left"):
        store.begin(chunks_of(3))
    assert (store.directory / f"{chunks_of(3).key}.v1.part").stat().st_blocks == 0
    assert held.memory == weights_of(1)


def _fills_the_disk(descriptor: int, start: int, nbytes: int) -> None:
    os.pwrite(descriptor, bytes(nbytes // 2), start)
    raise OSError(errno.ENOSPC, "No space left on device")


# Other processes


@pytest.fixture
def server() -> ForkServerContext:
    return fork_server()


def start(
    server: ForkServerContext, work: Any, store: Store, number: int
) -> tuple[BaseProcess, Connection]:
    hears, says = server.Pipe()
    child = server.Process(
        target=work, args=(str(store.directory), number, says), daemon=True
    )
    child.start()
    says.close()
    return child, hears


@pytest.mark.process
def test_killed_at_any_moment_the_next_one_goes_on(
    server: ForkServerContext, store: Store
) -> None:
    drawn = random.Random(0)
    number, written = 0, set[int]()
    finished = resumed = 0
    for _ in range(KILLS):
        child, said = start(server, write, store, number)
        assert said.recv()[0] == "begun"
        time.sleep(drawn.uniform(0, 0.03))
        child.kill()
        child.join()
        with said:
            try:
                while True:
                    what, number, index = said.recv()
                    if what == "begun":
                        # It has all that was said to be written before.
                        assert written <= set(index)
                        written = set(index)
                    elif what == "written":
                        written.add(index)
                    else:
                        assert get(store, number) == weights_of(number)
                        number, written = number + 1, set()
                        finished += 1
            except (EOFError, OSError):
                pass
        # Saying so may have been cut off.
        if get(store, number) is not None:
            number, written = number + 1, set()
        partial = begin(store, number)
        assert written <= partial.whole
        resumed += bool(partial.whole)
        written = partial.whole
        partial.abandon()
    assert finished > 5 and resumed > 5
    for n in range(number):
        assert get(store, n) == weights_of(n)
    fresh = [f for f in names(store) if f.endswith(".v1")]
    assert len(fresh) == number


@pytest.mark.process
def test_what_another_process_uses_stays_until_it_is_killed(
    server: ForkServerContext, tmp_path: Path
) -> None:
    store = Store(tmp_path, 0)
    put(Store(tmp_path, 2**30), 0)
    child, said = start(server, hold, store, 0)
    assert said.recv() == "held"
    store.trim()
    assert file_of(store, 0).exists()
    child.kill()
    child.join()
    store.trim()
    assert not file_of(store, 0).exists()
    said.close()
