"""Model files: what they hold, and how a worker makes a model of them."""

from __future__ import annotations

import io
import os
import sys
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

EXPORT = "torch.export"
TORCHSCRIPT = "torchscript"
#: What :func:`torch.save` writes: reading it may run any code.
PICKLED = "pickled"

#: Accepted file names; what the file holds decides how it is loaded.
SUFFIXES = (".pt2", ".ts", ".pt", ".pth")

# torch.export keeps what it reads in a global, and refuses a second thread meanwhile.
_reading_export = threading.Lock()


def read_file(
    path: str | os.PathLike[str], *, trusted: bool = False
) -> tuple[str, memoryview]:
    """Read a model file.

    Parameters
    ----------
    path
        A torch.export archive (``.pt2``) or a TorchScript file (``.ts``, ``.pt``,
        ``.pth``).
    trusted
        Whether a pickled module may be read as well.

    Returns
    -------
    format : str
        :data:`EXPORT` or :data:`TORCHSCRIPT`; :data:`PICKLED` only if trusted.
    content : memoryview
        The whole file.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it has another suffix, or holds a state dict or a pickled module, which
        are no programs; the message says what to do instead.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"path must end in {', '.join(SUFFIXES)}, got {str(path)!r}; a model in "
            "another format can be loaded by a function: deploy(factory='module:name')"
        )
    if not path.is_file():
        raise FileNotFoundError(f"no model file at {path.absolute()}")
    content = np.fromfile(path, np.uint8).data
    return _format(path, content, trusted), content


def _format(path: Path, content: memoryview, trusted: bool) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            # Below the archive's own folder.
            names = {name.partition("/")[2] for name in archive.namelist()}
    except zipfile.BadZipFile:
        names = set()
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return EXPORT
    if "constants.pkl" in names:
        return TORCHSCRIPT
    if trusted and ("data.pkl" in names or _is_legacy_pickle(content)):
        return PICKLED
    if "data.pkl" in names:
        problem = "holds pickled data (a state dict or a module), not a program"
    else:
        problem = "is neither a torch.export archive nor a TorchScript file"
    raise ValueError(
        f"{path} {problem}. Load it in Python and deploy the module, as in "
        "net.load_state_dict(torch.load(path)); deploy(client, net), or save the "
        "module with torch.export.save. A file of a pickled module is read with "
        "trusted=True: that runs whatever code its maker has put into it"
    )


def _is_legacy_pickle(content: memoryview) -> bool:
    """Whether torch before 1.6 may have written this: it began with a number."""
    return bytes(content[2:14]) == b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"


def load_pickled(content: memoryview, label: str) -> Any:
    """Unpickle a module, which runs whatever code the file asks for.

    Raises
    ------
    ValueError
        If it is none.
    """
    import torch

    file = io.BytesIO(content)
    found = torch.load(file, map_location="cpu", weights_only=False)
    if not isinstance(found, torch.nn.Module):
        raise ValueError(
            f"{label} holds a {type(found).__name__}, not a module. Load it in Python "
            "and deploy the module, as in net.load_state_dict(torch.load(path)); "
            "deploy(client, net)"
        )
    return found


def _read_export(content: memoryview) -> Any:
    import torch

    with _reading_export:
        return torch.export.load(io.BytesIO(content))


def load_export(content: memoryview, device: torch.device | None) -> Any:
    """Make a module of a torch.export archive, on a device if one is given."""
    from torch.export.passes import move_to_device_pass

    program = _read_export(content)
    if device is not None:
        program = move_to_device_pass(program, device)
    # It was exported in one mode and cannot change it.
    return program.module()


def row_limits(content: memoryview, axis: int) -> tuple[int, int] | None:
    """Fewest and most rows that an exported program takes along an axis.

    An export has one fixed size for every dimension that was not named as dynamic.

    Returns
    -------
    tuple or None
        None where its inputs say different things, or nothing.
    """
    program = _read_export(content)
    inputs = set(program.graph_signature.user_inputs)
    found = set()
    for node in program.graph.nodes:
        shape = getattr(node.meta.get("val"), "shape", ())
        if node.op == "placeholder" and node.name in inputs and len(shape) > axis:
            found.add(_limits(program, shape[axis]))
    return found.pop() if len(found) == 1 else None


def _limits(program: Any, size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    allowed = program.range_constraints.get(size.node.expr)
    if allowed is None:
        return None
    # Above all numbers stands an infinity of torch's own, which is no int.
    bounded = allowed.upper < sys.maxsize
    return int(allowed.lower), int(allowed.upper) if bounded else sys.maxsize


def load_torchscript(content: memoryview, device: torch.device | None) -> Any:
    """Make a module of a TorchScript file, on a device if one is given."""
    import torch

    return torch.jit.load(io.BytesIO(content), map_location=device or "cpu").eval()


def from_exported_program(program: Any) -> memoryview:
    """Write a :class:`torch.export.ExportedProgram` as the file would be."""
    import torch

    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getbuffer()


def from_script_module(module: Any) -> memoryview:
    """Write a TorchScript module as the file would be."""
    import torch

    file = io.BytesIO()
    torch.jit.save(module, file)
    return file.getbuffer()
