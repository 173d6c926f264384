"""Taking models apart, so that they can travel."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from daskinfer.artifact import archive
from daskinfer.artifact.building import CALLABLE, FACTORY, MODULE, is_module
from daskinfer.artifact.pickling import take_apart_or_explain
from daskinfer.names import check_path
from daskinfer.stepping import is_step_model


class Parts(NamedTuple):
    """Format, builder, weights and label of an artifact."""

    format: str
    builder: bytes
    weights: memoryview | None
    label: str


def of_object(model: Any) -> Parts:
    """Take a module or any other callable apart.

    Parameters
    ----------
    model
        A :class:`torch.nn.Module`, a TorchScript module, a
        :class:`torch.export.ExportedProgram`, or a callable on a batch: a
        function, or an instance with ``__call__`` that may hold arrays and
        modules. Or a :class:`~daskinfer.StepModel`. It stays as it is: mode, device,
        hooks.

    Raises
    ------
    TypeError
        If it is no callable, a class instead of an instance, or cannot be
        pickled; then the message names the attribute and says what to do.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        if isinstance(model, torch.export.ExportedProgram):
            content = archive.from_exported_program(model)
            return Parts(archive.EXPORT, b"", content, "ExportedProgram")
        if isinstance(model, torch.jit.ScriptModule):
            content = archive.from_script_module(model)
            return Parts(archive.TORCHSCRIPT, b"", content, _label(model))
    if isinstance(model, type):
        message = f"cannot deploy the class {model.__name__} itself; pass an instance"
        # Workers cannot import what the main script or a function defines.
        if model.__module__ != "__main__" and "<locals>" not in model.__qualname__:
            message += (
                f" or factory='{model.__module__}:{model.__qualname__}' to make "
                "one on each worker"
            )
        raise TypeError(message)
    if not callable(model) and not is_step_model(model):
        text = ", or factory= or path= for a text" if isinstance(model, str) else ""
        raise TypeError(
            f"cannot deploy a {type(model).__name__}, which cannot be called; pass "
            f"a torch.nn.Module or a function on a batch{text}"
        )
    builder, weights = take_apart_or_explain(model, _label(model))
    return Parts(
        MODULE if is_module(model) else CALLABLE, builder, weights, _label(model)
    )


def of_factory(factory: str, kwargs: Mapping[str, Any] | None = None) -> Parts:
    """Let each worker build the model itself.

    Parameters
    ----------
    factory
        ``"package.module:function"``, importable on the workers. It need not
        be importable here.
    kwargs
        What the function is called with.

    Raises
    ------
    TypeError
        If ``factory`` is no string, or ``kwargs`` cannot be pickled.
    ValueError
        If ``factory`` is not of that form.

    Examples
    --------
    >>> of_factory("torch.nn:Linear", {"in_features": 2, "out_features": 1}).label
    'torch.nn:Linear'
    """
    if not isinstance(factory, str):
        raise TypeError(
            f"factory must be a string such as 'package.module:function', not "
            f"{type(factory).__name__}; a module or callable is deployed as it is"
        )
    module, _, name = factory.partition(":")
    parts = [*module.split("."), *name.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise ValueError(
            f"factory must look like 'package.module:function', got {factory!r}"
        )
    builder, weights = take_apart_or_explain((factory, dict(kwargs or {})), factory)
    return Parts(FACTORY, builder, weights, factory)


def of_path(path: str | os.PathLike[str], *, trusted: bool = False) -> Parts:
    """Take a model file: torch.export (``.pt2``) or TorchScript (``.ts``, ``.pt``).

    Parameters
    ----------
    path
        The file, read here; workers need not see it.
    trusted
        Whether it may be a pickled module too, which is unpickled here: that runs
        whatever code the file asks for.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it has another suffix, or holds no program (a state dict, a pickled
        module); the message says what to do instead.
    """
    label = os.path.basename(check_path("path", path))
    format, content = archive.read_file(path, trusted=trusted)
    if format == archive.PICKLED:
        return of_object(archive.load_pickled(content, label))
    return Parts(format, b"", content, label)


def _label(model: Any) -> str:
    name = getattr(model, "original_name", None) or getattr(model, "__name__", None)
    return name if isinstance(name, str) else type(model).__name__
