"""Models that are replaced while anything may die."""

from __future__ import annotations

import asyncio
from collections import Counter

from distributed import Client

import daskinfer
from daskinfer import Model
from daskinfer.exceptions import DeployTimeout, NoUpdate, UpdateFailed
from tests.chaos.models import warmup
from tests.chaos.plan import Plan

#: Seconds that an update may take before it is given up.
_PATIENCE = 30


class Updates:
    """Replaces deployed models by others that do the same.

    Attributes
    ----------
    done
        How often, and how it ended.
    complaints
        What is wrong.
    """

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.complaints: list[str] = []

    async def play(self, address: str, plan: Plan) -> None:
        """Do what the plan says when it is time."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        async with Client(address, asynchronous=True) as client:
            for number, (at, name) in enumerate(plan.updates, start=2):
                await asyncio.sleep(max(start + at - loop.time(), 0))
                await self._update(await daskinfer.get(client, name), str(number))

    async def _update(self, model: Model, version: str) -> None:
        before = (await model.status()).active_version
        try:
            await model.update(
                factory="tests.chaos.models:build",
                factory_kwargs={"name": model.name},
                warmup=warmup(model.name),
                version=version,
                wait_timeout=_PATIENCE,
            )
            ended, right = "updates", {version}
        except UpdateFailed:
            ended, right = "updates that failed", {before}
        except DeployTimeout:
            ended, right = "updates given up", {before}
            try:
                await model.abort(version)
            except NoUpdate:
                # It has ended since.
                right = {before, version}
        self.done[ended] += 1
        active = (await model.status()).active_version
        if active not in right:
            self.complaints.append(
                f"{model.name!r} answers with version {active!r} after {ended}, and "
                f"should with one of {right}"
            )
