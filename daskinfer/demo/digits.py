"""A small convolutional network for scikit-learn's 8 × 8 handwritten digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import nn

WEIGHTS_FILE = Path(__file__).with_name("digits.safetensors")


class DigitsNet(nn.Module):
    """Two convolutions and two dense layers: images in, one score per digit out.

    Maps float32 of shape (n, 1, 8, 8), values 0 to 1, to float32 logits of shape
    (n, 10).

    Examples
    --------
    >>> DigitsNet()(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of the ten digits for each image."""
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


def load_model() -> DigitsNet:
    """Return the trained network that the package ships, in eval mode.

    Deploy it with ``factory="daskinfer.demo.digits:load_model"``.
    """
    net = DigitsNet()
    net.load_state_dict(load_file(WEIGHTS_FILE))
    return net.eval()


def load_digits() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return all 1,797 images, float32 (1797, 1, 8, 8) in 0 to 1, and their labels."""
    from sklearn.datasets import load_digits as load

    data = load()
    images = (data.images / 16).astype(np.float32)[:, np.newaxis]
    return images, data.target.astype(np.int64)


def held_out(
    labels: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the indices of the training and of the held-out images.

    A quarter of each digit's images, drawn with a fixed seed, is held out: training
    never sees it.
    """
    from sklearn.model_selection import train_test_split

    train, test = train_test_split(
        np.arange(len(labels)), test_size=0.25, stratify=labels, random_state=0
    )
    return train, test


def accuracy(
    net: nn.Module,
    images: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
) -> float:
    """Return the share of images that `net`, in eval mode, classifies right."""
    with torch.inference_mode():
        predicted = net(torch.from_numpy(images)).argmax(dim=1).numpy()
    return float((predicted == labels).mean())


def classify(image: npt.NDArray[np.float32], net: nn.Module) -> npt.NDArray[np.float32]:
    """Return the logits of one image: the task of a user of plain Dask."""
    with torch.inference_mode():
        logits: torch.Tensor = net(torch.from_numpy(image))
    return logits.numpy()
