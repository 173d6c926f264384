"""Train the demo's network and write its weights: ``python -m daskinfer.demo.train``.

Takes about ten seconds on one core. Needs scikit-learn for the images.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import affine_grid, cross_entropy, grid_sample

from daskinfer.demo.digits import (
    WEIGHTS_FILE,
    DigitsNet,
    accuracy,
    held_out,
    load_digits,
)


def train(epochs: int = 60, seed: int = 0) -> tuple[DigitsNet, float]:
    """Train on three quarters of the images.

    Returns
    -------
    net : DigitsNet
        The trained network, in eval mode.
    float
        Its accuracy on the held-out quarter.
    """
    torch.manual_seed(seed)
    images, labels = load_digits()
    training, testing = held_out(labels)
    x, y = torch.from_numpy(images[training]), torch.from_numpy(labels[training])

    net = DigitsNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    net.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            loss = cross_entropy(net(shift(x[rows])), y[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    net.eval()
    return net, accuracy(net, images[testing], labels[testing])


def shift(images: torch.Tensor, pixels: float = 0.7) -> torch.Tensor:
    """Move each image by up to `pixels` in both directions, to learn from more."""
    moves = torch.eye(2, 3).repeat(len(images), 1, 1)
    moves[:, :, 2] = (torch.rand(len(images), 2) * 2 - 1) * (2 * pixels / 8)
    grid = affine_grid(moves, list(images.shape), align_corners=False)
    return grid_sample(images, grid, align_corners=False)


def main(arguments: list[str] | None = None) -> None:
    """Train, report the accuracy on the held-out images, and save."""
    parser = argparse.ArgumentParser(description="Train the digits network.")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=WEIGHTS_FILE)
    options = parser.parse_args(arguments)
    net, score = train(options.epochs, options.seed)
    save_file(net.state_dict(), options.output)
    print(f"accuracy on the held-out quarter: {score:.4f}")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
