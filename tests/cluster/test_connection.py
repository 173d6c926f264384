"""Handles that meet a scheduler which has not heard of daskinfer yet."""

from __future__ import annotations

import pytest
from distributed.utils_test import gen_cluster

from daskinfer import Model, UnknownDeployment

#: The calls into Dask's inner workings, also on its oldest supported release.
pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("many", [1, 3])
def test_a_handle_made_by_hand_brings_the_plugin(many: int) -> None:
    @gen_cluster(client=True, nthreads=[("", 1)])
    async def check(c, s, a):
        assert "daskinfer" not in s.plugins
        stream = c.scheduler_comm
        for future in Model("net").map(range(many)):
            with pytest.raises(UnknownDeployment, match="'net'"):
                await future
        assert c.scheduler_comm is stream
        assert "daskinfer" in s.plugins

    check()
