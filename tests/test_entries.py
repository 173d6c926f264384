"""Deployments as the configuration names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml

from daskinfer import BatchPolicy, RetryPolicy, TierPolicy, WorkerLost, config
from daskinfer.breaker import BreakerPolicy
from daskinfer.caching import CachePolicy
from daskinfer.entries import plan_of_entry
from daskinfer.planning import plan_of

FACTORY = "torch.nn:Identity"

EVERYTHING = """
factory: torch.nn:Linear
factory-kwargs: {in_features: 4, out_features: 3}
version: "7"
device: cpu
resources: {GPU: 1}
placement: round-robin
request-timeout: 2s
batch-timeout: 10s
max-queue: 100
keep-loaded: true
batching: {max-batch-size: 16, min-batch-size: 2, max-wait: 5ms, batch-dim: 1}
cache:
  host: {size: 64 MiB, ttl: 10m}
  packed: null
  affinity: false
retry: {max-attempts: 2, retry-on: [WorkerLost]}
breaker: {failures: 5, cooldown: 1s}
"""


def message_of(plan: Any) -> dict[str, Any]:
    message = plan.to_message()
    message["artifact"] = message["artifact"]["digest"]
    return message


def test_an_entry_means_what_deploy_means() -> None:
    entry = yaml.safe_load(EVERYTHING)
    plan = plan_of(
        factory="torch.nn:Linear",
        factory_kwargs={"in_features": 4, "out_features": 3},
        name="m",
        version="7",
        device="cpu",
        resources={"GPU": 1},
        placement="round-robin",
        request_timeout=2,
        batch_timeout=10,
        max_queue=100,
        keep_loaded=True,
        batching=BatchPolicy(16, 2, 0.005, batch_dim=1),
        cache=CachePolicy(
            host=TierPolicy("64 MiB", "10m"), packed=None, affinity=False
        ),
        retry=RetryPolicy(max_attempts=2, retry_on=[WorkerLost]),
        breaker=BreakerPolicy(failures=5, cooldown=1),
    )
    assert message_of(plan_of_entry("m", entry)) == message_of(plan)
    # As variables of the environment have it.
    snaked = {key.replace("-", "_"): value for key, value in entry.items()}
    assert message_of(plan_of_entry("m", snaked)) == message_of(plan)


def test_an_entry_leaves_out_what_deploy_does() -> None:
    plan = plan_of(factory=FACTORY, name="m")
    assert message_of(plan_of_entry("m", {"factory": FACTORY})) == message_of(plan)
    cached = plan_of(factory=FACTORY, name="m", cache=CachePolicy())
    entry = {"factory": FACTORY, "cache": True}
    assert message_of(plan_of_entry("m", entry)) == message_of(cached)
    entry = {"factory": FACTORY, "cache": False, "retry": None}
    assert message_of(plan_of_entry("m", entry)) == message_of(plan)


def test_files_are_read_here(tmp_path: Path) -> None:
    file = tmp_path / "net.pt2"
    program = torch.export.export(torch.nn.Linear(4, 3), (torch.ones(2, 4),))
    torch.export.save(program, file)
    plan = plan_of_entry("m", {"path": str(file)})
    assert plan.artifact.format == "torch.export"
    assert plan.policy.allowed_batch_sizes == (2,)


def test_pickles_are_not_read_unless_trusted(tmp_path: Path) -> None:
    file = tmp_path / "net.pt"
    torch.save(torch.nn.Linear(4, 3), file)
    with pytest.raises(ValueError, match="trusted=True"):
        plan_of_entry("m", {"path": str(file)})
    entry = {"path": str(file), "trusted": True}
    assert plan_of_entry("m", entry).artifact.format == "module"


@pytest.mark.parametrize(
    ("name", "entry", "told"),
    [
        ("m", "torch.nn:Identity", "it must be a mapping of fields, not 'torch"),
        ("m", {}, "one of the fields factory and path"),
        ("m", {"factory": FACTORY, "path": "net.ts"}, "one of the fields"),
        ("m", {"factory": FACTORY, "max_batch": 3}, "it has no field max-batch; there"),
        ("m", {"factory": "identity"}, "package.module:function"),
        ("m", {"path": "/nowhere/net.ts"}, "no model file at /nowhere"),
        ("m", {"path": "net.onnx"}, "path must end in"),
        ("m", {"factory": FACTORY, "batching": 3}, "batching must be a mapping"),
        ("m", {"factory": FACTORY, "batching": {"size": 3}}, "batching has no field"),
        ("m", {"factory": FACTORY, "batching": {"max-batch-size": 0}}, "at least 1"),
        ("m", {"factory": FACTORY, "cache": {"ram": None}}, "cache has no field ram"),
        ("m", {"factory": FACTORY, "cache": {"host": {"ttl": 1}}}, "host must have a"),
        ("m", {"factory": FACTORY, "retry": {"retry-on": ["Oops"]}}, "'Oops'"),
        ("m", {"factory": FACTORY, "device": "tpu"}, "device must be one of"),
        ("m", {"factory": FACTORY, "version": 2}, "version must be a text"),
        (3, {"factory": FACTORY}, "its name must be a text"),
        ("", {"factory": FACTORY}, "its name must be a text"),
    ],
)
def test_what_is_wrong_is_named(name: object, entry: object, told: str) -> None:
    with pytest.raises((TypeError, ValueError, OSError), match=told):
        plan_of_entry(name, entry)


def test_the_schema_knows_the_fields() -> None:
    schema = yaml.safe_load(config.SCHEMA_FILE.read_text("utf-8"))
    defaults = yaml.safe_load(config.DEFAULTS_FILE.read_text("utf-8"))
    defaults["daskinfer"]["deployments"] = {"m": yaml.safe_load(EVERYTHING)}
    jsonschema.validate(defaults, schema)
    defaults["daskinfer"]["deployments"] = {"m": {"version": "1"}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(defaults, schema)
    defaults["daskinfer"]["deployments"] = {"m": {"factory": "a:b", "size": 1}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(defaults, schema)
