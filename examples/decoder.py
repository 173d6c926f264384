"""A decoder from ``transformers`` whose requests share every step.

The keys and values of all requests are kept by slots: each has a row of its own in one
large tensor, whose number :mod:`daskinfer` assigns. The network is a Llama with random
weights, so what it says means nothing, and nothing has to be downloaded; put your own
in its place.

Run it with ``python -m examples.decoder``. Needs the package ``transformers``.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from distributed import Client
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

import daskinfer

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}


class Layer(CacheLayerMixin):
    """What one layer keeps of all requests; a view of some of it, for one pass.

    Parameters
    ----------
    kept
        Keys and values, of shape (2, slots, heads, positions, width).
    slots
        Those of the rows of the pass, int64 of shape (n,).
    positions
        Of the tokens of each row, int64 of shape (n, tokens).
    """

    def __init__(
        self, kept: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> None:
        super().__init__()
        self.kept, self.slots, self.positions = kept, slots, positions
        self.longest = int(positions.max()) + 1
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep what is new, and give all that there is."""
        for kept, new in zip(self.kept, (key_states, value_states), strict=True):
            kept[self.slots[:, None], :, self.positions] = new.transpose(1, 2)
        keys, values = self.kept[:, self.slots, :, : self.longest]
        return keys, values

    def lazy_initialization(self, *_: torch.Tensor) -> None:
        """Nothing to do: there is room already."""

    def get_seq_length(self) -> int:
        """How many positions are in use."""
        return self.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many positions are attended to, from which on."""
        return self.longest, 0

    def get_max_length(self) -> int:
        """How many positions there can be."""
        return self.kept.shape[3]


class Decoder(nn.Module):
    """Greedy decoding, in steps that all requests take together.

    Parameters
    ----------
    slots
        How many requests there can be at once.
    longest
        Tokens of a request, those of the prompt included.
    """

    def __init__(self, slots: int = 32, longest: int = 256) -> None:
        super().__init__()
        self.slots = slots
        self.network = LlamaForCausalLM(LlamaConfig(**CONFIG))
        config = self.network.config
        shape = (slots, config.num_key_value_heads, longest, config.head_dim)
        kept = torch.zeros((config.num_hidden_layers, 2, *shape))
        self.register_buffer("kept", kept)

    def start(
        self, prompts: list[list[int]], lengths: torch.Tensor, slots: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Read prompts, of any lengths, into their slots.

        Parameters
        ----------
        prompts
            Tokens of each, one at least.
        lengths
            How many tokens to add to each at most; int64 of shape (n,).
        slots
            int64 of shape (n,).
        """
        device = self.kept.device
        longest = max(map(len, prompts))
        # What is added here is written over before anybody looks at it.
        rows = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
        positions = torch.arange(longest, device=device).expand(len(rows), longest)
        self._run(torch.tensor(rows, device=device), positions, slots)
        return {
            "slot": slots,
            "position": torch.tensor([len(p) - 1 for p in prompts], device=device),
            "token": torch.tensor([p[-1] for p in prompts], device=device),
            "left": lengths,
        }

    def step(
        self, state: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Give the next token of each request."""
        position = state["position"]
        hidden = self._run(state["token"][:, None], position[:, None], state["slot"])
        token = self.network.lm_head(hidden[:, -1]).argmax(dim=-1)
        left = state["left"] - 1
        new = {**state, "position": position + 1, "token": token, "left": left}
        finished = (left == 0) | (token == self.network.config.eos_token_id)
        return token, finished, new

    def _run(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        layers = [Layer(kept, slots, positions) for kept in self.kept]
        seen = torch.arange(layers[0].longest, device=tokens.device)
        output = self.network.model(
            input_ids=tokens,
            position_ids=positions,
            # Each token looks at those up to itself, whatever lies behind in its slot.
            attention_mask=(seen <= positions[:, :, None])[:, None],
            cache=Cache(layers=layers),
        )
        return output.last_hidden_state  # type: ignore[no-any-return]


def build(slots: int = 32, longest: int = 256) -> Decoder:
    """Build the model; runs once on each worker, with the same weights on all."""
    torch.manual_seed(0)
    return Decoder(slots, longest)


def main(arguments: list[str] | None = None) -> None:
    """Decode prompts of different lengths together."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--workers", type=int, help="default: one per device")
    options = parser.parse_args(arguments)
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.geometric(1 / 40, options.requests), 200)

    with (
        daskinfer.LocalCluster(n_workers=options.workers) as cluster,
        Client(cluster) as client,
    ):
        model = daskinfer.deploy(
            client, factory="examples.decoder:build", name="decoder"
        )
        prompts = [
            generator.integers(2, 256, size=3 + n % 20).tolist() for n in lengths
        ]
        started = time.perf_counter()
        futures = [
            model.submit([prompt], np.array([length]))
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        answers = client.gather(futures)
        seconds = time.perf_counter() - started
        tokens = sum(map(len, answers))
        print(f"{len(answers)} requests, {tokens} tokens, {tokens / seconds:,.0f}/s")
        first = model.stream([prompts[0]], np.array([10]))
        print("first:", *(int(token[0]) for token in first))


if __name__ == "__main__":
    main()
