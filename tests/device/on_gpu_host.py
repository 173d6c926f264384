"""What processes on a host with GPUs do: ``python -m tests.device.on_gpu_host WHAT``.

``plan`` tells of the workers that ``dask infer worker`` would start, ``serve`` of one
that has served a model which needs no kernel; as JSON, on the last line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
from distributed import Client, Scheduler, Worker

import daskinfer
from tests.cluster.http_helpers import ask_json, scrape


async def plan() -> list[dict[str, Any]]:
    """Resources and environment of each worker."""
    workers = daskinfer.DeviceWorkers("tcp://127.0.0.1:8786")
    return [
        {
            "resources": nanny.worker_kwargs.get("resources") or nanny.resources,
            "visible": nanny.env["CUDA_VISIBLE_DEVICES"],
        }
        for nanny in workers.nannies
    ]


async def serve() -> dict[str, Any]:
    """What a worker tells the scheduler, and Prometheus."""
    local: dict[str, Any] = {"host": "127.0.0.1", "dashboard_address": ":0"}
    async with (
        Scheduler(port=0, dashboard=False, **local) as scheduler,
        Worker(scheduler.address, **local) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        metrics = scheduler.workers[worker.address].metrics
        before = {name: metrics.get(name) for name in ("gpu", "gpu_utilization")}
        model = await daskinfer.deploy(
            client, factory="tests.cli.models:add", name="add", device="cuda"
        )
        answer = await model.submit(np.ones((1, 2)))
        await worker.heartbeat()
        samples = (await scrape(worker)).samples
        status = (await ask_json(scheduler, "/inference/status.json"))[1]
        metrics = scheduler.workers[worker.address].metrics
        return {
            "answer": answer.tolist(),
            "before": before,
            "metrics": {name: metrics[name] for name in metrics if "gpu" in name},
            "device": {
                sample.name: [sample.labels["device"], sample.value]
                for sample in samples
                if sample.name.startswith("dask_inference_device")
            },
            "telemetry": status["workers"][worker.address]["telemetry"],
        }


if __name__ == "__main__":
    told: Any = asyncio.run({"plan": plan, "serve": serve}[sys.argv[1]]())
    print(f"\n{json.dumps(told)}")
