"""Fetching many small results at once, on their way through the scheduler.

Dask reads every small array as several frames, one by one. Here each worker packs
all results that were asked for into a few buffers, which the scheduler hands on
unread.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from dask.typing import Key

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


async def gather_packed(scheduler: Scheduler, keys: list[Key]) -> dict[str, Any]:
    """Ask the workers that hold results for packs of them.

    Parameters
    ----------
    scheduler
        Whose workers to ask.
    keys
        The results wanted.

    Returns
    -------
    dict
        ``packs``: what each worker answered; ``missing``: keys nobody held, or
        whose worker did not answer.
    """
    by_worker: defaultdict[str, list[Key]] = defaultdict(list)
    missing: list[Key] = []
    for key in keys:
        ts = scheduler.tasks.get(key)
        holder = next(iter(ts.who_has), None) if ts is not None and ts.who_has else None
        if holder is None:
            missing.append(key)
        else:
            by_worker[holder.address].append(key)
    answers = await asyncio.gather(
        *(
            scheduler.rpc(address).daskinfer_fetch(keys=wanted)
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
