"""Test the npu path on the real torch_npu wheel, on a machine without an NPU.

``python tests/torch_npu/run.py [pytest arguments]`` makes a virtual environment in the
user's cache, installs the project with its extra ``npu`` there, builds a stand-in for
Ascend's CANN libraries, and runs the tests of this folder over it.  Needs ``gcc`` and
``nm``, and Linux on a processor that torch_npu has wheels for.  Pip's own settings are
honoured; where they lead to a CUDA build of torch, add an index with CPU builds.

docs/devices.md says what this proves and what it does not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOOLS = ("gcc", "nm")
PACKAGES = (".[npu]", "pytest", "pytest-timeout")


def main(arguments: list[str]) -> int:
    """Run the job; give pytest's exit status."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        print(f"torch_npu job: not installed: {', '.join(missing)}", file=sys.stderr)
        return 1
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    environment = cache / "daskinfer-tests" / f"torch-npu-{sys.version_info.minor}"
    install(environment)
    libraries = environment / "stand-in-cann"
    step("build the stand-in CANN")
    python = environment / "bin" / "python"
    subprocess.run([python, HERE / "stand_in_cann" / "build.py", libraries], check=True)
    step("test")
    command = [python, "-m", "pytest", "-o", "filterwarnings=default", HERE, *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables(libraries)).returncode


def install(environment: Path) -> None:
    """Make the environment, or bring it up to date with what the project requires."""
    wanted = requirements_digest()
    installed = environment / "installed"
    if installed.exists() and installed.read_text() == wanted:
        step(f"use {environment}")
        return
    step(f"install into {environment}")
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
    constraints = ["--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, *constraints, "--editable", *PACKAGES], check=True, cwd=ROOT)
    installed.write_text(wanted)


def requirements_digest() -> str:
    """Change whenever an environment made before no longer fits."""
    digest = hashlib.sha256(f"{sys.version} {PACKAGES} {ROOT}".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def variables(libraries: Path) -> dict[str, str]:
    """Environment of the tests: the stand-in is found, in worker processes as well."""
    found = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ASCEND_", "STAND_IN_", "TORCH_DEVICE_BACKEND"))
    }
    return found | {
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
        "DASK_DISTRIBUTED__WORKER__PRELOAD": "cpu_kernels",
    }


def step(text: str) -> None:
    """Say what comes, and when."""
    print(f"--- {time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
