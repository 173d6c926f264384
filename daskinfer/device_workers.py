"""All worker processes of one host, for the cluster of a scheduler elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Mapping
from typing import Any

from dask.system import CPU_COUNT
from distributed.deploy.utils import nprocesses_nthreads
from distributed.utils import parse_ports
from distributed.worker_memory import parse_memory_limit

from daskinfer.cluster import find_devices, operation_threads
from daskinfer.device.host import RESOURCE_NAMES, worker_environment
from daskinfer.device_nanny import DeviceNanny
from daskinfer.logs import Log
from daskinfer.wording import counted

logger = Log("workers")


class DeviceWorkers:
    """One worker process for each device of this host, each with its nanny.

    What ``dask infer worker`` runs. It has the methods that Dask expects of a worker
    class, so that :func:`distributed.SSHCluster` takes it as well.

    Parameters
    ----------
    scheduler : str, optional
        The scheduler's address; None where `scheduler_file` or Dask's configuration
        says it.
    device : str
        ``"auto"`` (the best kind that is there), ``"npu"``, ``"cuda"``, ``"cpu"``, or
        one certain device such as ``"npu:1"``.
    n_workers : int, optional
        Use so many devices; all by default. On the CPU: so many workers, by default
        what Dask finds best for the number of cores.
    cpu_workers : int, optional
        So many workers more, which see no accelerator. Where there is none, these are
        all, unless `n_workers` is given too.
    nthreads : int, optional
        Dask threads of each worker; by default its share of the cores.
    resources : mapping of str to float, optional
        Further resources of each worker; an entry named as the device's replaces it.
    memory_limit : int, float or str
        Of each worker, as for Dask's; ``"auto"`` is its share of the memory.
    name : str, optional
        The workers' name; with several, a number is appended to it.
    worker_port, nanny_port : int or str, optional
        One port, or a range such as ``"3000:3010"`` with a port for each worker.
    env : mapping of str to str, optional
        Further environment variables of the workers; they win over those set here.
    **kwargs
        Everything else goes to `distributed.Nanny`.

    Raises
    ------
    ValueError
        If no worker is to be started, more than there are devices, or more than ports.
    DeviceNotFound
        If there is no device of the kind that was asked for; says why.

    Notes
    -----
    To be made and used on one running event loop.

    Examples
    --------
    >>> from distributed import Client, SSHCluster
    >>> cluster = SSHCluster(
    ...     ["head", "node1", "node2"], worker_class="daskinfer.DeviceWorkers"
    ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        scheduler: str | None = None,
        *,
        device: str = "auto",
        n_workers: int | None = None,
        cpu_workers: int | None = None,
        nthreads: int | None = None,
        resources: Mapping[str, float] | None = None,
        memory_limit: int | float | str | None = "auto",
        name: str | int | None = None,
        worker_port: int | str | None = None,
        nanny_port: int | str | None = None,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        kind, indices = find_devices(device)
        self.plan = plan_workers(kind, indices, n_workers, cpu_workers)
        count = len(self.plan)
        check_ports("worker_port", worker_port, count)
        check_ports("nanny_port", nanny_port, count)
        cores = max(1, CPU_COUNT // count)
        threads = operation_threads(cores)
        if memory_limit == "auto":
            memory_limit = parse_memory_limit("auto", 1, count, logger=logger.logger)
        # Each takes the first port of the range that is free.
        ports = {"worker_port": worker_port, "port": nanny_port}
        kwargs |= {key: port for key, port in ports.items() if port is not None}
        self.nannies = [
            DeviceNanny(
                scheduler,
                nthreads=nthreads or cores,
                resources={**declared(kind), **(resources or {})},
                memory_limit=memory_limit,
                name=name if count == 1 or not name else f"{name}-{number}",
                env={**worker_environment(kind, index, threads), **(env or {})},
                **kwargs,
            )
            for number, (kind, index) in enumerate(self.plan)
        ]

    async def start(self) -> DeviceWorkers:
        """Start all of them and wait until they are connected.

        If one cannot be started, all are closed again.
        """
        try:
            await asyncio.gather(*self.nannies)
        except BaseException:
            await self.close(reason="device-workers-start-failed")
            raise
        return self

    def __await__(self) -> Generator[Any, None, DeviceWorkers]:
        return self.start().__await__()

    async def finished(self) -> None:
        """Wait until the last of them has ended."""
        ended: list[Awaitable[Any]] = [nanny.finished() for nanny in self.nannies]  # type: ignore[no-untyped-call]
        await asyncio.gather(*ended)

    async def close(self, timeout: float = 10, reason: str = "device-workers") -> None:
        """End all of them; kill what has not ended within `timeout` seconds."""
        await asyncio.gather(
            *(nanny.close(timeout=timeout, reason=reason) for nanny in self.nannies)
        )

    def __repr__(self) -> str:
        kinds = [kind for kind, _ in self.plan]
        told = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        return f"<DeviceWorkers {told}>"


def plan_workers(
    kind: str, indices: list[int], n_workers: int | None, cpu_workers: int | None
) -> list[tuple[str, int]]:
    """Say which workers a host is to have: the kind and index of each one's device.

    Parameters
    ----------
    kind, indices
        The devices to be used; no index on the CPU.
    n_workers, cpu_workers
        As `DeviceWorkers` takes them.

    Raises
    ------
    ValueError
        If that makes no worker, or more than there are devices.

    Examples
    --------
    >>> plan_workers("npu", [0, 1], None, 1)
    [('npu', 0), ('npu', 1), ('cpu', 0)]
    >>> plan_workers("cpu", [], None, 2)
    [('cpu', 0), ('cpu', 0)]
    """
    for field, value in (("n_workers", n_workers), ("cpu_workers", cpu_workers)):
        if value is not None and value < 0:
            raise ValueError(f"{field}={value} is negative")
    more = [("cpu", 0)] * (cpu_workers or 0)
    if indices:
        if n_workers is not None and n_workers > len(indices):
            raise ValueError(
                f"n_workers={n_workers} is too many: there "
                f"{'is' if len(indices) == 1 else 'are'} "
                f"{counted(len(indices), f'{kind} device')}, with one worker each"
            )
        plan = [(kind, index) for index in indices[:n_workers]] + more
    elif n_workers is None and cpu_workers is not None:
        plan = more
    else:
        default = nprocesses_nthreads(CPU_COUNT)[0]
        plan = [("cpu", 0)] * (default if n_workers is None else n_workers) + more
    if not plan:
        raise ValueError(
            "no worker is to be started: there is no device to use, and none on the "
            "CPU is asked for"
        )
    return plan


def declared(kind: str) -> dict[str, float]:
    """The Dask resource that says which kind of device a worker has.

    >>> declared("npu"), declared("cpu")
    ({'NPU': 1.0}, {})
    """
    return {RESOURCE_NAMES[kind]: 1.0} if kind in RESOURCE_NAMES else {}


def check_ports(field: str, given: int | str | None, workers: int) -> None:
    """Refuse a range with fewer ports than workers.

    >>> check_ports("worker_port", "3000:3007", 8)
    >>> check_ports("worker_port", 3000, 2)
    Traceback (most recent call last):
        ...
    ValueError: worker_port=3000 is 1 port, too few for 2 workers: give a range, such \
as '3000:3001'
    """
    ports = [port for port in parse_ports(given) if port]
    if not ports or len(ports) >= workers:
        return
    first = ports[0]
    raise ValueError(
        f"{field}={given} is {counted(len(ports), 'port')}, too few for "
        f"{workers} workers: give a range, such as '{first}:{first + workers - 1}'"
    )
