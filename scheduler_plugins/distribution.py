"""Has the weights of versions reach the workers: from clients, then from each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from distributed.metrics import monotonic
from distributed.protocol.serialize import to_serialize
from distributed.threadpoolexecutor import ThreadPoolExecutor

from daskinfer import config, protocol
from daskinfer.artifact.chunks import Chunks
from daskinfer.artifact.pacing import Pace
from daskinfer.guarding import guarded
from daskinfer.logs import Log
from daskinfer.transport import read
from scheduler_plugins.origin import Spool
from scheduler_plugins.swarm import Swarm

logger = Log("distribution")

#: Times as long as a transfer may take, a worker has to say how one went.
_STALLED = 2.0


@dataclass(slots=True)
class Entry:
    """Some weights: where they are kept here, who is to get what, and for whom."""

    spool: Spool
    swarm: Swarm
    holders: set[Hashable] = field(default_factory=set)
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)

    def close(self) -> None:
        """Let go of the file."""
        for timer in self.timers.values():
            timer.cancel()
        self.spool.close()


class Distribution:
    """Keeps the weights of what is deployed, and says who fetches them from whom.

    Weights are known by the key of their chunks: what two versions have in common is
    kept once.

    Parameters
    ----------
    send
        Sends a message to a worker: ``send(address, message)``.

    Attributes
    ----------
    entries
        All weights, by key.
    """

    def __init__(self, send: Callable[[str, Any], None]) -> None:
        self.entries: dict[str, Entry] = {}
        self._send = send
        self._offers: dict[int, tuple[str, str]] = {}
        self._numbers = count(1)
        self._thread = ThreadPoolExecutor(2, thread_name_prefix="daskinfer-origin")
        self._timeout = config.given_seconds("artifacts.timeout")
        self._pace = Pace(config.rate("artifacts.send-bandwidth"))

    def __repr__(self) -> str:
        return f"<Distribution weights: {len(self.entries)}>"

    def calls(self) -> dict[str, Callable[..., Any]]:
        """What clients and workers may ask, by name."""
        return {
            protocol.OFFER: self.offer,
            protocol.UPLOAD: self.upload,
            protocol.WITHDRAW: self.withdraw,
            protocol.CHUNK: self.chunk,
        }

    def streams(self) -> dict[str, Callable[..., None]]:
        """What workers tell, by name."""
        return {
            protocol.WANTS: self.wants,
            protocol.GOT: self.got,
            protocol.NOT_GOT: self.not_got,
            protocol.LEAVES: self.leaves,
        }

    def close(self) -> None:
        """Let go of all files."""
        for entry in self.entries.values():
            entry.close()
        self.entries.clear()
        self._thread.shutdown(wait=False)

    # Versions

    def check(self, artifact: dict[str, Any]) -> None:
        """Make sure that the weights of an artifact are here.

        Raises
        ------
        ValueError
            If they have not been uploaded.
        """
        key = _key_of(artifact)
        if key is None:
            return
        entry = self.entries.get(key)
        if entry is None or entry.spool.missing:
            raise ValueError(f"the weights of {artifact['label']} did not arrive")

    def hold(self, artifact: dict[str, Any], holder: Hashable) -> None:
        """Keep the weights of an artifact for a version."""
        key = _key_of(artifact)
        if key is not None:
            self.entries[key].holders.add(holder)

    def release(self, artifact: dict[str, Any], holder: Hashable) -> None:
        """A version needs its weights no more."""
        self._release(_key_of(artifact), holder)

    def _release(self, key: str | None, holder: Hashable) -> None:
        entry = self.entries.get(key or "")
        if entry is None:
            return
        entry.holders.discard(holder)
        if not entry.holders:
            del self.entries[str(key)]
            entry.close()

    # Clients

    async def offer(self, client: str, chunks: dict[str, Any]) -> dict[str, Any]:
        """A client has weights; tell it which chunks of them are missing here."""
        wanted = Chunks.from_message(chunks)
        if wanted.key not in self.entries:
            try:
                spool = await self._in_thread(Spool, wanted)
            except OSError as error:
                return _no_room(error)
            if wanted.key in self.entries:  # another client was faster
                spool.close()
            else:
                self.entries[wanted.key] = Entry(spool, Swarm(len(wanted)))
        number = next(self._numbers)
        entry = self.entries[wanted.key]
        entry.holders.add(number)
        self._offers[number] = client, wanted.key
        return {"status": "OK", "offer": number, "missing": entry.spool.missing}

    async def upload(self, offer: int, chunk: int, data: Any) -> dict[str, Any]:
        """Take a chunk in."""
        _, key = self._offers[offer]
        content = memoryview(read(data)).cast("B")
        try:
            whole = await self._in_thread(self.entries[key].spool.write, chunk, content)
        except OSError as error:
            return _no_room(error)
        if not whole:
            return {
                "status": "error",
                "message": f"chunk {chunk} of the weights arrived damaged; try again",
            }
        return {"status": "OK"}

    async def withdraw(self, offer: int) -> None:
        """The client has deployed what it wanted to, or has given it up."""
        _, key = self._offers.pop(offer, ("", None))
        self._release(key, offer)

    def client_left(self, client: str) -> None:
        """A client is gone, and what it was about to deploy."""
        for number, (owner, key) in list(self._offers.items()):
            if owner == client:
                del self._offers[number]
                self._release(key, number)

    # Workers

    async def chunk(self, weights: str, start: int, nbytes: int) -> dict[str, Any]:
        """Some bytes of some weights."""
        entry = self.entries.get(weights)
        if entry is None:
            return {"status": "missing"}
        data = await self._in_thread(entry.spool.read, start, nbytes)
        await asyncio.sleep(self._pace.delay(len(data), monotonic()))
        return {"status": "OK", "data": to_serialize(memoryview(data))}

    @guarded
    def wants(self, weights: str, have: bytes, worker: str) -> None:
        """A worker wants some weights, or has them."""
        entry = self.entries.get(weights)
        if entry is not None:
            entry.swarm.wants(worker, int.from_bytes(have, "little"))
            self._assign(weights, entry)

    @guarded
    def got(
        self, weights: str, chunk: int, source: str, reason: str, worker: str
    ) -> None:
        """A worker has got a chunk."""
        entry = self.entries.get(weights)
        if entry is not None:
            entry.swarm.got(worker, chunk)
            self._heard(weights, entry, worker)

    @guarded
    def not_got(
        self, weights: str, chunk: int, source: str, reason: str, worker: str
    ) -> None:
        """A worker could not get a chunk."""
        entry = self.entries.get(weights)
        if entry is not None:
            giver = source or "the scheduler"
            logger.info(
                "%s got no chunk from %s: %s",
                *(worker, giver, reason),
                stimulus_id=f"daskinfer-take-{weights}",
            )
            entry.swarm.failed(worker, chunk, source)
            self._heard(weights, entry, worker)

    @guarded
    def leaves(self, weights: str, worker: str) -> None:
        """A worker has given up some weights."""
        entry = self.entries.get(weights)
        if entry is not None:
            self._leave(weights, entry, worker)

    def worker_left(self, worker: str) -> None:
        """A worker is gone."""
        for weights, entry in self.entries.items():
            self._leave(weights, entry, worker)

    def _leave(self, weights: str, entry: Entry, worker: str) -> None:
        entry.swarm.left(worker)
        self._heard(weights, entry, worker)

    def _heard(self, weights: str, entry: Entry, worker: str) -> None:
        timer = entry.timers.pop(worker, None)
        if timer is not None:
            timer.cancel()
        if entry.swarm.is_fetching(worker):
            self._expect(weights, entry, worker)
        self._assign(weights, entry)

    def _assign(self, weights: str, entry: Entry) -> None:
        for worker, chunk, source in entry.swarm.decide():
            message: protocol.TakeMessage = {
                "op": protocol.TAKE,
                "weights": weights,
                "chunk": chunk,
                "source": source,
                "stimulus_id": f"daskinfer-take-{weights}",
            }
            self._send(worker, dict(message))
            if worker not in entry.timers:
                self._expect(weights, entry, worker)

    def _expect(self, weights: str, entry: Entry, worker: str) -> None:
        entry.timers[worker] = asyncio.get_running_loop().call_later(
            _STALLED * self._timeout, self._stalled, weights, entry, worker
        )

    def _stalled(self, weights: str, entry: Entry, worker: str) -> None:
        logger.warning(
            "%s says nothing of the weights that it fetches",
            worker,
            stimulus_id=f"daskinfer-take-{weights}",
        )
        entry.timers.pop(worker, None)
        entry.swarm.stalled(worker)
        self._assign(weights, entry)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *args)


def _key_of(artifact: dict[str, Any]) -> str | None:
    """The key of weights that do not travel with the artifact itself."""
    if artifact["chunks"] is None or artifact["weights"] is not None:
        return None
    return Chunks.from_message(artifact["chunks"]).key


def _no_room(error: OSError) -> dict[str, Any]:
    return {
        "status": "error",
        "message": "the scheduler cannot keep the weights in Dask's "
        f"temporary-directory: {error.strerror or error}",
    }
