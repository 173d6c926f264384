"""Check that a wheel holds what the packages need at run time, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from zipfile import ZipFile

PACKAGES = ("daskinfer", "scheduler_plugins")


def main(wheel: str) -> None:
    """Compare the wheel's files with those of the work tree."""
    root = Path(__file__).parents[1]
    with ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {
        path.relative_to(root).as_posix()
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    required = {f"{package}/py.typed" for package in PACKAGES} | {
        "daskinfer/daskinfer.yaml",
        "daskinfer/daskinfer-schema.yaml",
        "daskinfer/demo/digits.safetensors",
    }
    missing = sorted((wanted | required) - shipped)
    surplus = sorted(shipped - wanted)
    if missing or surplus:
        sys.exit(f"{wheel}: missing {missing}, surplus {surplus}")
    print(f"{wheel}: {len(shipped)} files, all there")


if __name__ == "__main__":
    main(sys.argv[1])
