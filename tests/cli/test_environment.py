"""Clusters of which the environment and Dask's configuration say everything."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
import yaml
from distributed.utils_test import poll_for

from tests.cli.processes import PATIENCE, infer, scheduler, workers
from tests.ssh.hosts import free_port

pytestmark = pytest.mark.process


def status_of(url: str) -> int:
    """What a route answers with, or 0 while nobody does."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def test_the_plugin_the_models_and_the_address_from_there(tmp_path):
    settings = tmp_path / "config"
    settings.mkdir()
    entry = {"factory": "tests.cli.models:add"}
    content = {"daskinfer": {"deployments": {"added": entry}}}
    (settings / "deployments.yaml").write_text(yaml.safe_dump(content))
    env = {
        "DASK_CONFIG": str(settings),
        "DASK_DISTRIBUTED__SCHEDULER__PRELOAD": '["scheduler_plugins"]',
    }
    port = free_port("127.0.0.1")
    ready = f"http://127.0.0.1:{port}/inference/ready"
    options = ("--dashboard-address", f"127.0.0.1:{port}")
    with scheduler(tmp_path, *options, env=env) as (_, address):
        # The route is there, as the plugin is; there is no worker yet.
        assert status_of(ready) == 503
        known = {"DASK_SCHEDULER_ADDRESS": address}
        with workers(tmp_path, "--device", "cpu", "--nworkers", "1", env=known):
            poll_for(lambda: status_of(ready) == 200, PATIENCE)
            told = infer("list", "--json", env=known)
            assert (told.returncode, told.stderr) == (0, "")
            [listed] = json.loads(told.stdout)
            assert listed["name"] == "added"
