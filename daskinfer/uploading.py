"""Weights on their way from the client to the scheduler, before they are deployed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from distributed.protocol.serialize import to_serialize

from daskinfer.exceptions import DeploymentFailed, SchedulerLost
from daskinfer.installation import calls

if TYPE_CHECKING:
    from distributed import Client

    from daskinfer.artifact import Artifact

#: Chunks on their way at the same time.
_IN_FLIGHT = 2


@contextlib.asynccontextmanager
async def uploaded(client: Client, artifact: Artifact) -> AsyncIterator[None]:
    """Let the scheduler have an artifact's weights for as long as the block runs.

    It keeps them afterwards if something is deployed by then that consists of them.
    Chunks that it has already are not sent.

    Parameters
    ----------
    client
        Connected to a scheduler with the plugin.
    artifact
        What is to be deployed.

    Raises
    ------
    DeploymentFailed
        If the scheduler cannot keep them, as where its disk is full.
    """
    if artifact.is_inline:
        yield
        return
    assert artifact.chunks is not None
    answer = await calls(client).daskinfer_offer(
        client=client.id, chunks=artifact.chunks.to_message()
    )
    _check(answer)
    try:
        await _upload(client, artifact, answer["offer"], list(answer["missing"]))
        yield
    finally:
        # Where the scheduler is gone, so are its files.
        with contextlib.suppress(SchedulerLost):
            await calls(client).daskinfer_withdraw(offer=answer["offer"])


async def _upload(
    client: Client, artifact: Artifact, offer: int, missing: list[int]
) -> None:
    assert artifact.chunks is not None and artifact.weights is not None
    chunks, weights = artifact.chunks, artifact.weights
    indices = iter(missing)

    async def send() -> None:
        for index in indices:
            part = weights[slice(*chunks.span(index))]
            _check(
                await calls(client).daskinfer_upload(
                    offer=offer, chunk=index, data=to_serialize(part)
                )
            )

    await asyncio.gather(*(send() for _ in range(_IN_FLIGHT)))


def _check(answer: dict[str, str]) -> None:
    if answer["status"] != "OK":
        raise DeploymentFailed(answer["message"])
