"""What the doctor says, going by what processes told."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest

from daskinfer.cli import probe
from daskinfer.cli.diagnosis import Facts, diagnose
from daskinfer.cli.probe import SETTINGS, ByValue, examine
from daskinfer.status import DeploymentStatus, LatencyPercentiles, WorkerStatus

A, B = "tcp://10.0.0.1:1", "tcp://10.0.0.2:1"


def told(kind: str = "cpu", **changes: Any) -> dict[str, Any]:
    """What a healthy process tells."""
    backends = [
        {"kind": name, "count": int(name == kind), "reason": f"about {name}"}
        for name in ("npu", "cuda")
    ]
    packages = dict.fromkeys(probe.PACKAGES, "1.2.3") | {"torch_npu": None}
    return {
        "host": "one",
        "python": "3.11.2",
        "packages": packages | changes.pop("packages", {}),
        "cores": 4,
        "visible": {"ASCEND_RT_VISIBLE_DEVICES": None, "CUDA_VISIBLE_DEVICES": None},
        "settings": dict.fromkeys(SETTINGS) | changes.pop("settings", {}),
        "devices": [*backends, {"kind": "cpu", "count": 1, "reason": ""}],
        "torch_threads": 4,
        **changes,
    }


def facts(worker: dict[str, Any] | None = None, **resources: float) -> Facts:
    """A healthy cluster with one worker."""
    told_by_worker = told() if worker is None else worker
    return Facts(
        nodes={"client": told(), "scheduler": told(), A: told_by_worker},
        workers={A: {"nanny": "tcp://10.0.0.1:2", "resources": resources}},
    )


def texts(found: Facts) -> list[tuple[bool, str]]:
    return [(f.is_fault, f"{f.node}: {f.text}") for f in diagnose(found)]


def only(found: Facts) -> tuple[bool, str]:
    [text] = texts(found)
    return text


def test_nothing_is_wrong():
    assert texts(facts()) == []
    assert texts(facts(told("npu", torch_threads=1), NPU=1)) == []


def test_packages_differ():
    is_fault, text = only(facts(told(packages={"distributed": "1.0"})))
    assert is_fault
    assert text == (
        f"cluster: distributed differs: 1.0 on {A}; 1.2.3 on client, scheduler"
    )
    assert only(facts(told(packages={"numpy": "1.0"})))[0] is False
    assert only(facts(told(python="3.12.1")))[0] is True
    assert texts(facts(told(python="3.11.9"))) == []


def test_a_package_is_missing():
    is_fault, text = only(facts(told(packages={"daskinfer": None})))
    assert is_fault and text == f"{A}: daskinfer is not installed"
    is_fault, text = only(facts(told(packages={"torch": None})))
    assert is_fault and text == f"{A}: torch is not installed"
    # Clients and schedulers need none.
    found = facts()
    found.nodes["scheduler"]["packages"]["torch"] = None
    assert texts(found) == []


def test_torch_npu_for_another_torch():
    packages = {"torch": "2.9.0+cpu", "torch_npu": "2.13.0"}
    is_fault, text = only(facts(told(packages=packages)))
    assert is_fault and "torch_npu 2.13.0 is built for another torch" in text


def test_devices_and_resources():
    is_fault, text = only(facts(NPU=1))
    assert is_fault and "can use no npu device: about npu" in text
    is_fault, text = only(facts(told("npu")))
    assert not is_fault and "does not declare NPU=1" in text
    several = told("npu")
    several["devices"][0]["count"] = 8
    assert "sees 8 npu devices" in only(facts(several, NPU=1))[1]


def test_workers_share_a_device():
    visible = {"ASCEND_RT_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": None}
    worker = told("npu", visible=visible, torch_threads=2)
    found = facts(worker, NPU=1)
    found.nodes[B] = copy.deepcopy(worker)
    found.workers = {node: found.workers[A] for node in (A, B)}
    is_fault, text = only(found)
    assert is_fault and text == f"cluster: {A}, {B} share npu device 3 of one"
    found.nodes[B]["host"] = "two"
    assert texts(found) == []


@pytest.mark.parametrize(("threads", "count"), [(8, 1), (3, 0), (1, 1)])
def test_threads(threads, count):
    found = texts(facts(told(torch_threads=threads)))
    assert len(found) == count
    assert not any(is_fault for is_fault, _ in found)


def test_settings():
    hurting = {
        "distributed.comm.compression": "zlib",
        "distributed.worker.multiprocessing-method": "fork",
        "distributed.worker.validate": True,
    }
    found = facts(told(settings=hurting))
    found.nodes["scheduler"]["settings"] |= {
        "distributed.scheduler.worker-ttl": "5s",
        "distributed.scheduler.validate": True,
        "distributed.worker.validate": True,
    }
    told_texts = texts(found)
    assert not any(is_fault for is_fault, _ in told_texts)
    assert sorted(text.split(" is ")[0] for _, text in told_texts) == [
        "scheduler: distributed.scheduler.validate",
        "scheduler: distributed.scheduler.worker-ttl",
        f"{A}: distributed.comm.compression",
        f"{A}: distributed.worker.multiprocessing-method",
        f"{A}: distributed.worker.validate",
    ]


def test_workers():
    assert "there is no worker" in only(Facts(nodes={"client": told()}, workers={}))[1]
    assert texts(Facts(nodes={"this host": told()})) == []
    found = facts()
    found.workers = {A: {"nanny": None}}
    assert "has no nanny" in only(found)[1]
    found = facts()
    del found.nodes[A]
    found.silent[A] = "no answer within 5 s"
    is_fault, text = only(found)
    assert is_fault and text == f"{A}: told nothing of itself: no answer within 5 s"


def test_deployments():
    def deployed(*workers: WorkerStatus) -> DeploymentStatus:
        counts = [0] * 10
        return DeploymentStatus(
            "net", "1", (), workers, *counts, None, 0.0, LatencyPercentiles()
        )

    good = WorkerStatus(A, "ready", True)
    bad = WorkerStatus(B, "failed", False, reason="no disk")
    found = facts()
    found.deployments = [deployed(good)]
    assert texts(found) == []
    found.deployments = [deployed(good, bad)]
    assert only(found) == (False, f"{B}: 'net' is failed here: no disk")
    found.deployments = [deployed(bad)]
    is_fault, text = only(found)
    assert is_fault and text.endswith(
        f"no worker can answer 'net': {B} is failed: no disk"
    )
    found.deployments = [deployed()]
    assert only(found)[1].endswith("no worker can answer 'net': there is none")


def test_faults_come_first():
    found = facts(told(packages={"numpy": "1", "dask": "1"}))
    assert [is_fault for is_fault, _ in texts(found)] == [True, False]


def test_cann(monkeypatch, tmp_path):
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    assert asyncio.run(examine(False))["cann"] == {
        "home": str(tmp_path),
        "version": None,
    }
    folder = tmp_path / "aarch64-linux"
    folder.mkdir()
    file = folder / "ascend_toolkit_install.info"
    file.write_text("package_name=Ascend-cann-toolkit\nversion=8.0.RC3\n")
    assert asyncio.run(examine(False))["cann"]["version"] == "8.0.RC3"


def test_the_probe_takes_its_code_along():
    pickled = pickle.dumps(ByValue(examine))
    assert b"ascend_toolkit_install.info" in pickled
    again = pickle.loads(pickled)
    assert again.__globals__ is not probe.__dict__
    assert asyncio.run(again(False))["packages"]["daskinfer"]
