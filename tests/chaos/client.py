"""One client, a process of its own: sends what its script says, judges what comes.

Started by :mod:`tests.chaos.run`. It says ``ready``, waits for a line, and says in
JSON what became of its requests.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import dask
from distributed import Client, Future

import daskinfer
from daskinfer import BatchPolicy, Model, RetryPolicy
from tests.chaos.judge import Asked, Ended, Tally
from tests.chaos.models import row, warmup
from tests.chaos.plan import BATCH_TIMEOUT, LIMITED, Plan, Step

#: By then everything has ended, or never will.
PATIENCE = 120.0
#: Requests of a client that are not answered, above which it sends no more for a while:
#: how long they take shall not depend on how slow the machine is.
MOST_UNANSWERED = 500


async def deploy(client: Client, name: str) -> Model:
    """Deploy a model of :mod:`tests.chaos.models` under a name."""
    limits: dict[str, Any] = {}
    if name == LIMITED:
        # Nobody shall fail for having met several frozen workers.
        retry = RetryPolicy(max_attempts=10)
        limits = {"batch_timeout": BATCH_TIMEOUT, "retry": retry}
    return await daskinfer.deploy(
        client,
        factory="tests.chaos.models:build",
        factory_kwargs={"name": name},
        name=name,
        batching=BatchPolicy(max_batch_size=32),
        warmup=warmup(name),
        **limits,
    )


class Actor:
    """Plays a script.

    Parameters
    ----------
    client
        An asynchronous client.
    script
        What to send, in order.
    """

    def __init__(self, client: Client, script: tuple[Step, ...]) -> None:
        self.tally = Tally()
        self._client = client
        self._script = script
        self._models: dict[str, asyncio.Task[Model]] = {}
        self._unanswered = 0
        self._may_send = asyncio.Event()
        self._may_send.set()

    async def play(self) -> None:
        """Send everything when it is time, and judge every end."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        playing = []
        for step in self._script:
            await asyncio.sleep(max(start + step.at - loop.time(), 0))
            await self._may_send.wait()
            self._count(len(step.codes))
            playing.append(asyncio.create_task(self._play(step)))
        await asyncio.gather(*playing)

    def _model(self, name: str) -> asyncio.Task[Model]:
        if name not in self._models:
            find = deploy if name.startswith("own") else daskinfer.get
            self._models[name] = asyncio.ensure_future(
                _awaited(find(self._client, name))
            )
        return self._models[name]

    async def _play(self, step: Step) -> None:
        model = await self._model(step.name)
        xs = [row(step.first + i, code) for i, code in enumerate(step.codes)]
        # The first half of a chain is held until all has ended.
        inputs = model.map(xs) if step.way == "chain" else xs
        futures = self._send(step, model, inputs)
        loop = asyncio.get_running_loop()
        sent = loop.time()
        asked = [
            Asked(
                future.key,
                step.name,
                step.first + i,
                code,
                step.timeout is not None,
                i in step.cancelled,
                times=2 if step.way == "chain" else 1,
            )
            for i, (future, code) in enumerate(zip(futures, step.codes, strict=True))
        ]
        calls = [0] * len(futures)
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: _count(calls, i))
        if step.cancelled:
            await asyncio.sleep(step.cancel_after)
            await self._client.cancel([futures[i] for i in step.cancelled])
        ended = [
            await _end_of(future, max(sent + PATIENCE - loop.time(), 1.0))
            for future in futures
        ]
        seconds = loop.time() - sent
        self._count(-len(step.codes))
        # The callbacks run in a thread of their own.
        await _until(lambda: all(calls))
        for one, its, count in zip(asked, ended, calls, strict=True):
            its.callbacks, its.seconds = count, seconds
            self.tally.note(one, its)

    def _count(self, sent: int) -> None:
        self._unanswered += sent
        if self._unanswered < MOST_UNANSWERED:
            self._may_send.set()
        else:
            self._may_send.clear()

    def _send(self, step: Step, model: Model, xs: list[Any]) -> list[Future[Any]]:
        if step.way != "submit":
            return model.options(timeout=step.timeout).map(xs)
        annotation = {} if step.timeout is None else {"timeout": step.timeout}
        with dask.annotate(daskinfer=annotation):
            return [self._client.submit(model, x, pure=False) for x in xs]


def _count(calls: list[int], i: int) -> None:
    calls[i] += 1


async def _awaited(something: Any) -> Any:
    return await something


async def _end_of(future: Future[Any], patience: float) -> Ended:
    try:
        result = await asyncio.wait_for(future.result(), patience)
    except asyncio.TimeoutError:
        if future.status == "error":  # DeadlineExceeded is of that type too
            return Ended("error", 0, error=await future.exception())
        return Ended(f"still {future.status} after {PATIENCE:g} s", 0)
    except Exception as error:
        return Ended(future.status, 0, error=error)
    # That its worker has died since, and the time was short for a second answer, takes
    # nothing away from the first.
    return Ended("finished", 0, result=float(result[0, 0]))


async def _until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; the judge says what it means if it never is."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 10
    while not condition() and loop.time() < deadline:
        await asyncio.sleep(0.001)


async def main(
    address: str, seed: int, seconds: float, pace: float, number: int
) -> None:
    """Be one of the plan's clients."""
    script = Plan.of(seed, seconds, pace).scripts[number]
    loop = asyncio.get_running_loop()
    async with Client(address, asynchronous=True) as client:
        print("ready", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        actor = Actor(client, script)
        await actor.play()
        print(json.dumps(actor.tally.to_message()), flush=True)


if __name__ == "__main__":
    _, _address, _seed, _seconds, _pace, _number = sys.argv
    asyncio.run(main(_address, int(_seed), float(_seconds), float(_pace), int(_number)))
