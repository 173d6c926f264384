"""A cluster whose every connection is encrypted and authenticated."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client
from distributed.security import Security

import daskinfer
from tests.cluster.helpers import linear

X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")


@pytest.mark.process
def test_deploy_submit_map_and_gather() -> None:
    import torch

    security = Security.temporary()
    expected = linear()(torch.from_numpy(X)).detach().numpy()
    with (
        daskinfer.LocalCluster(
            n_workers=2, device="cpu", security=security, dashboard_address=":0"
        ) as cluster,
        Client(cluster.scheduler_address, security=security) as client,
    ):
        addresses = [client.scheduler.address, *client.scheduler_info()["workers"]]
        assert len(addresses) == 3
        assert all(address.startswith("tls://") for address in addresses)
        model = daskinfer.deploy(client, linear(), name="net")
        rows = np.split(X, 6)
        for futures in (model.map(rows), client.map(model, rows)):
            for gather in (daskinfer.gather, client.gather):
                answers = np.concatenate(gather(futures))
                np.testing.assert_allclose(answers, expected, atol=1e-6)
        one = client.submit(model, client.scatter(X))
        np.testing.assert_allclose(one.result(), expected, atol=1e-6)
        np.testing.assert_allclose(model.submit(X).result(), expected, atol=1e-6)
        np.testing.assert_allclose(model.predict(X), expected, atol=1e-6)
        assert {w.state for w in model.status().workers} == {"ready"}
