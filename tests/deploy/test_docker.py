"""The images and the compose file, as far as they can be checked without Docker."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from daskinfer.entries import plan_of_entry
from tests.deploy.commands import check_command

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
FILES = sorted(FOLDER.glob("Dockerfile.*"))
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def instructions(file: Path) -> list[tuple[str, str]]:
    """Each instruction of a Dockerfile, with its arguments on one line."""
    lines = [x for x in file.read_text().splitlines() if not x.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (name, rest.strip())
        for name, _, rest in (x.partition(" ") for x in joined.splitlines() if x)
    ]


def test_there_is_one_for_each_device():
    assert [file.suffix for file in FILES] == [".ascend", ".cpu", ".cuda"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix[1:])
def test_what_an_image_names_is_there(file):
    told = instructions(file)
    names = [name for name, _ in told]
    assert names[:2] == ["ARG", "FROM"] and names.count("CMD") == 1
    assert set(names) <= {
        *("ARG", "FROM", "WORKDIR", "COPY", "RUN"),
        *("ENV", "USER", "EXPOSE", "ENTRYPOINT", "CMD"),
    }
    for name, rest in told:
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
        elif name == "CMD":
            check_command(json.loads(rest))
    [extras] = [r.partition("=")[2] for n, r in told if r.startswith("EXTRAS=")]
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", PYPROJECT, flags=re.MULTILINE), extra
    assert file.read_text().splitlines()[1].startswith("# Not tried: ")


def test_all_images_have_the_same_python():
    """Dask's pickles do not travel between versions of Python."""
    bases = [dict(instructions(file))["FROM"] for file in FILES]
    assert bases == ["${BASE}"] * len(FILES)
    versions = {
        re.search(r"BASE=.*?py(?:thon:)?(3\.\d+)", file.read_text())[1]
        for file in FILES
    }
    assert len(versions) == 1


def test_an_image_sets_canns_environment_before_the_command(tmp_path):
    told = dict(instructions(FOLDER / "Dockerfile.ascend"))
    environment = tmp_path / "set_env.sh"
    environment.write_text("export ASCEND_TOOLKIT_HOME=/somewhere\n")
    ended = subprocess.run(
        [*json.loads(told["ENTRYPOINT"]), "bash", "-c", 'echo "$ASCEND_TOOLKIT_HOME"'],
        env={"PATH": "/usr/bin:/bin", "CANN_ENVIRONMENT": str(environment)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (ended.stdout, ended.returncode) == ("/somewhere\n", 0)


def test_compose():
    told = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    assert set(told) == {"name", "services", "configs"}
    scheduler, workers = told["services"]["scheduler"], told["services"]["worker"]
    for service in (scheduler, workers):
        check_command(service["command"])
        assert service["image"] == "daskinfer:cpu"
    build = scheduler["build"]
    # Else Compose would look for the workers' image in a registry, before it is built.
    assert workers["build"] == build
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    assert all(port.startswith("127.0.0.1:") for port in scheduler["ports"])
    assert workers["command"][-1] == "tcp://scheduler:8786"
    assert workers["depends_on"] == {"scheduler": {"condition": "service_healthy"}}
    kind, _, _, program = scheduler["healthcheck"]["test"]
    compile(program, "healthcheck", "exec")
    assert kind == "CMD" and ":8787/health'" in program


def test_the_configuration_in_compose_can_be_deployed():
    told = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    [config] = told["services"]["scheduler"]["configs"]
    assert config["target"].startswith("/etc/dask/")
    entries = yaml.safe_load(told["configs"][config["source"]]["content"])
    [(name, entry)] = entries["daskinfer"]["deployments"].items()
    assert plan_of_entry(name, entry).name == "digits"
