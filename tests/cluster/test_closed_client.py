"""Handles that outlive their client."""

from __future__ import annotations

import pickle

import pytest
from distributed import Client
from distributed.utils_test import gen_cluster

import daskinfer
from tests.cluster.helpers import Probe
from tests.cluster.scheduling_helpers import ONE

CLOSED = r"the client .* is closed; .*daskinfer\.get\(client, 'm'\)"


@gen_cluster(nthreads=[("", 1)])
async def test_a_current_client_of_the_same_scheduler_takes_over(s, a):
    async with Client(s.address, asynchronous=True) as first:
        model = await daskinfer.deploy(first, Probe(), name="m")
    async with Client(s.address, asynchronous=True) as second:
        assert model.client is second
        assert (await model.submit(ONE) == 2).all()


@gen_cluster(nthreads=[("", 1)])
async def test_no_client_is_left(s, a):
    async with Client(s.address, asynchronous=True) as first:
        model = await daskinfer.deploy(first, Probe(), name="m")
    for call in (model.submit, model, model.predict, model.options(priority=1).submit):
        with pytest.raises(RuntimeError, match=CLOSED):
            call(ONE)
    for call in (model.status, model.undeploy):
        with pytest.raises(RuntimeError, match=CLOSED):
            call()


def test_a_client_of_another_scheduler_is_not_taken_for_it():
    kept = []

    @gen_cluster(nthreads=[("", 1)])
    async def deploy(s, a):
        async with Client(s.address, asynchronous=True) as first:
            kept.append(await daskinfer.deploy(first, Probe(), name="m"))

    @gen_cluster(nthreads=[("", 1)])
    async def elsewhere(s, a):
        (model,) = kept
        async with Client(s.address, asynchronous=True) as second:
            own = await daskinfer.deploy(second, Probe(lambda x: x * 3), name="m")
            with pytest.raises(RuntimeError, match=CLOSED):
                model.submit(ONE)
            # One that was pickled has no client of its own.
            pickled = pickle.loads(pickle.dumps(model))
            for usable in (own, pickled, await daskinfer.get(second, "m")):
                assert (await usable.submit(ONE) == 3).all()

    deploy()
    elsewhere()
