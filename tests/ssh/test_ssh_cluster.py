"""Dask's ``SSHCluster`` with our class of workers."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, SSHCluster

import daskinfer
from tests.ssh.hosts import PATIENCE, hosts, wait_until_empty

pytestmark = pytest.mark.process


def test_every_host_has_its_workers(tmp_path, loop):
    with hosts(tmp_path, one={}, two={}) as two_hosts:
        addresses = [host.address for host in two_hosts]
        with (
            SSHCluster(
                [addresses[0], *addresses],
                connect_options={
                    "port": two_hosts[0].port,
                    "client_keys": [str(tmp_path / "key")],
                    "known_hosts": None,
                    "config": None,
                },
                worker_class="daskinfer.DeviceWorkers",
                worker_options={"cpu_workers": 2, "nthreads": 1},
                scheduler_options={"port": 0, "dashboard_address": ":0"},
                loop=loop,
            ) as cluster,
            Client(cluster, timeout=PATIENCE) as client,
        ):
            client.wait_for_workers(4, timeout=PATIENCE)
            model = daskinfer.deploy(client, lambda x: x + 1, name="next")
            assert [w.state for w in model.status().workers] == ["ready"] * 4
            answers = daskinfer.gather(model.map(list(np.arange(100).reshape(100, 1))))
            assert np.array_equal(np.concatenate(answers), np.arange(1, 101))
            assert [len(host.workers()) for host in two_hosts] == [2, 2]
        wait_until_empty(two_hosts)
