"""What is changed in the scheduler's state: the life of a request's task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dask.typing import Key

from daskinfer.streams import tune
from scheduler_plugins.answers import Answers
from scheduler_plugins.taskstate import adapting, guards
from scheduler_plugins.taskstate.arriving import PARKED, Arriving
from scheduler_plugins.taskstate.changes import Changes
from scheduler_plugins.taskstate.failing import Failing

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

    from daskinfer import protocol
    from scheduler_plugins.taskstate.adapting import Scaler


#: Dask counts the deaths of workers for everything that was processing there, also
#: for what was queued behind the cause. From so low it never comes to a verdict; the
#: engine has its own.
_NEVER_SUSPECT = -(2**31)


class TaskStates(Arriving, Failing):
    """Parks, dispatches, completes and fails requests in a scheduler's state.

    Parameters
    ----------
    scheduler
        The scheduler whose tasks these are.
    """

    def guard(self, is_request: Callable[[Key], bool], scaler: Scaler) -> None:
        """Keep Dask's time-outs and autoscaling from misreading requests."""
        guards.guard(self.scheduler, is_request)
        adapting.answer(self.scheduler, is_request, scaler)

    def replace_gather(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Answer ``Client.gather`` with a handler; return Dask's own."""
        own: Callable[..., Any] = self.scheduler.handlers["gather"]
        self.scheduler.handlers["gather"] = handler
        return own

    def tune_stream(self, address: str, interval: float) -> None:
        """Shorten the interval in which messages to a worker are collected."""
        tune(self.scheduler.stream_comms.get(address), interval)

    def tune_client_stream(self, client: str, interval: float) -> None:
        """Shorten the interval in which messages to a client are collected."""
        tune(self.scheduler.client_comms.get(client), interval)

    def tell(self, client: str, message: dict[str, Any]) -> None:
        """Send a message to a client, if it is still there."""
        self.scheduler.report(message, client=client)

    def dispatch(
        self, keys: Sequence[Key], address: str, stimulus_id: str
    ) -> dict[Key, int]:
        """Move parked requests to ``processing`` on a worker.

        Returns
        -------
        dict
            The run id of each, which tells this attempt from any other. A request
            that is not parked any more is left out.
        """
        s = self.scheduler
        ws = s.workers[address]
        stealing = s.extensions.get("stealing")
        target = {address}
        run_ids: dict[Key, int] = {}
        changes = Changes(s)
        for key in keys:
            ts = s.tasks.get(key)
            if ts is None or ts.state != "no-worker":
                continue
            ts.worker_restrictions = target
            ts.suspicious = _NEVER_SUSPECT
            recommendations, client_msgs, _ = s._transition(
                key, "processing", stimulus_id
            )
            # It parks again by itself if Dask ever releases it.
            ts.worker_restrictions = set(PARKED)
            changes.add((recommendations, client_msgs, {}))
            if ts.processing_on is not ws:
                continue
            if stealing is not None:
                stealing.remove_key_from_stealable(ts)
                # Where it would stay until one of its kind succeeds, perhaps for ever.
                stealing.unknown_durations.get(ts.prefix.name, set()).discard(ts)
            # Requests take no task slot. Counted as if they did, the user's own
            # tasks would be held back until all inference has ended.
            ws.add_to_long_running(ts)
            assert ts.run_id is not None
            run_ids[key] = ts.run_id
        s.check_idle_saturated(ws)
        changes.apply(stimulus_id)
        return run_ids

    def is_current(self, key: Key, address: str, run_id: int) -> bool:
        """Whether this attempt of a request is the one that counts."""
        ts = self.scheduler.tasks.get(key)
        return (
            ts is not None
            and ts.state == "processing"
            and ts.run_id == run_id
            and ts.processing_on is not None
            and ts.processing_on.address == address
        )

    def complete(
        self,
        message: protocol.DoneMessage,
        run_ids: dict[Key, int],
        address: str,
        clients: dict[Key, str | None],
        metadata: Callable[[Key], dict[str, Any]],
        startstop: dict[str, Any],
    ) -> list[Key]:
        """Take over the results a worker has stored, in one step.

        Parameters
        ----------
        message
            What the worker said.
        run_ids
            The attempts of its batch, from :meth:`dispatch`.
        clients
            Who takes a small result with the word that it exists.
        metadata
            What to keep with each task that is answered now.
        startstop
            Its share of the batch's time, for Dask's task stream.

        Returns
        -------
        list of keys
            Those that were answered now. The worker is told to drop the others.
        """
        s = self.scheduler
        ws = s.workers.get(address)
        if ws is None:
            return []
        stimulus_id = message["stimulus_id"]
        changes = Changes(s)
        completed: list[Key] = []
        stale: list[Key] = []
        answers = Answers(message["pack"])
        types, typenames = message["types"], message["typenames"]
        for place, (key, nbytes, index) in enumerate(
            zip(message["keys"], message["nbytes"], message["type_index"], strict=True)
        ):
            ts = s.tasks.get(key)
            if (
                ts is not None
                and ts.state == "processing"
                and ts.run_id == run_ids.get(key)
                and ts.processing_on is ws
            ):
                ts.metadata = {**(ts.metadata or {}), "daskinfer": metadata(key)}
                changes.add(
                    s._transition(
                        key,
                        "memory",
                        stimulus_id,
                        worker=address,
                        nbytes=nbytes,
                        type=types[index],
                        typename=typenames[index],
                        metadata=ts.metadata,
                        thread=0,
                        status="OK",
                        startstops=[startstop],
                    )
                )
                completed.append(key)
                answers.add(clients.get(key), key, place)
            elif not _is_expected_on(ts, ws):
                # Dask does not drop late results by itself.
                stale.append(key)
        if stale:
            changes.tell_worker(
                address,
                {"op": "free-keys", "keys": stale, "stimulus_id": stimulus_id},
            )
        for name, answer in answers.messages():
            changes.tell_client_first(name, answer)
        changes.apply(stimulus_id)
        s.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)
        return completed

    def metadata_of(self, key: Key) -> dict[str, Any] | None:
        """What :meth:`complete` kept with a task."""
        ts = self.scheduler.tasks.get(key)
        found = (ts.metadata or {}).get("daskinfer") if ts is not None else None
        return None if found is None else dict(found)

    def adopt(
        self, keys: Iterable[Key], address: str, stimulus_id: str
    ) -> dict[Key, int]:
        """Let a worker have computed requests that were given up there.

        Whoever runs them now is called off. Must be followed by :meth:`complete`.

        Returns
        -------
        dict
            The run ids of those that are still wanted, as of :meth:`dispatch`.
        """
        tasks = self.scheduler.tasks
        wanted = [
            key
            for key in keys
            if key in tasks and tasks[key].state in ("no-worker", "processing")
        ]
        self.release_running(wanted, stimulus_id)
        return self.dispatch(wanted, address, stimulus_id)

    def park_running(self, keys: Iterable[Key], stimulus_id: str) -> None:
        """Park requests again, and let their worker keep what it may yet send."""
        s = self.scheduler
        changes = Changes(s)
        for key in keys:
            ts = s.tasks.get(key)
            if ts is not None and ts.state == "processing":
                # Dask would tell the worker to forget a result that has been stored
                # meanwhile, which then is there when it is said to be, and gone after.
                recommendations, client_msgs, _ = s._transition(
                    key, "released", stimulus_id
                )
                changes.add((recommendations, client_msgs, {}))
        changes.apply(stimulus_id)

    def release_running(self, keys: Iterable[Key], stimulus_id: str) -> None:
        """Park requests again that are processing somewhere."""
        tasks = self.scheduler.tasks
        self.scheduler.transitions(
            {
                key: "released"
                for key in keys
                if key in tasks and tasks[key].state == "processing"
            },
            stimulus_id,
        )


def _is_expected_on(ts: TaskState | None, ws: WorkerState) -> bool:
    """Whether a worker is to keep what it has, or to replace it by a later attempt."""
    return ts is not None and (ws in (ts.who_has or ()) or ts.processing_on is ws)
