"""Compile the simulated device once, and load it."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).parent / "csrc"
NAME = "_simulated_npu"
COMPILER = "g++"


def load_extension() -> ModuleType:
    """Import the extension; compile it first if that was not done before.

    Raises
    ------
    FileNotFoundError
        If it must be compiled and there is no compiler.
    """
    path = library_path()
    if not path.exists():
        _compile(path)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def library_path() -> Path:
    """Where the extension for this Python, this torch and these sources belongs."""
    digest = hashlib.sha256(f"{sys.version} {_torch_folder()}".encode())
    digest.update((_torch_folder() / "version.py").read_bytes())
    for source in (Path(__file__), *sorted(SOURCES.iterdir())):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    folder = cache / "daskinfer-tests" / digest.hexdigest()[:16]
    return folder / f"{NAME}{suffix}"


def _compile(path: Path) -> None:
    torch = _torch_folder()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may come here at once; each renames its own whole file.
    unfinished = path.with_name(f".{os.getpid()}.so")
    subprocess.run(
        [
            *(COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-w"),
            f"-DTORCH_EXTENSION_NAME={NAME}",
            f"-I{torch}/include",
            f"-I{torch}/include/torch/csrc/api/include",
            f"-I{sysconfig.get_paths()['include']}",
            str(SOURCES / "simulator.cpp"),
            *("-o", str(unfinished)),
            *(f"-L{torch}/lib", "-lc10", "-ltorch_cpu", "-ltorch"),
            f"-Wl,-rpath,{torch}/lib",
        ],
        check=True,
    )
    unfinished.replace(path)


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
