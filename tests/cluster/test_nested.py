"""A model that calls another deployment."""

from __future__ import annotations

import numpy as np
import pytest
from distributed.utils_test import gen_cluster

import daskinfer


def double(x):
    return x * 2


class CallsAnother:
    def __init__(self, other):
        self.other = other

    def __call__(self, x):
        return self.other(x) + 1


def fail(x):
    raise KeyError("no such row")


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_model_may_call_another_on_its_own_worker(c, s, a):
    other = await daskinfer.deploy(c, double, name="double")
    model = await daskinfer.deploy(c, CallsAnother(other), name="outer")
    futures = model.map([np.full((1, 2), i) for i in range(20)])
    results = await daskinfer.gather(futures)
    assert [r.tolist() for r in results] == [[[2 * i + 1] * 2] for i in range(20)]


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_the_other_models_error_is_raised_in_the_first(c, s, a):
    other = await daskinfer.deploy(c, fail, name="fail")
    model = await daskinfer.deploy(c, CallsAnother(other), name="outer")
    with pytest.raises(KeyError, match="no such row"):
        await model.submit(np.ones((1, 2)))
