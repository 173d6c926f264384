"""Text, letter by letter: a model that many readers share at every step.

A small recurrent network that has read Python's own documentation goes on with what it
is given. It advances one letter at a time, and all requests advance together: those
that come later join, and short ones leave, without waiting for the long ones. Each
reader gets its letters as they come. Works without a network.

Run it with ``python -m examples.characters "The for statement"``. How its weights were
made is in ``examples/train_characters.py``.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distributed import Client
from safetensors.torch import load_file
from torch import nn

import daskinfer

WEIGHTS = Path(__file__).with_suffix(".safetensors")
#: What the model reads and writes; other letters count as the first one, a blank.
LETTERS = " " + "".join(sorted(set(string.printable) - set(" \t\r\x0b\x0c")))
WIDTH = 192

PROMPTS = [
    "An exception is",
    "The import statement",
    "A list comprehension",
    "Objects are",
    "If the name is not found",
    "The with statement",
]


class Characters(nn.Module):
    """Goes on with texts, letter by letter.

    Parameters
    ----------
    temperature
        How far it strays from the likeliest letter; 0: not at all.
    """

    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__()
        self.temperature = temperature
        self.embedding = nn.Embedding(len(LETTERS), 48)
        self.recurrent = nn.GRU(48, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def start(
        self, prompts: list[str], lengths: torch.Tensor, seeds: torch.Tensor
    ) -> dict[str, Any]:
        """Read the beginnings of some texts.

        Parameters
        ----------
        prompts
            One for each row, not empty.
        lengths
            How many letters to add to each; int64 of shape (n,).
        seeds
            What chance depends on, for each row; int64 of shape (n,).
        """
        texts = [encode(prompt) for prompt in prompts]
        # All but the last letter: that is what the first step reads.
        memory = lengths.new_zeros((len(texts), WIDTH), dtype=self.head.weight.dtype)
        for row, text in enumerate(texts):
            if len(text) > 1:
                read = self.embedding(text[None, :-1].to(lengths.device))
                memory[row] = self.recurrent(read)[1][0, 0]
        last = torch.stack([text[-1] for text in texts]).to(lengths.device)
        return {"memory": memory, "letter": last, "left": lengths, "chance": seeds}

    def step(self, state: dict[str, Any]) -> tuple[list[str], torch.Tensor]:
        """Write one more letter of each text."""
        read = self.embedding(state["letter"][:, None])
        output, memory = self.recurrent(read, state["memory"][None])
        logits = self.head(output[:, 0])
        letter = logits.argmax(dim=1)
        if self.temperature:
            # Chance belongs to the row: whoever else is there, it falls as it would.
            chance = (state["chance"] * 1103515245 + 12345) % 2**31
            state["chance"] = chance
            likely = (logits / self.temperature).softmax(dim=1).cumsum(dim=1)
            reached = likely < (chance / 2**31)[:, None].to(likely.dtype)
            letter = reached.sum(dim=1).clamp(max=len(LETTERS) - 1)
        left = state["left"] - 1
        state |= {"memory": memory[0], "letter": letter, "left": left}
        return [LETTERS[index] for index in letter.tolist()], left <= 0


def encode(text: str) -> torch.Tensor:
    """Letters as int64 numbers."""
    return torch.tensor([max(LETTERS.find(letter), 0) for letter in text])


def build(temperature: float = 0.5) -> Characters:
    """Build the model; runs once on each worker."""
    model = Characters(temperature)
    model.load_state_dict(load_file(WEIGHTS))
    return model


def request(prompt: str, length: int, seed: int) -> tuple[Any, ...]:
    """What the model is called with for one text."""
    return [prompt], np.array([length]), np.array([seed])


def main(arguments: list[str] | None = None) -> None:
    """Print one text as it is written, while others are written beside it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("prompt", nargs="?", default="The for statement")
    parser.add_argument("--length", type=int, default=300, help="letters to add")
    parser.add_argument("--others", type=int, default=24, help="texts beside it")
    parser.add_argument("--workers", type=int, help="default: one per device")
    options = parser.parse_args(arguments)

    with (
        daskinfer.LocalCluster(n_workers=options.workers) as cluster,
        Client(cluster) as client,
    ):
        model = daskinfer.deploy(
            client, factory="examples.characters:build", name="characters"
        )
        others = [
            model.submit(*request(PROMPTS[n % len(PROMPTS)], 20 + 37 * n % 200, n))
            for n in range(options.others)
        ]
        print(options.prompt, end="", flush=True)
        for (letter,) in model.stream(*request(options.prompt, options.length, 7)):
            print(letter, end="", flush=True)
        texts = client.gather(others)
        print("\n--")
        for number, letters in enumerate(texts[:3]):
            written = "".join(letter for (letter,) in letters)
            print(f"{PROMPTS[number % len(PROMPTS)]}{written!r}")
        steps = sum(map(len, texts)) + options.length
        print(f"{steps} letters for {len(texts) + 1} readers")


if __name__ == "__main__":
    main()
