"""Which version answers a request."""

from __future__ import annotations

import subprocess
import sys

import pytest

from daskinfer.exceptions import UnknownDeployment
from scheduler_plugins import rollout
from scheduler_plugins.deployment import Deployment, Version, WorkerFacts
from scheduler_plugins.registry import Registry
from scheduler_plugins.request import Request
from scheduler_plugins.rollout import Update
from scheduler_plugins.routing import Route, Routing, point_of

A = "tcp://a:1"


class Two:
    """Deployment ``m``, whose version 2 has taken over from version 1."""

    def __init__(self, **about: object) -> None:
        self.registry = Registry()
        self.routing = Routing(self.registry)
        self.registry.join(WorkerFacts(A, {"cpu": "cpu"}, {}, {}))
        self.deployment = Deployment("m", "auto", (), "least-loaded", Route("1"))
        self.registry.add(self.deployment, Version("m", "1", "d1"))
        self.routing.publish()
        self.load("1")
        self.before = self.request("before")
        self.routing.bind(self.before, "before")
        assert not self.routing.has_switched
        self.update("2", **about)

    def update(self, label: str, **about: object) -> None:
        version = Version("m", label, f"d{label}")
        rollout.begin(self.deployment, Update(label, **about), version)  # type: ignore
        self.registry.assign(self.deployment, version)
        self.load(label)
        self.enact(rollout.settle(self.deployment, self.registry.workers.values()))

    def load(self, label: str) -> None:
        self.registry.loaded("m", label, A, f"d{label}", "cpu", "cpu", 0.1)

    def enact(self, actions: list[rollout.Action]) -> None:
        self.routing.publish()
        for action in actions:
            if isinstance(action, rollout.Drain):
                rollout.drained(self.deployment, action.version.version)

    def request(self, key: str = "k", pinned: str | None = None) -> Request:
        return Request(key, "m", pinned, 0.0)

    def version(self, request: Request) -> str:
        return self.routing.version(request).version


def test_requests_go_to_what_is_active_and_pinned_ones_to_theirs():
    two = Two()
    assert two.routing.has_switched
    assert two.version(two.request()) == "2"
    assert two.version(two.request(pinned="1")) == "1"
    with pytest.raises(UnknownDeployment, match="no version '7'"):
        two.version(two.request(pinned="7"))


def test_the_steps_of_a_pipeline_stay_with_their_edition_while_it_is_there():
    two = Two()
    assert two.version(two.before) == "1"
    step = two.request("step")
    two.routing.follow(step, [two.before])
    assert two.version(step) == "1"
    # By the latest of its inputs, where they differ.
    after = two.request("after")
    two.routing.bind(after, "after")
    both = two.request("both")
    two.routing.follow(both, [after, two.before])
    assert two.version(both) == "2"
    two.update("3")
    assert two.version(step) == "3"  # version 1 is gone
    assert two.version(both) == "2"
    # Nobody could answer it there.
    two.registry.leave(A)
    assert two.version(both) == "3"


def test_inputs_that_no_deployment_made_tell_nothing():
    two = Two()
    step = two.request("step")
    two.routing.follow(step, [two.request("never sent")])
    assert not step.is_bound and two.version(step) == "2"


def test_a_canary_gets_its_share_of_the_keys_and_always_the_same():
    two = Two(share=0.1)
    keys = [f"m-{number:012x}" for number in range(20_000)]
    chosen = {key for key in keys if two.version(two.request(key)) == "2"}
    assert abs(len(chosen) / len(keys) - 0.1) < 0.01
    two.enact(rollout.share(two.deployment, "2", 0.2))
    more = {key for key in keys if two.version(two.request(key)) == "2"}
    assert chosen < more and abs(len(more) / len(keys) - 0.2) < 0.01
    # Those whose input it has answered stay with it.
    step = two.request("step")
    first = two.request(min(chosen))
    two.routing.bind(first, first.key)
    two.routing.follow(step, [first])
    assert two.version(step) == "2"
    two.enact(rollout.promote(two.deployment, "2", two.registry.workers.values()))
    assert two.version(step) == "2"


def test_a_canary_that_no_worker_has_answers_nothing():
    two = Two(share=1.0)
    assert two.version(two.request()) == "2"
    two.registry.leave(A)
    assert two.version(two.request()) == "1"


def test_a_key_has_the_same_point_in_every_process():
    code = "from scheduler_plugins.routing import point_of; print(point_of(('k', 1)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert float(told.stdout) == point_of(("k", 1))
