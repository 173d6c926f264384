"""The weights of models on a worker: from its disk, from others, and on to others."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.metrics import monotonic
from distributed.protocol.serialize import to_serialize
from distributed.threadpoolexecutor import ThreadPoolExecutor

from daskinfer import config, protocol
from daskinfer.artifact.pacing import Pace
from daskinfer.artifact.partial import FilePartial, MemoryPartial
from daskinfer.artifact.store import Held, Store
from daskinfer.logs import Log
from daskinfer.transport import read
from daskinfer.worker.download import Download, as_bytes, to_its_end
from daskinfer.worker.elsewhere import Elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Worker

    from daskinfer.artifact.chunks import Chunks
    from daskinfer.artifact.partial import Partial

logger = Log("weights")

_FOLDER = "daskinfer-artifacts"


class Weights:
    """Gets weights onto this host, and passes them on to other workers.

    Parameters
    ----------
    worker
        Whose they are.

    Notes
    -----
    Lives on the worker's event loop; files are read and written in threads.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._store: Store | None = None
        self._warned = False
        self._downloads: dict[str, Download] = {}
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._thread = ThreadPoolExecutor(2, thread_name_prefix="daskinfer-weights")
        self._pace = Pace(config.rate("artifacts.send-bandwidth"))
        worker.stream_handlers[protocol.TAKE] = self._take
        worker.handlers[protocol.CHUNK] = self._chunk

    def __repr__(self) -> str:
        return f"<Weights at {self._store} downloads: {len(self._downloads)}>"

    def close(self) -> None:
        """Let go of threads."""
        self._thread.shutdown(wait=False)

    async def get(self, chunks: Chunks) -> Held:
        """Get weights from the disk, or else from other workers and the scheduler.

        Where another process of this host is fetching them, wait for that.

        Returns
        -------
        Held
            All chunks verified.

        Raises
        ------
        InferenceError
            If nobody sends them.
        """
        lock = self._locks.setdefault(chunks.key, asyncio.Lock())
        async with lock:
            try:
                return await self._from_disk(await self._open_store(), chunks)
            except OSError as error:
                self._warn(error)
            return await self._download(None, MemoryPartial(chunks))

    async def _from_disk(self, store: Store, chunks: Chunks) -> Held:
        elsewhere = Elsewhere(
            partial(store.wait, chunks),
            partial(store.last_written, chunks),
            config.given_seconds("artifacts.timeout"),
        )
        while True:
            held: Held | None = await self._in_thread(store.open, chunks)
            if held is not None:
                self._tell_has(chunks)
                return held
            gathered = await self._begin(store, chunks, elsewhere.stands_still())
            if gathered is not None:
                return await self._download(store, gathered)
            await elsewhere.lets_go()

    async def _begin(
        self, store: Store, chunks: Chunks, alone: bool
    ) -> FilePartial | None:
        begin = partial(store.begin, chunks, alone=alone)
        opening = asyncio.get_running_loop().run_in_executor(self._thread, begin)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The file must not stay locked.
            opening.add_done_callback(_abandon)
            raise

    async def _download(self, store: Store | None, gathered: Partial) -> Held:
        key = gathered.chunks.key
        held = None
        try:
            while held is None:
                download = self._downloads[key] = Download(
                    gathered,
                    self._fetch,
                    self._worker.batched_send,
                    self._in_thread,
                    config.given_seconds("artifacts.timeout"),
                )
                try:
                    await download.run()
                    held = await self._finish(store, gathered)
                except OSError as error:
                    if not isinstance(gathered, FilePartial):
                        raise
                    self._warn(error)
                    gathered = await self._in_thread(_in_memory, gathered)
            return held
        finally:
            del self._downloads[key]
            gathered.abandon()
            if held is None or isinstance(gathered, MemoryPartial):
                # It cannot be passed on.
                message: protocol.LeavesMessage = {
                    "op": protocol.LEAVES,
                    "weights": key,
                }
                self._worker.batched_send(dict(message))

    async def _finish(self, store: Store | None, gathered: Partial) -> Held:
        if isinstance(gathered, MemoryPartial):
            return Held(gathered.memory)
        assert store is not None
        return await self._in_thread(store.finish, gathered)  # type: ignore[no-any-return]

    # The disk

    async def _open_store(self) -> Store:
        if self._store is None:
            directory = config.get("artifacts.directory")
            if directory is None:
                # Where worker processes of this host, present and future, look too.
                directory = Path(self._worker.local_directory).parent / _FOLDER
            size = config.nbytes("artifacts.size")
            self._store = await self._in_thread(Store, Path(directory), size)
        return self._store

    def _warn(self, error: OSError) -> None:
        """Say, once, that it goes on in memory."""
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "%s cannot keep weights on disk: %s. It goes on in memory: each of its "
            "models has a copy of its own, and is fetched again after a restart. Free "
            "space there, or set daskinfer.artifacts.directory to another place.",
            self._worker.address,
            error,
        )

    # Others

    def _tell_has(self, chunks: Chunks) -> None:
        message: protocol.WantsMessage = {
            "op": protocol.WANTS,
            "weights": chunks.key,
            "have": as_bytes((1 << len(chunks)) - 1),
        }
        self._worker.batched_send(dict(message))

    def _take(self, weights: str, chunk: int, source: str, stimulus_id: str) -> None:
        """Fetch a chunk: the scheduler says from where."""
        download = self._downloads.get(weights)
        if download is not None:
            download.take(chunk, source)

    async def _fetch(
        self, source: str, weights: str, start: int, nbytes: int
    ) -> memoryview:
        worker = self._worker
        peer = worker.rpc(source) if source else worker.scheduler
        answer = await peer.daskinfer_chunk(weights=weights, start=start, nbytes=nbytes)
        if answer["status"] != "OK":
            raise FileNotFoundError(f"{source or 'the scheduler'} does not have it")
        return memoryview(read(answer["data"])).cast("B")

    async def _chunk(self, weights: str, start: int, nbytes: int) -> dict[str, Any]:
        """Pass some bytes on; who asked verifies them."""
        data = await self._in_thread(self._read, weights, start, nbytes)
        if data is None or len(data) != nbytes:
            return {"status": "missing"}
        await asyncio.sleep(self._pace.delay(nbytes, monotonic()))
        return {"status": "OK", "data": to_serialize(memoryview(data))}

    def _read(self, weights: str, start: int, nbytes: int) -> bytes | memoryview | None:
        download = self._downloads.get(weights)
        if download is not None:
            gathered = download.gathered
            if start // gathered.chunks.chunk_size in gathered.whole:
                with contextlib.suppress(OSError):  # it has just been finished
                    return gathered.read(start, nbytes)
        store = self._store
        return None if store is None else store.read(weights, start, nbytes)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await to_its_end(loop.run_in_executor(self._thread, function, *args))


def _in_memory(gathered: FilePartial) -> MemoryPartial:
    """Go on in memory with what has come so far."""
    other = MemoryPartial(gathered.chunks)
    other.take_over(gathered)
    gathered.abandon()
    return other


def _abandon(opening: asyncio.Future[FilePartial | None]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        gathered = opening.result()
        if gathered is not None:
            gathered.abandon()
