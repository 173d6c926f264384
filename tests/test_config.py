"""The defaults, their schema, and how values are read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import dask.config
import jsonschema
import pytest
import yaml

from daskinfer import config

DEFAULTS = yaml.safe_load(config.DEFAULTS_FILE.read_text("utf-8"))
SCHEMA = yaml.safe_load(config.SCHEMA_FILE.read_text("utf-8"))


def keys_of_defaults(node: Any, path: str = "") -> Iterator[str]:
    for name, value in node.items():
        key = f"{path}.{name}" if path else name
        yield key
        if isinstance(value, dict):
            yield from keys_of_defaults(value, key)


def keys_of_schema(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.get("properties", {}).items():
        key = f"{path}.{name}" if path else name
        yield key, value
        yield from keys_of_schema(value, key)


def test_defaults_are_valid() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(DEFAULTS, SCHEMA)


def test_defaults_and_schema_have_the_same_keys() -> None:
    assert sorted(keys_of_defaults(DEFAULTS)) == sorted(
        key for key, _ in keys_of_schema(SCHEMA)
    )


def test_every_key_is_described() -> None:
    undescribed = [
        key
        for key, value in keys_of_schema(SCHEMA)
        if key != "daskinfer" and not value.get("description", "").strip()
    ]
    assert undescribed == []


def test_every_group_requires_its_keys_and_admits_no_others() -> None:
    for key, value in keys_of_schema(SCHEMA):
        if value.get("type") == "object":
            assert sorted(value["required"]) == sorted(value["properties"]), key
            assert value["additionalProperties"] is False, key


def test_keys_are_kebab_case() -> None:
    for key in keys_of_defaults(DEFAULTS):
        assert key == key.lower()
        assert "_" not in key


@pytest.mark.parametrize(
    "change",
    [
        {"device": "tpu"},
        {"batching": {"max-batch-size": 0}},
        {"loading-threads": "two"},
        {"predict": {"chunk-bytes": "-1"}},
        {"weights": {"device": 1.5}},
        {"send-interval": [1]},
        {"sendinterval": "1ms"},
    ],
)
def test_schema_refuses_nonsense(change: dict[str, Any]) -> None:
    settings = dask.config.merge(DEFAULTS, {"daskinfer": change})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(settings, SCHEMA)


def test_defaults_are_loaded_on_import() -> None:
    assert dask.config.get("daskinfer.batching.max-batch-size") == 64


def test_what_the_user_set_outranks_the_defaults() -> None:
    with dask.config.set({"daskinfer.send-interval": "7ms"}):
        config.load_defaults()
        assert config.seconds("send-interval") == 0.007
    assert config.seconds("send-interval") == 0.0002


def test_environment_variable_outranks_the_defaults() -> None:
    program = "import daskinfer.config as c; print(c.seconds('send-interval'))"
    output = subprocess.run(
        [sys.executable, "-c", program],
        env={"DASK_DASKINFER__SEND_INTERVAL": "4ms", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert output.strip() == "0.004"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("50ms", 0.05), (2, 2.0), (0.5, 0.5), ("3s", 3.0), (0, 0.0), (None, None)],
)
def test_seconds(value: object, expected: float | None) -> None:
    with dask.config.set({"daskinfer.priority-age": value}):
        assert config.seconds("priority-age") == expected


@pytest.mark.parametrize("value", ["soon", "5 parsecs", "-1s", -1, [1], ""])
def test_a_bad_duration_is_refused_with_its_key(value: object) -> None:
    with (
        dask.config.set({"daskinfer.priority-age": value}),
        pytest.raises(ValueError, match=r"daskinfer\.priority-age is") as caught,
    ):
        config.seconds("priority-age")
    assert "DASK_DASKINFER__PRIORITY_AGE" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"), [("64 KiB", 65536), ("1MB", 10**6), (12, 12), (0, 0)]
)
def test_nbytes(value: object, expected: int) -> None:
    with dask.config.set({"daskinfer.gather.small-limit": value}):
        assert config.nbytes("gather.small-limit") == expected


@pytest.mark.parametrize("value", ["much", "5 apples", -1, None, [1]])
def test_a_bad_size_is_refused_with_its_key(value: object) -> None:
    with (
        dask.config.set({"daskinfer.gather.small-limit": value}),
        pytest.raises(ValueError, match=r"daskinfer\.gather\.small-limit is"),
    ):
        config.nbytes("gather.small-limit")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.8, 0.8),
        (1, 1.0),
        (2, 2),
        (0, 0),
        (2.0, 2),
        ("24 GiB", 24 * 2**30),
        (None, None),
    ],
)
def test_a_share_or_a_size(value: object, expected: float | int | None) -> None:
    settings = {"daskinfer": {"weights": {"host": value}}}
    jsonschema.validate(dask.config.merge(DEFAULTS, settings), SCHEMA)
    with dask.config.set({"daskinfer.weights.host": value}):
        found = config.share_or_bytes("weights.host")
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("value", [-0.5, -1, 1.5, "half", True, [1], float("nan")])
def test_a_bad_share_is_refused_with_its_key(value: object) -> None:
    with (
        dask.config.set({"daskinfer.weights.host": value}),
        pytest.raises(ValueError, match=r"daskinfer\.weights\.host is .* share"),
    ):
        config.share_or_bytes("weights.host")


@pytest.mark.parametrize("value", [0, -3, 1.5, "2", True, None])
def test_a_bad_number_is_refused_with_its_key(value: object) -> None:
    with (
        dask.config.set({"daskinfer.predict.in-flight": value}),
        pytest.raises(ValueError, match=r"daskinfer\.predict\.in-flight is"),
    ):
        config.integer("predict.in-flight")


def test_an_unknown_key_is_an_error() -> None:
    with pytest.raises(KeyError):
        config.get("no-such-key")
