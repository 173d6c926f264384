"""From a list of files to a list of results."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from distributed import Client
from distributed.utils_test import gen_cluster

import daskinfer
from tests.cluster.helpers import PATIENCE, Probe, until
from tests.cluster.scheduling_helpers import deploy, nothing_is_left

ONE_WORKER = [("127.0.0.1", 1)]


def written(folder: Path, count: int = 20) -> list[Path]:
    paths = [folder / f"{i}.npy" for i in range(count)]
    for i, path in enumerate(paths):
        np.save(path, np.full((1, 1), float(i)))
    return paths


def values(results: list[Any]) -> list[float]:
    return [float(result[0, 0]) for result in results]


def loading_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("daskinfer-files")]


def test_results_are_in_the_order_of_the_files(tmp_path: Path) -> None:
    paths = written(tmp_path)

    @gen_cluster(client=True, nthreads=ONE_WORKER)
    async def run(c: Client, s: Any, a: Any) -> None:
        model = await deploy(c, lambda x, scale=2: x * scale, name="m")
        found = await daskinfer.run_files(model, paths, np.load)
        assert values(found) == [2.0 * i for i in range(20)]
        bound = model.options(priority=1)
        found = await asyncio.to_thread(
            daskinfer.run_files, bound, map(str, paths), np.load, scale=3
        )
        assert values(found) == [3.0 * i for i in range(20)]
        assert await daskinfer.run_files(model, [], np.load) == []
        await until(lambda: not loading_threads())
        await nothing_is_left(s, a)

    run()


def test_files_that_fail(tmp_path: Path) -> None:
    paths = written(tmp_path)
    paths[3].unlink()
    paths[5].write_bytes(b"")

    def answer(x: np.ndarray) -> np.ndarray:
        if (x == 7).any():
            raise ArithmeticError("not 7")
        return x

    @gen_cluster(client=True, nthreads=ONE_WORKER)
    async def run(c: Client, s: Any, a: Any) -> None:
        model = await deploy(c, answer, name="m")
        found = await daskinfer.run_files(model, paths, np.load, on_error="return")
        failed = {i: type(r) for i, r in enumerate(found) if isinstance(r, Exception)}
        assert failed == {3: FileNotFoundError, 5: EOFError, 7: ArithmeticError}
        assert values([r for i, r in enumerate(found) if i not in failed]) == [
            float(i) for i in range(20) if i not in failed
        ]
        with pytest.raises(FileNotFoundError, match=r"3\.npy"):
            await daskinfer.run_files(model, paths, np.load)
        with pytest.raises(FileNotFoundError, match=r"3\.npy"):
            await asyncio.to_thread(daskinfer.run_files, model, paths, np.load)
        del found
        await until(lambda: not loading_threads())
        await nothing_is_left(s, a)

    run()


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_few_are_loaded_ahead(c: Client, s: Any, a: Any) -> None:
    probe = Probe(is_open=False)
    model = await deploy(c, probe)
    lock, together, most, loaded = threading.Lock(), 0, 0, 0
    meeting = threading.Barrier(3)

    def load(number: int) -> np.ndarray:
        nonlocal together, most, loaded
        with lock:
            together += 1
            most = max(most, together)
        if number < 3:
            # As many as there are threads are loaded at a time.
            meeting.wait(PATIENCE)
        with lock:
            together -= 1
            loaded += 1
        return np.full((1, 1), float(number))

    running = asyncio.ensure_future(
        daskinfer.run_files(model, range(100), load, threads=3, max_in_flight=5)
    )
    await probe.entered()
    # Five that were sent, and twice as many as there are threads ahead of them.
    await until(lambda: loaded == 5 + 6)
    assert most == 3
    probe.open()
    assert values(await running) == [2.0 * i for i in range(100)]
    await until(lambda: not loading_threads())


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_progress(c: Client, s: Any, a: Any) -> None:
    import tqdm.auto

    model = await deploy(c, Probe())
    made: list[Any] = []

    class Bar:
        def __init__(self, **kwargs: Any) -> None:
            self.told = kwargs
            self.count = 0
            self.is_closed = False
            made.append(self)

        def update(self) -> None:
            self.count += 1

        def close(self) -> None:
            self.is_closed = True

    def load(number: int) -> np.ndarray:
        return np.full((1, 1), float(number))

    with mock.patch.object(tqdm.auto, "tqdm", Bar):
        await daskinfer.run_files(model, range(7), load, progress=True)
        await asyncio.to_thread(
            lambda: daskinfer.run_files(model, range(7), load, progress=True)
        )
    for bar in made:
        assert bar.told == {"total": 7, "unit": "file"}
        assert (bar.count, bar.is_closed) == (7, True)
    assert len(made) == 2
    with (
        mock.patch.dict(sys.modules, {"tqdm": None, "tqdm.auto": None}),
        pytest.raises(ImportError, match=r"pip install 'daskinfer\[progress\]'"),
    ):
        daskinfer.run_files(model, range(7), load, progress=True)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_is_refused(c: Client, s: Any, a: Any) -> None:
    model = await deploy(c, Probe())
    for single in ("a.npy", b"a.npy", Path("a.npy")):
        with pytest.raises(TypeError, match="a list of files, not the single"):
            daskinfer.run_files(model, single, np.load)
    with pytest.raises(TypeError, match="load must be a function of a path"):
        daskinfer.run_files(model, ["a.npy"], "load")
    with pytest.raises(ValueError, match="threads must be at least 1"):
        daskinfer.run_files(model, ["a.npy"], np.load, threads=0)
    with pytest.raises(ValueError, match="on_error must be"):
        daskinfer.run_files(model, ["a.npy"], np.load, on_error="skip")
    assert not loading_threads()
