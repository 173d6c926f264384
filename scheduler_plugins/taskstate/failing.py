"""How requests fail, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dask.typing import Key

from daskinfer.failure import dump_failure
from scheduler_plugins.taskstate.changes import Changes
from scheduler_plugins.taskstate.facts import Facts

if TYPE_CHECKING:
    from daskinfer import protocol


class Failing(Facts):
    """Fails requests, or parks them again while Dask has retries left for them."""

    def fail_running(
        self,
        failures: dict[Key, protocol.Failure],
        run_ids: dict[Key, int],
        address: str,
        stimulus_id: str,
    ) -> list[Key]:
        """Fail requests on a worker, or park them again while retries are left.

        Returns
        -------
        list of keys
            Those that have failed for good.
        """
        s = self.scheduler
        changes = Changes(s)
        failed: list[Key] = []
        for key, failure in failures.items():
            ts = s.tasks.get(key)
            if ts is None or key not in run_ids or ts.run_id != run_ids[key]:
                # Another attempt runs by now, or another request has the key.
                continue
            if ts.state == "no-worker" and not ts.processing_on:
                # The worker's own message that it could not keep the result came
                # first, without a run id, and parked the request.
                changes.add(
                    s._transition(key, "erred", stimulus_id, cause=key, **failure)
                )
                failed.append(key)
                continue
            current = ts.state == "processing"
            changes.add(
                s.stimulus_task_erred(
                    key=key,
                    worker=address,
                    stimulus_id=stimulus_id,
                    run_id=run_ids[key],
                    **failure,
                )
            )
            if current and ts.state == "erred":
                failed.append(key)
        changes.apply(stimulus_id)
        s.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)
        return failed

    def fail_parked(
        self, keys: Iterable[Key], error: Exception, stimulus_id: str
    ) -> list[Key]:
        """Fail requests that wait for a worker, with an exception made here."""
        parked = [key for key in keys if self.is_parked(key)]
        return self.fail(parked, error, stimulus_id)

    def fail(
        self, keys: Iterable[Key], error: Exception, stimulus_id: str
    ) -> list[Key]:
        """Fail requests whatever they wait for, also those that run somewhere.

        Returns
        -------
        list of keys
            Those that had not ended before.
        """
        s = self.scheduler
        failure = dump_failure(error)
        changes = Changes(s)
        failed: list[Key] = []
        for key in keys:
            ts = s.tasks.get(key)
            if ts is None or ts.state not in ("waiting", "no-worker", "processing"):
                continue
            if ts.state == "waiting":
                # Dask fails what waits for inputs only if an input has failed.
                ts.exception_blame = ts
                ts.exception = failure["exception"]
                ts.traceback = failure["traceback"]
                ts.exception_text = failure["exception_text"]
                ts.traceback_text = failure["traceback_text"]
                changes.add(s._transition(key, "erred", stimulus_id))
            else:
                changes.add(
                    s._transition(key, "erred", stimulus_id, cause=key, **failure)
                )
            failed.append(key)
        changes.apply(stimulus_id)
        s.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)
        return failed

    def spend_retry(self, key: Key) -> bool:
        """Use up one of the user's ``retries=``, if any is left."""
        ts = self.scheduler.tasks.get(key)
        if ts is None or ts.retries <= 0:
            return False
        ts.retries -= 1
        return True

    def forgo_retries(self, key: Key) -> None:
        """Let a request fail for good the next time, whatever its ``retries=``."""
        ts = self.scheduler.tasks.get(key)
        if ts is not None:
            ts.retries = 0

    def refuse(self, keys: Iterable[Key], client: str, error: Exception) -> None:
        """Tell a client that no tasks were made of its requests."""
        failure = dump_failure(error)
        for key in keys:
            message = {
                "op": "task-erred",
                "key": key,
                "exception": failure["exception"],
                "traceback": failure["traceback"],
            }
            self.scheduler.report(message, client=client)
