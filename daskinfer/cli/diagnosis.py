"""What is wrong with a cluster, going by what its processes tell of themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dask.utils import parse_timedelta

from daskinfer.device.host import RESOURCE_NAMES, VISIBILITY_VARIABLES
from daskinfer.status import DeploymentStatus
from daskinfer.wording import counted

#: Processes that differ in these do not understand each other for sure.
_MUST_AGREE = ("daskinfer", "dask", "distributed", "cloudpickle", "msgpack")
#: Those that differ in these may give other answers.
_SHOULD_AGREE = ("torch", "torch_npu", "numpy")
#: Seconds; a worker that holds the interpreter lock while it loads is silent as long.
_SHORT_TTL = 30.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to be told.

    Attributes
    ----------
    is_fault
        Whether the cluster is unhealthy because of it; else it is a warning.
    node
        The process it is about, or ``"cluster"``.
    text
        What is so, and what to do.
    """

    is_fault: bool
    node: str
    text: str


@dataclass(slots=True)
class Facts:
    """What is known of a cluster.

    Attributes
    ----------
    nodes
        What `examine` told, by ``"client"``, ``"scheduler"`` or a worker's address.
    silent
        Why a process told nothing, by the same.
    workers
        What Dask's scheduler knows of each worker, by address; None where there is no
        cluster, and the host alone is looked at.
    deployments
        What is deployed.
    """

    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    workers: Mapping[str, Mapping[str, Any]] | None = None
    deployments: list[DeploymentStatus] = field(default_factory=list)


def diagnose(facts: Facts) -> list[Finding]:
    """Say what is wrong, faults first.

    Examples
    --------
    >>> [finding.text for finding in diagnose(Facts(workers={}))]
    ['there is no worker: start some with `dask infer worker`']
    """
    found = [
        *_silence(facts),
        *_versions(facts),
        *_torch_npu(facts),
        *_devices(facts),
        *_threads(facts),
        *_settings(facts),
        *_deployments(facts),
    ]
    return sorted(found, key=lambda finding: not finding.is_fault)


def _silence(facts: Facts) -> Iterator[Finding]:
    for node, reason in facts.silent.items():
        yield Finding(True, node, f"told nothing of itself: {reason}")
    if facts.workers is not None and not facts.workers:
        text = "there is no worker: start some with `dask infer worker`"
        yield Finding(True, "cluster", text)
    for address, worker in (facts.workers or {}).items():
        if not worker.get("nanny"):
            text = (
                "has no nanny, so that nothing starts it again when its device breaks: "
                "leave out --no-nanny"
            )
            yield Finding(False, address, text)


def _versions(facts: Facts) -> Iterator[Finding]:
    for node, told in facts.nodes.items():
        if told["packages"]["daskinfer"] is None:
            yield Finding(True, node, "daskinfer is not installed")
        if told["packages"]["torch"] is None and node in (facts.workers or {}):
            yield Finding(True, node, "torch is not installed")
    for name in (*_MUST_AGREE, *_SHOULD_AGREE):
        versions = {node: told["packages"][name] for node, told in facts.nodes.items()}
        if name in ("torch", "torch_npu"):
            # The scheduler needs none, and a client may have none either.
            versions = {n: v for n, v in versions.items() if n in (facts.workers or {})}
        yield from _disagreement(name, versions, name in _MUST_AGREE)
    pythons = {
        node: told["python"].rpartition(".")[0] for node, told in facts.nodes.items()
    }
    yield from _disagreement("Python", pythons, True)


def _disagreement(
    name: str, versions: Mapping[str, str | None], is_fault: bool
) -> Iterator[Finding]:
    nodes = defaultdict(list)
    for node, version in versions.items():
        if version is not None:
            nodes[version].append(node)
    if len(nodes) > 1:
        told = "; ".join(
            f"{version} on {some(where)}" for version, where in sorted(nodes.items())
        )
        yield Finding(is_fault, "cluster", f"{name} differs: {told}")


def _torch_npu(facts: Facts) -> Iterator[Finding]:
    for node, told in facts.nodes.items():
        torch, plugin = told["packages"]["torch"], told["packages"]["torch_npu"]
        if torch is None or plugin is None:
            continue
        if torch.split(".")[:2] != plugin.split(".")[:2]:
            text = f"torch_npu {plugin} is built for another torch than {torch}"
            yield Finding(True, node, text)


def _devices(facts: Facts) -> Iterator[Finding]:
    owners: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for node, worker in (facts.workers or {}).items():
        told = facts.nodes.get(node)
        if told is None or told["devices"] is None:
            continue
        devices = {backend["kind"]: backend for backend in told["devices"]}
        for kind, resource in RESOURCE_NAMES.items():
            count, reason = devices[kind]["count"], devices[kind]["reason"]
            declares = worker.get("resources", {}).get(resource, 0)
            if declares and not count:
                text = f"declares {resource} but can use no {kind} device: {reason}"
                yield Finding(True, node, text)
            if count and not declares:
                text = (
                    f"has {counted(count, f'{kind} device')} but does not declare "
                    f"{resource}=1: start it with `dask infer worker`"
                )
                yield Finding(False, node, text)
            if count > 1:
                text = (
                    f"sees {count} {kind} devices, of which it uses the first: start "
                    "one worker for each with `dask infer worker`"
                )
                yield Finding(False, node, text)
            visible = told["visible"][VISIBILITY_VARIABLES[kind]]
            if count == 1 and visible:
                owners[told["host"], kind, visible].append(node)
    for (host, kind, visible), nodes in owners.items():
        if len(nodes) > 1:
            text = f"{some(nodes)} share {kind} device {visible} of {host}"
            yield Finding(True, "cluster", text)


def _threads(facts: Facts) -> Iterator[Finding]:
    hosts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for node in facts.workers or {}:
        told = facts.nodes.get(node)
        if told is not None and told["torch_threads"]:
            hosts[told["host"]].append(told)
    for host, nodes in hosts.items():
        threads = sum(told["torch_threads"] for told in nodes)
        cores = nodes[0]["cores"]
        workers = counted(len(nodes), "worker")
        if threads > cores:
            text = (
                f"{workers} of {host} use {counted(threads, 'thread')} for operations "
                f"on {counted(cores, 'core')}: set OMP_NUM_THREADS lower, or start "
                "them with `dask infer worker`"
            )
            yield Finding(False, "cluster", text)
        elif 2 * threads <= cores and all(map(_is_cpu_worker, nodes)):
            text = (
                f"{workers} of {host} use {counted(threads, 'thread')} for operations "
                f"on {counted(cores, 'core')}: Dask's nannies set OMP_NUM_THREADS=1; "
                "start them with `dask infer worker`"
            )
            yield Finding(False, "cluster", text)


def _is_cpu_worker(told: Mapping[str, Any]) -> bool:
    return not any(b["count"] for b in told["devices"] or () if b["kind"] != "cpu")


def _settings(facts: Facts) -> Iterator[Finding]:
    for node, told in facts.nodes.items():
        settings = told["settings"]
        compression = settings["distributed.comm.compression"]
        if compression and compression != "auto":
            text = (
                f"distributed.comm.compression is {compression!r}: weights and inputs "
                "rarely shrink, and all of them are tried"
            )
            yield Finding(False, node, text)
        if node == "scheduler":
            yield from _scheduler_settings(settings)
        for role in ("scheduler", "worker"):
            key = f"distributed.{role}.validate"
            if settings[key] and (role == "scheduler") == (node == "scheduler"):
                text = f"{key} is on: for tests, as it makes everything slower"
                yield Finding(False, node, text)
        method = settings["distributed.worker.multiprocessing-method"]
        if node in (facts.workers or {}) and method not in (None, "spawn"):
            text = (
                f"distributed.worker.multiprocessing-method is {method!r}: devices and "
                "threads are set too late for such processes; use 'spawn'"
            )
            yield Finding(False, node, text)


def _scheduler_settings(settings: Mapping[str, Any]) -> Iterator[Finding]:
    given = settings["distributed.scheduler.worker-ttl"]
    ttl = None if given is None else parse_timedelta(given)
    if ttl is not None and ttl < _SHORT_TTL:
        text = (
            f"distributed.scheduler.worker-ttl is {given}: a worker that loads a large "
            f"model may be silent for longer, and be removed; {_SHORT_TTL:.0f}s or more"
        )
        yield Finding(False, "scheduler", text)


def _deployments(facts: Facts) -> Iterator[Finding]:
    for status in facts.deployments:
        if not any(worker.healthy for worker in status.workers):
            reasons = "; ".join(
                f"{worker.address} is {worker.state}"
                + (f": {worker.reason}" if worker.reason else "")
                for worker in status.workers
            )
            text = f"no worker can answer {status.name!r}: {reasons or 'there is none'}"
            yield Finding(True, "cluster", text)
            continue
        for worker in status.workers:
            if worker.reason:
                text = f"{status.name!r} is {worker.state} here: {worker.reason}"
                yield Finding(False, worker.address, text)


def some(nodes: list[str]) -> str:
    """Name the first three of them, and say how many more there are.

    >>> some(["d", "c", "b", "a"])
    'a, b, c and 1 more'
    """
    shown = ", ".join(sorted(nodes)[:3])
    return shown if len(nodes) <= 3 else f"{shown} and {len(nodes) - 3} more"
