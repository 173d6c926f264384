"""Fetching many small results at once, on their way through the scheduler.

Dask reads every small array as several frames, one by one. Here each worker packs
all results that were asked for into a few buffers, which the scheduler hands on
unread.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dask.typing import Key
from distributed.protocol.serialize import to_serialize

from daskinfer import transport

if TYPE_CHECKING:
    from scheduler_plugins.taskstate import TaskStates


class Fetching:
    """Fetches results from workers, packed where they are small.

    Parameters
    ----------
    tasks
        Knows where results are, and speaks to the workers.
    is_request
        Whether a key is a request of ours.
    limit
        Bytes of a result that counts as small.

    Attributes
    ----------
    clients
        Those that have sent requests, and so have this package to read packs with.
    """

    def __init__(
        self, tasks: TaskStates, is_request: Callable[[Key], bool], limit: int
    ) -> None:
        self.clients: set[str] = set()
        self._tasks = tasks
        self._is_request = is_request
        self._limit = limit
        self._gather = tasks.replace_gather(self.gather)

    def __repr__(self) -> str:
        return f"<Fetching for {len(self.clients)} clients>"

    async def gather(
        self, keys: Collection[Key], serializers: list[str] | None = None
    ) -> dict[str, Any]:
        """Answer ``Client.gather``, which Dask asks the scheduler for.

        Falls back to Dask's own way wherever a result is not known to be small, and
        still there.
        """
        if serializers is None and len(keys) > 1 and all(map(self._is_small, keys)):
            answer = await self.packed(keys)
            if not answer["missing"]:
                return {"status": "OK", "data": to_serialize(_Packs(answer["packs"]))}
        answer = await self._gather(keys=keys, serializers=serializers)
        return dict(answer)

    async def packed(self, keys: Collection[Key]) -> dict[str, Any]:
        """Ask the workers that hold results for packs of them.

        Returns
        -------
        dict
            ``packs``: what each worker answered; ``missing``: keys nobody held, or
            whose worker did not answer.
        """
        by_worker: defaultdict[str, list[Key]] = defaultdict(list)
        missing: list[Key] = []
        for key in keys:
            holder = self._tasks.holder(key)
            if holder is None:
                missing.append(key)
            else:
                by_worker[holder].append(key)
        answers = await asyncio.gather(
            *(
                self._tasks.call(address).daskinfer_fetch(keys=wanted)
                for address, wanted in by_worker.items()
            ),
            return_exceptions=True,
        )
        packs = []
        for wanted, answer in zip(by_worker.values(), answers, strict=True):
            if isinstance(answer, OSError):
                missing.extend(wanted)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                packs.append(answer)
                missing.extend(answer["missing"])
        return {"packs": packs, "missing": missing}

    def _is_small(self, key: Key) -> bool:
        return (
            self._is_request(key)
            and 0 <= self._tasks.result_nbytes(key) <= self._limit
            and self.clients.issuperset(self._tasks.wanted_by(key))
        )


class _Packs(Mapping[Key, Any]):
    """Results by key, packed: a client that unpickles this gets a plain dict.

    A client in the scheduler's own process, which messages reach as they are, finds
    the results in it.
    """

    def __init__(self, packs: list[dict[str, Any]]) -> None:
        self._packs = packs

    def __reduce__(self) -> tuple[Any, ...]:
        return transport.merge, (self._plain(),)

    def __getitem__(self, key: Key) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @cached_property
    def _values(self) -> dict[Key, Any]:
        return transport.merge(self._plain())

    def _plain(self) -> list[dict[str, Any]]:
        return [
            {**pack, "frames": [transport.read(frame) for frame in pack["frames"]]}
            for pack in self._packs
        ]
