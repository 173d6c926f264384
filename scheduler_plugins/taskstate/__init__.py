"""The only package that touches the inner state of Dask's scheduler.

A request is an ordinary Dask task that no worker is ever asked to compute. It is
*parked* in the state ``no-worker`` by a restriction to an address that does not
exist; when its batch is sent it is moved to ``processing`` on the chosen worker by
Dask's own transition, whose compute-task message is thrown away; when the batch is
answered it goes to ``memory``, again by Dask's own transition. So whatever Dask
does with tasks (progress bars, task streams, cancellation, recomputing what a dead
worker held) works for requests too.

``facts``
    what is read: tasks, workers, who holds what
``arriving``
    tasks made or caught, and parked
``requests``
    dispatched to a worker, completed, parked again
``failing``
    failed, wherever they are
``guards``
    what Dask would do with parked tasks, and should not
``adapting``
    how many workers there should be, and which of them may go

Everything here runs on the scheduler's event loop.
"""

from __future__ import annotations

from scheduler_plugins.taskstate.arriving import PARKED_AT, NewTask
from scheduler_plugins.taskstate.facts import FastTask, Observed
from scheduler_plugins.taskstate.requests import TaskStates

__all__ = ["PARKED_AT", "FastTask", "NewTask", "Observed", "TaskStates"]
