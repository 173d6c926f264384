"""Following what a deployment can take, as it learns and as workers come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from daskinfer.client import describe_one, status_of
from daskinfer.imap.pace import Capacity, Interval
from daskinfer.installation import install

if TYPE_CHECKING:
    from distributed import Client

    from daskinfer.handle import Model


async def follow(client: Client, model: Model, once: bool) -> AsyncIterator[Capacity]:
    """Tell what a deployment takes: at once, and then from time to time.

    Parameters
    ----------
    client
        On whose event loop this is.
    model
        The deployment.
    once
        Tell no more than how many requests may wait, which does not change.

    Raises
    ------
    UnknownDeployment
        If it is not there, or not any more.
    """
    await install(client)
    about = await describe_one(client, model.name)
    max_queue: int | None = about["max_queue"]
    if once:
        yield Capacity(1, 1, max_queue)
        return
    interval, before = Interval(), None
    while True:
        status = await status_of(client, model.name)
        capacity = Capacity.of(status, model.version, max_queue)
        yield capacity
        await asyncio.sleep(interval.next(changed=capacity != before))
        before = capacity
