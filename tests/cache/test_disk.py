"""The tier of files: restarts, damage, clocks, full and forbidden directories."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskinfer.cache import CacheKey, TieredCache, TierPolicy, files
from daskinfer.cache.build import FOLDER
from daskinfer.cache.files import Files
from tests.cache.helpers import LARGE, FakeClock, cache_of, files_in, same

VALUE = np.random.default_rng(0).random(500)
DAY = TierPolicy(LARGE, "24h")
LOGGER = "distributed.inference.cache"


def on_disk(directory: Path, **options: Any) -> TieredCache:
    options.setdefault("tiers", {"disk": DAY})
    return cache_of(directory=directory, **options)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


# Restarts


def test_a_restart_finds_everything_again(tmp_path: Path) -> None:
    with on_disk(tmp_path) as cache:
        for key in range(20):
            cache.put(str(key), VALUE + key)
        before = cache.stats()["disk"]
    again = on_disk(tmp_path)
    assert again.stats()["disk"].entries == 0  # nothing was read for the start
    for key in range(20):
        assert same(again.get(str(key)), VALUE + key)
    after = again.stats()["disk"]
    assert (after.entries, after.nbytes) == (before.entries, before.nbytes)
    assert after.hits == 20


def test_closing_writes_what_memory_holds(tmp_path: Path) -> None:
    names = ("host", "packed", "disk")
    with cache_of(*names, directory=tmp_path) as cache:
        for name in names:
            cache.put(name, VALUE, tier=name)
    again = cache_of(*names, directory=tmp_path)
    for name in names:
        assert same(again.get(name), VALUE)


def test_flushing_leaves_entries_where_they_are(tmp_path: Path) -> None:
    cache = cache_of("host", "disk", directory=tmp_path)
    cache.put("key", VALUE)
    cache.flush()
    cache.flush()
    assert cache.stats()["host"].entries == 1
    assert cache.stats()["disk"].entries == 1
    assert same(on_disk(tmp_path).get("key"), VALUE)


def test_a_restart_knows_what_was_not_used_for_longest(
    tmp_path: Path, clock: FakeClock
) -> None:
    keys = [str(number) for number in range(12)]
    with on_disk(tmp_path, clock=clock) as cache:
        for key in keys:
            cache.put(key, VALUE)
        for key in reversed(keys):
            clock.advance(10)
            assert same(cache.get(key), VALUE)
        size = cache.stats()["disk"].nbytes // 12
    again = on_disk(tmp_path, tiers={"disk": TierPolicy(7 * size, "24h")}, clock=clock)
    again.put("new", VALUE)
    assert [key for key in keys if again.get(key) is not None] == keys[:6]


def test_a_smaller_budget_after_a_restart_is_kept(tmp_path: Path) -> None:
    with on_disk(tmp_path) as cache:
        for key in range(10):
            cache.put(str(key), VALUE)
        size = cache.stats()["disk"].nbytes // 10
    again = on_disk(tmp_path, tiers={"disk": TierPolicy(4 * size, "24h")})
    again.sweep()
    assert again.stats()["disk"].entries == 4
    assert len(files_in(tmp_path)) == 4


# Files


def test_files_are_private_and_named_by_hashes_only(tmp_path: Path) -> None:
    cache = on_disk(tmp_path / "a" / "b")
    cache.put("../../secret name", VALUE)
    folder = tmp_path / "a" / "b" / FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()
    assert file.name == CacheKey.of("../../secret name").digest.hex() + ".v1"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert b"pickle" not in file.read_bytes()


def test_a_directory_that_was_open_to_others_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    mode = stat.S_IMODE(tmp_path.stat().st_mode)
    on_disk(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(tmp_path.stat().st_mode) == mode  # theirs, not ours


def small_file(directory: Path) -> tuple[Path, bytes]:
    cache = on_disk(directory)
    cache.put("key", ("text", 1.5, np.arange(3, dtype="i2")))
    (file,) = files_in(directory)
    return file, file.read_bytes()


def damaged(whole: bytes) -> Iterator[bytes]:
    for length in range(len(whole)):
        yield whole[:length]
    for place in range(len(whole)):
        for flip in (0x01, 0x80, 0xFF):
            yield whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :]
    yield whole + b"\0"
    yield b"\0" * len(whole)
    yield whole[::-1]


def test_every_damage_is_a_miss_and_its_file_is_removed(tmp_path: Path) -> None:
    file, whole = small_file(tmp_path)
    known = on_disk(tmp_path)
    for content in damaged(whole):
        for cache in (known, on_disk(tmp_path)):
            file.write_bytes(content)
            assert cache.get("key", default="missing") == "missing"
            assert not file.exists()
            assert cache.stats()["disk"].entries == 0
    file.write_bytes(whole)
    assert same(known.get("key"), ("text", 1.5, np.arange(3, dtype="i2")))


def test_what_is_no_file_is_a_miss(tmp_path: Path) -> None:
    file, whole = small_file(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(whole)
    file.unlink()
    file.symlink_to(elsewhere)
    assert on_disk(tmp_path).get("key") is None
    file.unlink()
    file.mkdir()
    opened = len(os.listdir("/proc/self/fd"))
    cache = on_disk(tmp_path)
    for _ in range(10):
        assert cache.get("key") is None
    assert len(os.listdir("/proc/self/fd")) <= opened + 1


def test_files_of_others_stay(tmp_path: Path, clock: FakeClock) -> None:
    on_disk(tmp_path)
    folder = tmp_path / FOLDER
    for name in ("README", ".hidden", "x" * 64 + ".v1", "00.v1", "0" * 32 + ".tmp"):
        (folder / name).write_bytes(b"theirs")
        os.utime(folder / name, (0, 0))
    cache = on_disk(tmp_path, clock=clock)
    cache.sweep()
    cache.clear()
    assert len(files_in(tmp_path)) == 5
    assert cache.stats()["disk"].entries == 0


def test_another_formats_files_are_left_alone_until_they_are_old(
    tmp_path: Path, clock: FakeClock
) -> None:
    cache = on_disk(tmp_path, clock=clock)
    cache.put("key", VALUE)
    (file,) = files_in(tmp_path)
    other = file.with_suffix(".v0")
    file.rename(other)
    again = on_disk(tmp_path, clock=clock)
    assert again.get("key") is None
    assert again.put("key", 1) == "disk"
    assert other.exists()
    assert again.stats()["disk"].entries == 1
    clock.advance(86_400)
    on_disk(tmp_path, clock=clock).sweep()
    assert files_in(tmp_path) == []


def test_leftovers_of_dead_writers_are_removed_and_others_are_not(
    tmp_path: Path,
) -> None:
    on_disk(tmp_path)
    folder = tmp_path / FOLDER
    dead = folder / f"{'0' * 64}.v1.{'a' * 16}.tmp"
    alive = folder / f"{'0' * 64}.v1.{'b' * 16}.tmp"
    for path in (dead, alive):
        path.write_bytes(b"unfinished")
    with alive.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        on_disk(tmp_path).sweep()
        assert not dead.exists()
        assert alive.exists()
    on_disk(tmp_path).sweep()
    assert not alive.exists()


def test_without_locks_leftovers_are_told_by_their_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    cache = on_disk(tmp_path)
    assert cache.put("key", VALUE) == "disk"
    folder = tmp_path / FOLDER
    old = folder / f"{'0' * 64}.v1.{'a' * 16}.tmp"
    new = folder / f"{'0' * 64}.v1.{'b' * 16}.tmp"
    for path in (old, new):
        path.write_bytes(b"unfinished")
    os.utime(old, (0, 0))
    on_disk(tmp_path).sweep()
    assert not old.exists()
    assert new.exists()


# Age


def test_age_goes_on_over_a_restart(tmp_path: Path, clock: FakeClock) -> None:
    with on_disk(tmp_path, clock=clock) as cache:
        cache.put("key", VALUE)
    clock.advance(86_399)
    assert same(on_disk(tmp_path, clock=clock).get("key"), VALUE)
    clock.advance(1)
    again = on_disk(tmp_path, clock=clock)
    assert again.get("key") is None
    assert files_in(tmp_path) == []


def test_time_in_memory_counts(tmp_path: Path, clock: FakeClock) -> None:
    with cache_of(
        tiers={"host": TierPolicy(LARGE), "disk": DAY}, directory=tmp_path, clock=clock
    ) as cache:
        cache.put("key", VALUE)
        clock.advance(86_000)
    clock.advance(400)
    assert on_disk(tmp_path, clock=clock).get("key") is None


@pytest.mark.parametrize("jump", [-1e9, -86_400, -3600, -5])
def test_a_clock_that_goes_back_resurrects_nothing(
    jump: float, tmp_path: Path, clock: FakeClock
) -> None:
    cache = on_disk(tmp_path, clock=clock)
    cache.put("old", VALUE)
    clock.advance(86_399)
    cache.put("new", VALUE)
    clock.date += jump
    # This process goes by the clock that never goes back.
    assert same(cache.get("new"), VALUE)
    clock.advance(1)
    assert cache.get("old") is None
    assert same(cache.get("new"), VALUE)


@pytest.mark.parametrize("jump", [-1e9, -86_400, -3600, -5])
def test_a_clock_that_went_back_before_a_restart_resurrects_nothing(
    jump: float, tmp_path: Path, clock: FakeClock
) -> None:
    other = on_disk(tmp_path, clock=clock)
    other.sweep()
    with on_disk(tmp_path, clock=clock) as cache:
        cache.put("old", VALUE)
    clock.advance(86_400)
    other.put("new", VALUE)  # and does not know of the old one
    assert len(files_in(tmp_path)) == 2
    clock.date += jump
    assert on_disk(tmp_path, clock=clock).get("old") is None


def test_a_file_from_the_future_is_not_trusted(
    tmp_path: Path, clock: FakeClock
) -> None:
    with on_disk(tmp_path, clock=clock) as cache:
        cache.put("key", VALUE)
    clock.date -= 3600
    again = on_disk(tmp_path, clock=clock)
    again.sweep()
    assert files_in(tmp_path) == []
    assert again.get("key") is None


def test_the_wall_clock_may_go_ahead_within_a_process(
    tmp_path: Path, clock: FakeClock
) -> None:
    cache = on_disk(tmp_path, clock=clock)
    cache.put("key", VALUE)
    clock.date += 1e9
    assert same(cache.get("key"), VALUE)


# Trouble


def test_a_full_disk_degrades_to_memory_with_one_warning(
    tmp_path: Path,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = cache_of(
        "host",
        tiers={"packed": TierPolicy(20_000), "disk": DAY},
        directory=tmp_path,
        clock=clock,
    )
    cache.put("before", VALUE, tier="disk")
    with monkeypatch.context() as full:
        system = os.open

        def on_full_device(path: Any, flags: int, *mode: int) -> int:
            if not str(path).endswith(".tmp"):
                return system(path, flags, *mode)
            os.close(system(path, flags, *mode))
            return system("/dev/full", os.O_WRONLY)

        full.setattr(files.os, "open", on_full_device)
        with caplog.at_level(logging.WARNING, LOGGER):
            assert cache.put("key", VALUE, tier="disk") is None
            for number in range(30):
                assert cache.put(str(number), VALUE, tier="packed") == "packed"
                clock.advance(7)
            cache.flush()
        (warning,) = caplog.records
        assert "No space left on device" in warning.getMessage()
        assert str(tmp_path) in warning.getMessage()
        assert same(cache.get("29"), VALUE)
        assert same(cache.get("before"), VALUE)
        assert cache.get("0") is None
        assert len(files_in(tmp_path)) == 1  # and nothing half done
    clock.advance(60)
    assert cache.put("key", VALUE, tier="disk") == "disk"
    assert len(caplog.records) == 1


def in_a_file(path: Path) -> Path:
    path.write_text("not a directory")
    return path / "below"


def in_the_way(path: Path) -> Path:
    path.mkdir()
    (path / FOLDER).write_text("not a directory")
    return path


def linked(path: Path) -> Path:
    path.mkdir()
    (path / "elsewhere").mkdir()
    (path / FOLDER).symlink_to(path / "elsewhere")
    return path


@pytest.mark.parametrize("place", [in_a_file, in_the_way, linked])
def test_a_directory_that_cannot_be_used_is_said_so_and_the_rest_serves(
    place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = place(tmp_path / "place")
    with caplog.at_level(logging.WARNING, LOGGER):
        cache = cache_of("host", "packed", "disk", directory=directory)
    (warning,) = caplog.records
    assert f"{directory} cannot be used" in warning.getMessage()
    assert "daskinfer.cache.directory" in warning.getMessage()
    assert [tier.name for tier in cache.stats().tiers] == ["host", "packed"]
    cache.put("key", VALUE)
    cache.shrink(0.1)
    assert same(cache.get("key", default=None), VALUE) or not cache.stats().entries
    cache.close()


@pytest.mark.parametrize(
    ("function", "answer", "reason"),
    [
        ("access", lambda *_: False, "is not writable"),
        ("geteuid", lambda: 12345678, "belongs to another user"),
    ],
)
def test_a_forbidden_directory_is_refused(
    function: str,
    answer: Any,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Root may do anything, so that permissions alone show nothing.
    monkeypatch.setattr(files.os, function, answer)
    cache = cache_of("host", "disk", directory=tmp_path)
    assert reason in caplog.text
    assert cache.put("key", VALUE) == "host"
    assert cache.put("key", VALUE, tier="disk") is None


def test_a_file_that_cannot_be_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = on_disk(tmp_path)
    cache.put("key", VALUE)

    def broken(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as medium:
        medium.setattr(Files, "read", broken)
        for _ in range(3):
            assert cache.get("key") is None
    assert len(caplog.records) == 1
    assert "Input/output error" in caplog.text


def test_a_directory_that_is_removed_is_made_again(tmp_path: Path) -> None:
    cache = on_disk(tmp_path)
    cache.put("key", VALUE)
    for file in files_in(tmp_path):
        file.unlink()
    (tmp_path / FOLDER).rmdir()
    assert cache.get("key") is None
    assert cache.stats()["disk"].entries == 0
    assert cache.put("key", VALUE) == "disk"
    assert same(cache.get("key"), VALUE)
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700


# Several on one directory


def test_a_new_file_that_another_process_took_for_a_leftover_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = on_disk(tmp_path)
    replace, removed = os.replace, []

    def after_it_was_removed(source: str, target: str) -> None:
        if not removed:
            removed.append(source)
            os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", after_it_was_removed)
    assert cache.put("key", VALUE) == "disk"
    assert removed
    assert not caplog.records
    assert same(on_disk(tmp_path).get("key"), VALUE)


def test_two_caches_on_one_directory_share_it(tmp_path: Path) -> None:
    first, second = on_disk(tmp_path), on_disk(tmp_path)
    second.sweep()
    first.put("key", VALUE)
    assert same(second.get("key"), VALUE)
    assert first.delete("key")
    assert second.get("key") is None
    assert second.stats()["disk"].entries == 0
    second.put("key", "newer")
    assert first.get("key") == "newer"


def test_clearing_takes_the_files_of_others_too(tmp_path: Path) -> None:
    first, second = on_disk(tmp_path), on_disk(tmp_path)
    second.sweep()
    first.put("key", VALUE)
    second.clear()
    assert files_in(tmp_path) == []
    assert first.get("key") is None


def test_what_another_cache_took_away_is_written_again(tmp_path: Path) -> None:
    first = cache_of("host", "disk", directory=tmp_path)
    first.put("key", VALUE)
    first.flush()
    on_disk(tmp_path).clear()
    first.flush()
    assert same(on_disk(tmp_path).get("key"), VALUE)
