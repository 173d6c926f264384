"""How a worker has its Nanny start its process anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from daskinfer.logs import Log

if TYPE_CHECKING:
    from distributed import Worker

logger = Log("restarting")


async def start_anew(worker: Worker, reason: str, stimulus_id: str) -> None:
    """Move the results in a worker's memory to others, and end its process.

    Parameters
    ----------
    worker
        It must have a Nanny.
    reason
        Why, for the logs.
    stimulus_id
        What Dask's logs call it.

    Notes
    -----
    ``Worker.close_gracefully(restart=True)`` does the same, unless it is overtaken: the
    scheduler ends the connection of a worker that has retired, upon which the worker
    closes once more, and tells its Nanny to close as well.
    """
    try:
        await worker.scheduler.retire_workers(
            workers=[worker.address],
            close_workers=False,
            remove=False,
            stimulus_id=stimulus_id,
        )
    except Exception:
        # They are computed again then.
        logger.warning(
            "Results of %s could not be moved",
            worker.address,
            exc_info=True,
            stimulus_id=stimulus_id,
        )
    async with worker.rpc(cast(str, worker.nanny)) as nanny:
        # No answer comes: that is the end of this process.
        await nanny.restart(reason=reason)
