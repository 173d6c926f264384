"""The demo's network: its weights, and how they came about."""

from __future__ import annotations

import numpy as np
import torch

from daskinfer.demo.digits import (
    WEIGHTS_FILE,
    accuracy,
    classify,
    held_out,
    load_digits,
    load_model,
)
from daskinfer.demo.train import train


def test_weights_are_small_enough_to_ship() -> None:
    assert WEIGHTS_FILE.stat().st_size < 200_000


def test_images_and_labels() -> None:
    images, labels = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == np.float32
    assert images.min() == 0
    assert images.max() == 1
    assert sorted(set(labels)) == list(range(10))


def test_split_is_disjoint_stratified_and_the_same_every_time() -> None:
    _, labels = load_digits()
    training, testing = held_out(labels)
    assert sorted([*training, *testing]) == list(range(1797))
    assert len(testing) == 450
    assert np.bincount(labels[testing]).min() >= 40
    assert np.array_equal(testing, held_out(labels)[1])


def test_network_is_accurate_on_images_it_never_saw() -> None:
    images, labels = load_digits()
    _, testing = held_out(labels)
    assert accuracy(load_model(), images[testing], labels[testing]) >= 0.97


def test_network_is_in_eval_mode() -> None:
    assert not any(module.training for module in load_model().modules())


def test_one_image_at_a_time_gives_what_all_at_once_give() -> None:
    images, _ = load_digits()
    net = load_model()
    with torch.inference_mode():
        together = net(torch.from_numpy(images[:20])).numpy()
    alone = np.concatenate([classify(image[np.newaxis], net) for image in images[:20]])
    np.testing.assert_allclose(alone, together, rtol=1e-4, atol=1e-5)


def test_training_learns() -> None:
    _, score = train(epochs=3)
    assert score >= 0.9
