"""What is going to happen: all of it drawn from a seed, before anything runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

#: The deployments that are there from the start; see :mod:`tests.chaos.models`.
DEPLOYMENTS = ("quick", "tight", "slow")

#: Of these, the one whose batches may take this long only, in seconds. A worker that is
#: frozen goes beyond it; no input does so on purpose.
LIMITED = "slow"
BATCH_TIMEOUT = 1.5

WORKERS = 4
CLIENTS = 4

#: Seconds between two events of the cluster, by default.
PACE = 2.5
_TIMEOUTS = (0.2, 1.0, 4.0)


class Code(Enum):
    """What an input does to the model."""

    GOOD = 0
    RAISES = 1
    EXITS = 2
    HOLDS = 3


class Kind(Enum):
    """What happens to the cluster."""

    KILL = "kill"  # SIGKILL
    FREEZE = "freeze"  # SIGSTOP, and SIGCONT after a while
    RETIRE = "retire"
    JOIN = "join"


@dataclass(frozen=True)
class Event:
    """Something that happens to the cluster.

    Attributes
    ----------
    at
        When, in seconds from the start.
    kind
        What.
    victim
        Which worker, as a share of those that are there.
    seconds
        How long it lasts.
    """

    at: float
    kind: Kind
    victim: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Step:
    """Requests that a client sends together.

    Attributes
    ----------
    at
        When, in seconds from the start.
    name
        The deployment. A client makes one that starts with its own name at its first
        use.
    way
        ``"submit"`` through Dask's client, ``"map"`` through the handle, or
        ``"chain"``: twice through the handle, the second time on the first's futures.
    first
        The value of the first input; the others count on from there.
    codes
        What each input does.
    timeout
        Seconds that they have; None: any time.
    cancelled
        Which of them are cancelled.
    cancel_after
        When, in seconds after they were sent.
    """

    at: float
    name: str
    way: str
    first: int
    codes: tuple[Code, ...]
    timeout: float | None = None
    cancelled: tuple[int, ...] = ()
    cancel_after: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A run of the chaos test.

    Attributes
    ----------
    events
        What happens to the cluster, in order.
    scripts
        What each client does, in order. The last one's process is killed.
    deserted
        When, in seconds from the start.
    updates
        When which deployment's model is replaced.
    short
        Whether workers have room for some of the models only.
    """

    seed: int
    seconds: float
    pace: float
    events: tuple[Event, ...]
    scripts: tuple[tuple[Step, ...], ...]
    deserted: float
    updates: tuple[tuple[float, str], ...]
    short: bool = False

    @classmethod
    def of(
        cls, seed: int, seconds: float, pace: float = PACE, short: bool = False
    ) -> Plan:
        """Draw a plan, with so many seconds between two events of the cluster.

        >>> Plan.of(1, 30.0) == Plan.of(1, 30.0)
        True
        """
        chance = random.Random(seed)
        events = tuple(_events(chance, seconds, pace))
        scripts = [
            list(_steps(chance, seconds, number)) for number in range(CLIENTS + 1)
        ]
        for code, every in ((Code.EXITS, 5 * pace), (Code.HOLDS, 6 * pace)):
            for i in range(max(1, round(seconds / every))):
                _plant(
                    chance, scripts[:-1], code, i * every, min((i + 1) * every, seconds)
                )
        deserted = chance.uniform(0.2, 0.8) * seconds
        updates = tuple(_updates(random.Random(-seed), seconds, 4 * pace))
        return cls(
            seed,
            seconds,
            pace,
            events,
            tuple(map(tuple, scripts)),
            deserted,
            updates,
            short,
        )


def _events(chance: random.Random, seconds: float, pace: float) -> list[Event]:
    """Each kind has its turn before one comes again, kills and freezes twice.

    So there is never more than one worker more or less than at the start.
    """
    events: list[Event] = []
    deck: list[Kind] = []
    at = 1.0
    while at < seconds:
        if not deck:
            deck = [*Kind, Kind.KILL, Kind.FREEZE]
            chance.shuffle(deck)
        # Longer than the time limit of batches, and at times than anybody may be late.
        lasts = chance.uniform(2.0, 7.0)
        events.append(Event(at, deck.pop(), chance.random(), lasts))
        at += pace * chance.uniform(0.7, 1.3)
    return events


def _updates(
    chance: random.Random, seconds: float, pace: float
) -> Iterator[tuple[float, str]]:
    at = chance.uniform(0.3, 0.7) * pace
    while at < seconds:
        yield at, chance.choice(DEPLOYMENTS)
        at += chance.uniform(0.7, 1.3) * pace


def _steps(chance: random.Random, seconds: float, number: int) -> list[Step]:
    steps: list[Step] = []
    first = number * 1_000_000
    # Clients take turns in making a deployment of their own.
    own, own_from = f"own{number}", seconds * (number + 1) / (CLIENTS + 3)
    names = list(DEPLOYMENTS)
    at = 0.0
    while at < seconds:
        name = chance.choice(names)
        if at > own_from and own not in names:
            names.append(own)
            name = own
        count = chance.choice((1, 1, 4, 16, 48))
        codes = tuple(
            Code.RAISES if chance.random() < 0.02 else Code.GOOD for _ in range(count)
        )
        cancelled: list[int] = []
        if chance.random() < 0.2:
            cancelled = sorted(chance.sample(range(count), chance.randint(1, count)))
        steps.append(
            Step(
                at,
                name,
                chance.choice(("submit", "submit", "map", "map", "chain")),
                first,
                codes,
                chance.choice(_TIMEOUTS) if chance.random() < 0.3 else None,
                tuple(cancelled),
                chance.choice((0.0, 0.05, 0.5)),
            )
        )
        first += count
        at += chance.uniform(0.1, 0.5)
    return steps


def _plant(
    chance: random.Random,
    scripts: list[list[Step]],
    code: Code,
    start: float,
    stop: float,
) -> None:
    """Let one input of one step within a time do something worse."""
    script = chance.choice(scripts)
    places = [
        i
        for i, step in enumerate(script)
        if start <= step.at < stop and step.name != LIMITED
    ]
    place = chance.choice(places)
    step = script[place]
    codes = list(step.codes)
    codes[chance.randrange(len(codes))] = code
    script[place] = Step(**{**vars(step), "codes": tuple(codes)})
