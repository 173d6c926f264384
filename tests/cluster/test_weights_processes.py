"""Large weights among worker processes that share a disk, or die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Nanny
from distributed.utils_test import gen_cluster

import daskinfer
from daskinfer import config
from tests.cluster.helpers import linear, until
from tests.cluster.scheduling_helpers import engine
from tests.cluster.test_weights_distribution import entry, sends

pytestmark = pytest.mark.process

#: 4 MiB and a little: two chunks would say little of what happens between them.
X = torch.ones(1, 1024)
ONE = [("127.0.0.1", 1)]


def large(seed: int = 0) -> torch.nn.Module:
    return torch.nn.Sequential(*(linear(1024, 1024, seed + i) for i in range(8))).eval()


def nanny(scheduler: Any, folder: Path, bandwidth: str | None = None) -> Nanny:
    """A worker process with a directory of its own, that sends at its own speed."""
    settings = {"directory": str(folder), "send-bandwidth": bandwidth}
    config = {"daskinfer": {"artifacts": settings}}
    return Nanny(scheduler.address, nthreads=1, config=config)


def ready(scheduler: Any) -> set[str]:
    return {r.address for r in engine(scheduler).registry.version("m").ready()}


async def answers(model: Any, net: torch.nn.Module, *addresses: str) -> None:
    for address in addresses:
        future = model.options(workers=[address]).submit(X)
        torch.testing.assert_close(await future, net(X))


@gen_cluster(client=True, nthreads=[], timeout=120)
async def test_processes_share_a_directory_and_find_it_again(
    c: Any, s: Any, tmp_path: Path
) -> None:
    net = large()
    async with nanny(s, tmp_path / "store") as a, nanny(s, tmp_path / "store") as b:
        model = await daskinfer.deploy(c, net, name="m", wait=False)
        origin = sends(s)
        await until(lambda: len(ready(s)) == 2)
        both = {a.worker_address, b.worker_address}
        assert ready(s) == both
        await answers(model, net, *both)
        (file,) = (tmp_path / "store").iterdir()
        chunks = len(entry(s).spool.chunks)
        assert set(origin.values()) == {1} and len(origin) == chunks
        maps = await c.run(lambda: Path("/proc/self/maps").read_text())
        assert all(file.name in text for text in maps.values())
        # Both die; what they had is found again.
        for pid in (a.pid, b.pid):
            os.kill(pid or 0, signal.SIGKILL)
        await until(lambda: len(ready(s)) == 2 and not ready(s) & both)
        await answers(model, net, *ready(s))
        assert sum(origin.values()) == chunks
        assert list((tmp_path / "store").iterdir()) == [file]


@gen_cluster(client=True, nthreads=[], timeout=120)
async def test_a_process_that_dies_while_it_sends(
    c: Any, s: Any, tmp_path: Path
) -> None:
    """Another source has the rest."""
    net = large()
    async with nanny(s, tmp_path / "a", bandwidth="1 MB") as a:
        model = await daskinfer.deploy(c, net, name="m")
        first = a.worker_address
        async with nanny(s, tmp_path / "b") as b:
            swarm = entry(s).swarm
            await until(
                lambda: any(
                    first in coming.values() for coming in swarm._coming.values()
                )
            )
            os.kill(a.pid or 0, signal.SIGKILL)
            await until(lambda: b.worker_address in ready(s))
            await answers(model, net, b.worker_address)
            # The scheduler was asked once more only for what was on its way.
            assert max(swarm.sent) <= 3


@gen_cluster(client=True, nthreads=[], timeout=120)
async def test_a_process_that_dies_while_it_fetches(
    c: Any, s: Any, tmp_path: Path
) -> None:
    """The one that waits for it goes on where it has stopped."""
    net, store = large(), tmp_path / "store"
    async with nanny(s, store) as a, nanny(s, store) as b:
        pids = {a.worker_address: a.pid, b.worker_address: b.pid}
        with pytest.MonkeyPatch.context() as patch:
            get = config.get
            patch.setattr(
                config,
                "get",
                lambda key: "10 MB" if key == "artifacts.send-bandwidth" else get(key),
            )
            model = await daskinfer.deploy(c, net, name="m", wait=False)
        swarm = entry(s).swarm
        await until(lambda: any(have for have in swarm._have.values()))
        (fetching,) = swarm._have
        os.kill(pids.pop(fetching) or 0, signal.SIGKILL)
        (other,) = pids
        await until(lambda: other in ready(s))
        await answers(model, net, other)
        (file,) = (f for f in store.iterdir() if not f.name.endswith(".part"))
        # What was there already was not sent again.
        assert sum(swarm.sent) < 2 * len(swarm.sent)
        assert file.stat().st_size == entry(s).spool.chunks.size
