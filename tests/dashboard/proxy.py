"""A reverse proxy as operators put before a dashboard, in a process of its own.

``python -m tests.dashboard.proxy PORT UPSTREAM PREFIX [STRIPPED]`` passes on what comes
under a prefix, and nothing else: pages as well as websockets. With ``STRIPPED`` it
takes that prefix off the paths.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.web import Application, RequestHandler
from tornado.websocket import (
    WebSocketClientConnection,
    WebSocketHandler,
    websocket_connect,
)

#: Headers of one connection, which the next one has of its own.
_OWN = {"Host", "Connection", "Upgrade", "Content-Length", "Content-Encoding"}


def passed_on(headers: Any) -> dict[str, str]:
    """Headers that are for the other side."""
    return {
        name: value
        for name, value in headers.get_all()
        if name not in _OWN
        and not name.startswith(("Sec-Websocket", "Transfer-", "Accept-Encoding"))
    }


def target(handler: RequestHandler, scheme: str) -> str:
    """Where a request goes on to."""
    settings = handler.application.settings
    path = handler.request.uri or "/"
    return f"{scheme}://{settings['upstream']}{path.removeprefix(settings['strip'])}"


class Pages(RequestHandler):
    """Passes on requests and answers."""

    async def get(self) -> None:
        """Ask the other side."""
        request = HTTPRequest(
            target(self, "http"),
            headers=passed_on(self.request.headers),
            follow_redirects=False,
        )
        answer = await AsyncHTTPClient().fetch(request, raise_error=False)
        self.set_status(answer.code)
        for name, value in passed_on(answer.headers).items():
            self.set_header(name, value)
        self.finish(answer.body)


class Sockets(WebSocketHandler):
    """Passes on messages, both ways."""

    upstream: WebSocketClientConnection

    async def get(self, *args: Any, **kwargs: Any) -> None:
        """Connect to the other side first, so that nothing that comes is lost."""
        offered = self.request.headers.get("Sec-WebSocket-Protocol", "")
        self.upstream = await websocket_connect(
            HTTPRequest(target(self, "ws"), headers=passed_on(self.request.headers)),
            subprotocols=[name.strip() for name in offered.split(",")],
        )
        await super().get(*args, **kwargs)

    def select_subprotocol(self, subprotocols: list[str]) -> str | None:
        """Take the one that the other side has taken."""
        return self.upstream.selected_subprotocol

    def open(self, *args: Any, **kwargs: Any) -> None:
        """Begin to pass on."""
        self._task = asyncio.ensure_future(self._receive())

    async def _receive(self) -> None:
        while (message := await self.upstream.read_message()) is not None:
            await self.write_message(message, binary=isinstance(message, bytes))
        self.close()

    async def on_message(self, message: str | bytes) -> None:
        """Pass on one of the browser's."""
        await self.upstream.write_message(message, binary=isinstance(message, bytes))

    def on_close(self) -> None:
        """Hang up with the other side, too."""
        self.upstream.close()


async def serve(port: int, upstream: str, prefix: str, stripped: bool) -> None:
    """Pass on until the process ends."""
    strip = prefix if stripped else ""
    routes: list[Any] = [(f"{prefix}/.*/ws", Sockets), (f"{prefix}/.*", Pages)]
    Application(routes, upstream=upstream, strip=strip).listen(port, "127.0.0.1")
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), *sys.argv[2:4], "STRIPPED" in sys.argv))
