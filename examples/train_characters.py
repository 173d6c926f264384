"""How the weights of ``examples/characters.py`` were made.

The network reads what ``help()`` tells about Python's syntax, which ships with Python
as :mod:`pydoc_data.topics`. About three minutes on one core; the weights differ a
little from one release of Python to the next, as that text does.

Run it with ``python -m examples.train_characters``.
"""

from __future__ import annotations

import argparse
import time
from pydoc_data.topics import topics

import torch
from safetensors.torch import save_file
from torch import nn

from examples.characters import LETTERS, WEIGHTS, Characters, encode

ROWS = 32
WINDOW = 96


def main(arguments: list[str] | None = None) -> None:
    """Train and write the weights."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    letters = encode(" ".join(" ".join(topics.values()).split()))
    rows = letters[: len(letters) // ROWS * ROWS].view(ROWS, -1)
    print(f"{len(letters):,} letters of {len(LETTERS)} kinds")

    model = Characters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    memory, place, loss_mean = None, 0, 0.0
    began, step = time.monotonic(), 0
    while (spent := (time.monotonic() - began) / options.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1 - spent) + 1e-4
        if place + WINDOW + 1 > rows.shape[1]:
            memory, place = None, 0
        read = rows[:, place : place + WINDOW]
        wanted = rows[:, place + 1 : place + WINDOW + 1]
        output, memory = model.recurrent(model.embedding(read), memory)
        memory = memory.detach()
        logits = model.head(output)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        place += WINDOW
        loss_mean += (loss.item() - loss_mean) / min(step + 1, 200)
        step += 1
        if step % 200 == 0:
            print(f"{spent:4.0%}  step {step}  loss {loss_mean:.3f}", flush=True)
    save_file(
        {name: tensor.half() for name, tensor in model.state_dict().items()}, WEIGHTS
    )
    print(f"{WEIGHTS}: {WEIGHTS.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
