"""Models whose parts are easy to lose on the way."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import nn


class Tied(nn.Module):
    """Two layers of one weight, a view of it, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("kept", torch.full((4,), 2.0))
        self.register_buffer("lost", torch.full((4,), 3.0), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.first_row = self.encoder.weight.detach()[0]
        self.table = np.arange(100_000.0)
        self.plain = torch.arange(4.0).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.decoder(self.encoder(x)) * self.kept + self.lost + self.first_row
        return y + float(self.table[-1]) + self.plain.float()


class WithExtraState(nn.Module):
    """State that is neither parameter nor buffer, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.scale = 1
        self.layer.register_forward_hook(double)

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * self.scale


def double(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


class Locked(nn.Module):
    """A part of it cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2), nn.Module())
        self.encoder[1].caches = {"main": [1, threading.Lock()]}


class Pipeline:
    """A callable that is no module but holds one, and an array."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.mean = np.arange(20_000, dtype="float32")

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        self.net.eval()
        with torch.no_grad():
            return self.net(torch.from_numpy(batch)).numpy() + self.mean[1]


def build_linear(size: int, bias: np.ndarray | None = None) -> nn.Module:
    layer = nn.Linear(size, size)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    if bias is not None:
        layer.bias.data += torch.from_numpy(bias)
    return layer


def build_number() -> int:
    return 3


class Namespace:
    """A place to look a nested factory up in."""

    build = staticmethod(build_linear)
