"""Making a model of its parts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from daskinfer.artifact import archive
from daskinfer.artifact.skeleton import put_together
from daskinfer.device.moving import move
from daskinfer.stepping import is_step_model

if TYPE_CHECKING:
    import torch

MODULE = "module"
CALLABLE = "callable"
FACTORY = "factory"


def build_file(
    format: str, content: memoryview, device: torch.device | str | None
) -> Callable[..., Any]:
    """Make a module of the content of a model file."""
    import torch

    load = {
        archive.EXPORT: archive.load_export,
        archive.TORCHSCRIPT: archive.load_torchscript,
    }[format]
    module = load(content, None if device is None else torch.device(device))
    return module  # type: ignore[no-any-return]


def build_object(
    format: str,
    builder: bytes,
    weights: memoryview | None,
    device: torch.device | str | None,
    label: str,
    *,
    own_memory: bool,
) -> Callable[..., Any]:
    """Make a module or another callable of its skeleton and weights.

    Parameters
    ----------
    format, builder, weights, label
        Those of the artifact.
    device
        Where a module shall be; None leaves it where it is made.
    own_memory
        Whether its tensors shall not be views of the weights.
    """
    made = put_together(builder, weights, own_memory=own_memory)
    if format != FACTORY:
        model = made
    else:
        factory, kwargs = made
        model = _find(factory)(**kwargs)
        if not callable(model) and not is_step_model(model):
            raise TypeError(
                f"factory {factory} returned a {type(model).__name__}, which "
                "cannot be called; it must return a module or a callable"
            )
    if not is_module(model):
        return model  # type: ignore[no-any-return]
    model.eval()
    return model if device is None else _place(model, device, label)


def is_module(model: object) -> bool:
    """Whether a model is a :class:`torch.nn.Module`: it takes tensors, not arrays."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _place(model: Any, device: torch.device | str, label: str) -> Callable[..., Any]:
    import torch

    device = torch.device(device)
    quantised = [
        name or type(part).__name__
        for name, part in model.named_modules()
        if type(part).__module__.startswith("torch.ao.nn.quantized")
        and not name.endswith("_packed_params")
    ]
    if quantised and device.type != "cpu":
        raise ValueError(
            f"{label} holds quantised layers ({', '.join(quantised[:3])}), which run "
            f"on the CPU only, not on {device}; deploy it with device='cpu'"
        )
    move(model, device)
    return model  # type: ignore[no-any-return]


def _find(factory: str) -> Callable[..., Any]:
    module, _, name = factory.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]
