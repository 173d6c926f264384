"""A cluster on this host, with one worker process per device."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import dask
import distributed
from dask.system import CPU_COUNT
from dask.utils import parse_timedelta
from distributed import Nanny, Status
from distributed.deploy.cluster import Cluster
from distributed.deploy.utils import nprocesses_nthreads
from distributed.worker_memory import parse_memory_limit

from daskinfer.device.base import DeviceNotFound
from daskinfer.device.host import (
    RESOURCE_NAMES,
    THREAD_VARIABLES,
    host_report,
    worker_environment,
)
from daskinfer.device.registry import parse_device
from daskinfer.device_nanny import DeviceNanny
from daskinfer.logs import Log
from daskinfer.wording import counted

logger = Log("cluster")


class LocalCluster(distributed.LocalCluster):
    """Dask's `~distributed.LocalCluster` with one worker process per device.

    Every worker sees only its own device and declares it as the resource ``NPU: 1``
    or ``GPU: 1``.  Where the host has no accelerator, the workers compute on the CPU
    and share its cores: threads of one torch operation times workers never exceeds
    them.

    Parameters
    ----------
    n_workers : int, optional
        Number of workers; one per device by default, and on the CPU what Dask
        finds best for the number of cores.
    device : str
        ``"auto"`` (the best kind that is there), ``"npu"``, ``"cuda"``, ``"cpu"``, or
        one certain device such as ``"npu:1"``.
    threads_per_worker : int, optional
        Dask threads of a worker, which run users' tasks; inference has a thread of
        its own.  By default the worker's share of the cores.
    resources : mapping of str to float, optional
        Further resources of each worker; an entry named as the device's replaces it.
    processes : bool
        With False all workers share this process, so there can be one worker at most
        on an accelerator, and neither threads nor visible devices are limited.
    env : mapping of str to str, optional
        Further environment variables of the worker processes; they win over those
        set here.
    **kwargs
        Everything else goes to `distributed.LocalCluster`.

    Raises
    ------
    ValueError
        If `device` is no device's name, there are fewer devices than workers, or
        several devices would share one process.
    DeviceNotFound
        If there is no device of the kind that was asked for; says why.

    Examples
    --------
    >>> from distributed import Client
    >>> with LocalCluster(
    ...     n_workers=1, device="cpu", dashboard_address=":0"
    ... ) as cluster:
    ...     with Client(cluster) as client:
    ...         client.submit(sum, [1, 2]).result()
    3
    """

    def __init__(
        self,
        n_workers: int | None = None,
        *,
        device: str = "auto",
        threads_per_worker: int | None = None,
        resources: Mapping[str, float] | None = None,
        processes: bool = True,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.device_kind, self._indices = find_devices(device)
        if n_workers is None:
            n_workers = self._default_workers(processes)
        self._check_workers(n_workers, device, processes)
        cores_per_worker = max(1, CPU_COUNT // max(1, n_workers))
        self._threads = operation_threads(cores_per_worker)
        self._env = dict(env or {})
        self._initial_workers = n_workers
        if processes:
            kwargs.setdefault("worker_class", DeviceNanny)
        if "memory_limit" not in kwargs:
            kwargs["memory_limit"] = parse_memory_limit(
                "auto", 1, max(1, n_workers), logger=logger.logger
            )
        declared = {RESOURCE_NAMES[self.device_kind]: 1.0} if self._indices else {}
        # Dask gives all first workers one specification; here each has its own, so
        # they are added by _start.
        super().__init__(  # type: ignore[no-untyped-call]
            n_workers=0,
            threads_per_worker=threads_per_worker or cores_per_worker,
            processes=processes,
            resources={**declared, **(resources or {})},
            **kwargs,
        )

    def _default_workers(self, processes: bool) -> int:
        if not processes:
            return 1
        return len(self._indices) or nprocesses_nthreads(CPU_COUNT)[0]

    def _check_workers(self, n_workers: int, device: str, processes: bool) -> None:
        if n_workers < 0:
            raise ValueError(f"n_workers={n_workers} is negative")
        if not self._indices:
            return
        if n_workers > len(self._indices):
            raise ValueError(
                f"n_workers={n_workers} is too many: device={device!r} stands for "
                f"{counted(len(self._indices), 'device')}, with one worker process each"
            )
        if not processes and (n_workers > 1 or self._indices[0] != 0):
            raise ValueError(
                f"processes=False allows one worker, on {self.device_kind}:0: other "
                "devices need processes of their own"
            )

    async def _start(self) -> None:
        while len(self.worker_spec) < self._initial_workers:
            self.worker_spec.update(self.new_worker_spec())
        await super()._start()  # type: ignore[no-untyped-call]

    def new_worker_spec(self) -> dict[Any, dict[str, Any]]:
        """Specify one more worker, on a device that has none.

        Raises
        ------
        ValueError
            If every device has its worker.
        """
        spec_of_name = super().new_worker_spec()  # type: ignore[no-untyped-call]
        [(name, spec)] = spec_of_name.items()
        index = self._free_device()
        options = dict(spec["options"])
        if self.processes:
            environment = worker_environment(self.device_kind, index, self._threads)
            options["env"] = {**environment, **self._env}
        return {name: {**spec, "options": options, "device_index": index}}

    def _free_device(self) -> int:
        if not self._indices:
            return 0
        taken = {spec["device_index"] for spec in self.worker_spec.values()}
        for index in self._indices:
            if index not in taken:
                return index
        raise ValueError(
            f"no {self.device_kind} device is left for one more worker: this cluster "
            f"has {counted(len(self._indices), 'device')}, each with its worker"
        )

    def adapt(self, *args: Any, **kwargs: Any) -> Any:
        """Scale with the load as Dask does, but never beyond the devices.

        Raises
        ------
        ValueError
            If ``minimum`` is more than there are devices.
        """
        if self._indices:
            most, least = len(self._indices), kwargs.get("minimum", 0)
            if least > most:
                raise ValueError(
                    f"minimum={least} is too many: this cluster has "
                    f"{counted(most, 'device')}, with one worker process each"
                )
            kwargs["maximum"] = min(kwargs.get("maximum", most), most)
        return super().adapt(*args, **kwargs)

    def _update_worker_status(self, op: str, msg: Any) -> None:
        """Leave a nanny alone while it starts a process anew.

        Dask closes it if, at some time after a worker has left, there is none of its
        name: in place of that one there may be the next but one, just being started.
        """
        if op == "remove":
            name = self.scheduler_info["workers"][msg]["name"]
            if isinstance(self.workers.get(name), Nanny):
                Cluster._update_worker_status(self, op, msg)
                self._await_worker(name)
                return
        super()._update_worker_status(op, msg)  # type: ignore[no-untyped-call]

    def _await_worker(self, name: Any) -> None:
        told = dask.config.get("distributed.deploy.lost-worker-timeout")
        patience = float(parse_timedelta(told))
        asyncio.get_running_loop().call_later(patience, self._look_for, name)

    def _look_for(self, name: Any) -> None:
        nanny = self.workers.get(name)
        present = {worker["name"] for worker in self.scheduler_info["workers"].values()}
        if nanny is None or name in present:
            return
        if nanny.status == Status.running:
            # It closes itself when it cannot start a process.
            self._await_worker(name)
            return
        del self.workers[name]
        self._futures.add(asyncio.ensure_future(nanny.close()))


def find_devices(device: str) -> tuple[str, list[int]]:
    """Kind and indices of the devices to use; no index on the CPU."""
    kind, index = parse_device(device)
    if kind == "cpu":
        return "cpu", []
    report = host_report()
    if kind == "auto":
        kind = report.best
        if kind == "cpu":
            return "cpu", []
    found = report[kind]
    if found.count == 0 or (index is not None and index >= found.count):
        raise DeviceNotFound(device, found.reason)
    return kind, list(range(found.count)) if index is None else [index]


def operation_threads(cores: int) -> int:
    """Threads of one torch operation: the worker's cores, or fewer if users say so."""
    wished = [
        int(value)
        for name in THREAD_VARIABLES
        if (value := os.environ.get(name, "")).isdigit() and int(value) > 0
    ]
    return min([cores, *wished])
