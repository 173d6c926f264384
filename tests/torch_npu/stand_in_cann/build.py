"""Build a stand-in for Ascend's CANN, so that the real torch_npu loads anywhere.

``python build.py FOLDER`` with torch_npu installed; needs ``gcc`` and ``nm``.  Then set
``LD_LIBRARY_PATH=FOLDER``.  What torch_npu needs and neither C file defines becomes a
function that does nothing and answers success.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PREFIXES = ("acl", "Hccl", "rt", "Msprof")
EMPTY_LIBRARIES = ("hccl", "ge_runner", "graph", "acl_tdt_channel")


def build(folder: Path) -> tuple[int, int]:
    """Write the libraries; give how many symbols were needed, how many do nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    needed = undefined_symbols()
    ours = [HERE / "device.c", HERE / "options.c"]
    compile_library(folder / "libascendcl.so", ours)
    missing = sorted(needed - symbols(folder / "libascendcl.so", "--defined-only"))
    rest = folder / "rest.c"
    rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in missing))
    compile_library(folder / "libascendcl.so", [*ours, rest])
    compile_library(folder / "libacl_op_compiler.so", [HERE / "options.c"])
    empty = folder / "empty.c"
    empty.write_text("int stand_in_is_empty(void) { return 0; }\n")
    for name in EMPTY_LIBRARIES:
        compile_library(folder / f"lib{name}.so", [empty])
    return len(needed), len(missing)


def undefined_symbols() -> set[str]:
    """What the torch_npu of this Python asks CANN for."""
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    libraries = [*package.glob("_C*.so"), package / "lib" / "libtorch_npu.so"]
    found = set[str]().union(*(symbols(so, "--undefined-only") for so in libraries))
    return {name for name in found if name.startswith(PREFIXES)}


def symbols(library: Path, which: str) -> set[str]:
    """Names in a shared library's dynamic symbol table, without their versions."""
    listing = subprocess.run(
        ["nm", "-D", which, library], capture_output=True, text=True, check=True
    )
    return {line.split()[-1].split("@")[0] for line in listing.stdout.splitlines()}


def compile_library(library: Path, sources: list[Path]) -> None:
    """Compile C sources into one shared library."""
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run([*command, *sources, "-o", library], check=True)


if __name__ == "__main__":
    needed, idle = build(Path(sys.argv[1]))
    print(f"stand-in CANN: {needed} symbols, {idle} of them do nothing")
