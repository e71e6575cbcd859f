"""The demo's images are the same everywhere, and as its workers expect them."""

from __future__ import annotations

import torch

from farandole.integrations.demo.digits import TESTED, TRAINED, digits, drawn_digits, has_handwritten


def test_the_images_are_the_same_each_time_and_are_digits() -> None:
    (train, test), (again, _) = drawn_digits(), drawn_digits()
    images, labels = train.tensors
    assert images.shape == (TRAINED, 1, 8, 8)
    assert test.tensors[0].shape == (TESTED, 1, 8, 8)
    assert torch.equal(images, again.tensors[0])
    assert 0 <= images.min() <= images.max() <= 1
    assert set(labels.tolist()) == set(test.tensors[1].tolist()) == set(range(10))


def test_an_image_is_most_like_the_mean_of_its_digit() -> None:
    train, test = drawn_digits()
    images, labels = (tensor.flatten(1) if tensor.dim() > 1 else tensor for tensor in train.tensors)
    means = torch.stack([images[labels == digit].mean(dim=0) for digit in range(10)])
    nearest = torch.cdist(test.tensors[0].flatten(1), means).argmin(dim=1)
    assert (nearest == test.tensors[1]).float().mean() > 0.8


def test_handwritten_digits_are_preferred_and_look_the_same_to_a_script() -> None:
    handwritten, drawn = digits(), drawn_digits()
    assert has_handwritten()
    for ours, theirs in zip(handwritten, drawn, strict=True):
        assert [(tensor.shape, tensor.dtype) for tensor in ours.tensors] == [
            (tensor.shape, tensor.dtype) for tensor in theirs.tensors
        ]
        assert not torch.equal(ours.tensors[0], theirs.tensors[0])
