"""Small models that advance step by step, and what each gives alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TOKENS = 17
WIDTH = 6
#: Prompts with these tokens are refused: at the start, and at the second step.
BAD_START, BAD_STEP = 15, 16


class Recurrent(nn.Module):
    """A GRU that is fed what it said, with a tree of tensors as its state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.double()
        self.rows: list[int] = []

    def start(self, prompt: torch.Tensor, steps: torch.Tensor) -> dict[str, Any]:
        if (prompt == BAD_START).any():
            raise ValueError("a bad prompt")
        memory = prompt.new_zeros((len(prompt), WIDTH), dtype=torch.float64)
        for token in prompt[:, :-1].T:
            memory = self.cell(self.embedding(token), memory)
        return {
            "memory": (memory,),
            "token": prompt[:, -1].clone(),
            "left": steps,
            "bad": (prompt == BAD_STEP).any(dim=1),
        }

    def step(self, state: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        self.rows.append(len(state["token"]))
        # In place: what a model does to the copy it was given must not matter.
        state["left"] -= 1
        memory = self.cell(self.embedding(state["token"]), state["memory"][0])
        token = self.head(memory).argmax(dim=1)
        if (state["bad"] & (state["left"] == 0)).any():
            raise ValueError("a bad step")
        state |= {"memory": (memory,), "token": token}
        return token, state["left"] == 0


class Attention(nn.Module):
    """One layer of attention, whose keys and values are kept by slots."""

    longest = 24

    def __init__(self, slots: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.slots = slots
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Embedding(self.longest, WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.register_buffer("cache", torch.full((slots, self.longest, 2, WIDTH), -9.0))
        self.double()
        self.rows: list[int] = []

    def start(
        self, prompt: torch.Tensor, steps: torch.Tensor, slots: torch.Tensor
    ) -> dict[str, Any]:
        if (prompt == BAD_START).any():
            raise ValueError("a bad prompt")
        length = prompt.shape[1]
        _, kept = self._attended(
            prompt, torch.arange(length, device=prompt.device).expand_as(prompt)
        )
        self.cache[slots, :length] = kept
        return {
            "slot": slots,
            "position": torch.full_like(steps, length - 1),
            "token": prompt[:, -1].clone(),
            "left": steps,
            "bad": (prompt == BAD_STEP).any(dim=1),
        }

    def step(self, state: dict[str, Any]) -> tuple[torch.Tensor, Any, dict[str, Any]]:
        self.rows.append(len(state["token"]))
        slot, position = state["slot"], state["position"]
        query, kept = self._attended(state["token"][:, None], position[:, None])
        self.cache[slot, position] = kept[:, 0]
        if (state["bad"] & (state["left"] == 1)).any():
            raise ValueError("a bad step")
        longest = int(position.max()) + 1
        keys, values = self.cache[slot, :longest].unbind(2)
        seen = torch.arange(longest, device=position.device) <= position[:, None]
        token = self._said(query[:, 0], keys, values, seen)
        left = state["left"] - 1
        new = {**state, "position": position + 1, "token": token, "left": left}
        return token, left == 0, new

    def alone(self, prompt: list[int], steps: int) -> list[int]:
        """What it says, computed anew from all tokens at every step."""
        tokens, said = torch.tensor([prompt]), []
        for _ in range(steps):
            place = torch.arange(tokens.shape[1])[None]
            query, kept = self._attended(tokens, place)
            keys, values = kept.unbind(2)
            seen = torch.ones((1, tokens.shape[1]), dtype=torch.bool)
            token = self._said(query[:, -1], keys, values, seen)
            said.append(int(token))
            tokens = torch.cat([tokens, token[:, None]], dim=1)
        return said

    def _attended(self, tokens: torch.Tensor, places: torch.Tensor) -> Any:
        """The query and, side by side, key and value of each token."""
        projected = self.project(self.embedding(tokens) + self.places(places))
        query, key, value = projected.chunk(3, dim=-1)
        return query, torch.stack([key, value], dim=2)

    def _said(self, query: Any, keys: Any, values: Any, seen: Any) -> torch.Tensor:
        scores = (keys @ query[:, :, None])[..., 0].masked_fill(~seen, -torch.inf)
        attended = (scores.softmax(dim=1)[:, None] @ values)[:, 0]
        return self.head(attended).argmax(dim=1)


def recurrent_alone(model: Recurrent, prompt: list[int], steps: int) -> list[int]:
    """What it says to one prompt, by its cell and head alone."""
    memory, said = torch.zeros((1, WIDTH), dtype=torch.float64), []
    tokens = list(prompt)
    for place in range(len(prompt) + steps - 1):
        embedded = model.embedding(torch.tensor([tokens[place]]))
        memory = model.cell(embedded, memory)
        if place >= len(prompt) - 1:
            tokens.append(int(model.head(memory).argmax()))
            said.append(tokens[-1])
    return said
