"""Making sure that a client's scheduler understands daskinfer.

A stream message that a scheduler does not know makes it drop the client's
connection. So before the first one on each connection, the plugin is registered,
which does nothing where it is there already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskinfer.loss import SCHEDULER, Calls, until_lost

if TYPE_CHECKING:
    from distributed import Client

_EXTENSION = "daskinfer-connection"


def calls(client: Client) -> Any:
    """The scheduler's calls, as methods to await."""
    return Calls(client)


def is_installed(client: Client) -> bool:
    """Whether :func:`install` has succeeded on the client's present connection."""
    connection = client.scheduler_comm
    return connection is not None and (client.extensions.get(_EXTENSION) is connection)


async def install(client: Client) -> None:
    """Register the scheduler plugin, if it is not there yet.

    Raises
    ------
    ImportError
        If daskinfer is not installed where the scheduler runs.
    SchedulerLost
        If it is gone.
    """
    from scheduler_plugins import InferencePlugin

    connection = client.scheduler_comm
    await until_lost(client, client.register_plugin, InferencePlugin())
    client.extensions[_EXTENSION] = connection
    # Dask forgets it when the client is closed.
    client.extensions[SCHEDULER] = client._scheduler_identity.get("id")


def is_same_scheduler(closed: Client, other: Client) -> bool:
    """Whether a client speaks to the scheduler that a closed one has spoken to."""
    known: str | None = closed.extensions.get(SCHEDULER)
    return known is not None and known == other._scheduler_identity.get("id")
