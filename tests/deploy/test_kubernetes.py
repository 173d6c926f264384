"""The manifests for the Dask operator, as far as they can be checked without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from daskinfer.entries import plan_of_entry
from tests.deploy.commands import check_command

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
PROBE = {
    "type": "object",
    "required": ["httpGet", "periodSeconds"],
    "properties": {
        "httpGet": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "port": {"type": "string"}},
            "required": ["path", "port"],
            "additionalProperties": False,
        },
        "initialDelaySeconds": {"type": "integer"},
        "periodSeconds": {"type": "integer"},
        "timeoutSeconds": {"type": "integer"},
        "failureThreshold": {"type": "integer"},
    },
    "additionalProperties": False,
}
#: What the operator's definitions say of a pod, in the part that is used here. Amounts
#: are texts there, unlike in Kubernetes' own.
POD = {
    "type": "object",
    "required": ["containers"],
    "properties": {
        "containers": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "image", "args", "ports", "resources"],
                "properties": {
                    "name": {"type": "string"},
                    "image": {"type": "string"},
                    "args": {"type": "array", "items": {"type": "string"}},
                    "ports": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string", "maxLength": 15},
                                "containerPort": {"type": "integer"},
                            },
                            "additionalProperties": False,
                        },
                    },
                    "readinessProbe": PROBE,
                    "livenessProbe": PROBE,
                    "resources": {
                        "type": "object",
                        "properties": {"requests": TEXTS, "limits": TEXTS},
                        "additionalProperties": False,
                    },
                    "volumeMounts": {"type": "array"},
                },
                "additionalProperties": False,
            },
        },
        "volumes": {"type": "array"},
        "terminationGracePeriodSeconds": {"type": "integer"},
    },
    "additionalProperties": False,
}


def documents(kind: str) -> list[dict[str, Any]]:
    found = [d for file in FILES for d in yaml.safe_load_all(file.read_text())]
    return [document for document in found if document["kind"] == kind]


def container(part: dict[str, Any]) -> dict[str, Any]:
    [found] = part["spec"]["containers"]
    return found


[CLUSTER] = documents("DaskCluster")
SCHEDULER = CLUSTER["spec"]["scheduler"]
GROUPS = documents("DaskWorkerGroup")
WORKERS = [CLUSTER["spec"]["worker"], *(group["spec"]["worker"] for group in GROUPS)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_says_what_was_not_tried(file):
    assert file.read_text().splitlines()[1].startswith("# Not tried: ")


def test_fields():
    for part in (SCHEDULER, *WORKERS):
        jsonschema.validate(part["spec"], POD)
    kinds = [document["apiVersion"] for document in (CLUSTER, *GROUPS)]
    assert set(kinds) == {"kubernetes.dask.org/v1"}
    assert {group["spec"]["cluster"] for group in GROUPS} == {
        CLUSTER["metadata"]["name"]
    }


def test_the_scheduler():
    told = container(SCHEDULER)
    assert check_command(told["args"])["preload"] == ("scheduler_plugins",)
    assert told["readinessProbe"]["httpGet"]["path"] == "/inference/ready"
    assert told["livenessProbe"]["httpGet"]["path"] == "/health"


def test_workers_find_a_scheduler_that_is_not_ready():
    """By the cluster's own service; the other one is for clients, and waits."""
    service = SCHEDULER["service"]
    assert service["publishNotReadyAddresses"] is True
    [other] = documents("Service")
    assert "publishNotReadyAddresses" not in other["spec"]
    assert other["spec"]["selector"] == service["selector"]
    assert other["spec"]["ports"] == service["ports"]
    ports = {port["name"] for port in container(SCHEDULER)["ports"]}
    assert {port["targetPort"] for port in service["ports"]} == ports


@pytest.mark.parametrize("worker", WORKERS, ids=lambda w: container(w)["image"])
def test_one_worker_in_a_pod_with_the_name_that_the_operator_knows(worker):
    told = container(worker)
    options = check_command(told["args"])
    assert options["name"] == "$(DASK_WORKER_NAME)"
    devices = {"cpu": None, "cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
    resource = devices[options["device"]]
    for amounts in told["resources"].values():
        assert {n: a for n, a in amounts.items() if "/" in n} == (
            {resource: "1"} if resource else {}
        )
    if resource is None:
        assert options["n_workers"] == "1"
    assert told["livenessProbe"]["httpGet"]["path"] == "/health"
    [port] = told["ports"]
    assert options["dashboard_address"] == f":{port['containerPort']}"
    patience = (
        told["livenessProbe"]["periodSeconds"]
        * (told["livenessProbe"]["failureThreshold"])
    )
    assert patience >= 300  # as Dask's worker-ttl


def test_the_configuration_can_be_deployed():
    [config] = documents("ConfigMap")
    [volume] = SCHEDULER["spec"]["volumes"]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    [mount] = container(SCHEDULER)["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": "/etc/dask"}
    [text] = config["data"].values()
    [(name, entry)] = yaml.safe_load(text)["daskinfer"]["deployments"].items()
    assert plan_of_entry(name, entry).name == "digits"
