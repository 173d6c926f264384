"""Making sure that a client's scheduler understands daskinfer.

A stream message that a scheduler does not know makes it drop the client's
connection. So before the first one on each connection, the plugin is registered,
which does nothing where it is there already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client

_EXTENSION = "daskinfer-connection"


def calls(client: Client) -> Any:
    """The scheduler's calls, as methods to await."""
    return client.scheduler


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
    """
    from scheduler_plugins import InferencePlugin

    connection = client.scheduler_comm
    await client.register_plugin(InferencePlugin())
    client.extensions[_EXTENSION] = connection
