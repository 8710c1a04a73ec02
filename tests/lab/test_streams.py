"""Streams: order, permutations, and that nothing but batches reaches a learner."""

from itertools import chain

import pytest
import torch

from posterity_lab.data import Dataset, Split, load
from posterity_lab.streams import permuted


@pytest.fixture
def numbered() -> Dataset:
    """Seven images of six pixels, all different, with the image's number as its label."""
    x = torch.arange(7 * 6, dtype=torch.float32).view(7, 1, 2, 3)
    return Dataset("numbered", Split(x, torch.arange(7)), Split(x[:4] + 0.5, torch.arange(4)), classes=7)


def test_every_epoch_of_every_task_shows_each_image_once(numbered: Dataset) -> None:
    stream = permuted(numbered, tasks=3, epochs=2, batch_size=3, seed=1)
    labels = [y.tolist() for _, y in stream]
    assert [len(batch) for batch in labels] == [3, 3, 1] * 6
    assert len(stream) == len(labels) == 18
    assert stream.ends == [6, 12, 18]
    epochs = [list(chain(*labels[start : start + 3])) for start in range(0, 18, 3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_one_arrangement_per_task_shared_by_training_and_test(numbered: Dataset) -> None:
    stream = permuted(numbered, tasks=3, epochs=1, batch_size=7, seed=1)
    arrangements = []
    for (x, y), test in zip(stream, stream.tests, strict=True):
        assert x.shape == (7, 1, 2, 3)
        # Pixel values number the pixels, so an image without its own offset is the arrangement.
        own = x.flatten(1) - 6 * y[:, None]
        assert (own == own[0]).all()
        assert (test.x.flatten(1) - 6 * test.y[:, None] - 0.5 == own[0]).all()
        assert sorted(own[0].tolist()) == list(range(6))
        arrangements.append(tuple(own[0].tolist()))
    assert arrangements[0] == tuple(range(6))
    assert len(set(arrangements)) == 3


def test_a_pass_can_be_repeated_and_the_seed_decides(numbered: Dataset) -> None:
    def inputs(seed: int) -> list[torch.Tensor]:
        stream = permuted(numbered, tasks=2, epochs=1, batch_size=7, seed=seed)
        first, second = ([x for x, _ in stream] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        return first

    assert all(torch.equal(a, b) for a, b in zip(inputs(3), inputs(3), strict=True))
    assert not torch.equal(inputs(3)[1], inputs(4)[1])


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    list(permuted(load("digits"), tasks=2, epochs=1, batch_size=512, seed=0))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("wrong", [{"tasks": 0}, {"epochs": 0}, {"batch_size": 0}])
def test_sizes_below_one_are_refused(numbered: Dataset, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        permuted(numbered, **{"tasks": 2, "epochs": 1, "batch_size": 2, "seed": 0, **wrong})


def test_a_set_without_training_images_is_refused(numbered: Dataset) -> None:
    empty = Dataset("tests only", numbered.train.subset([]), numbered.test, classes=7)
    with pytest.raises(ValueError, match="tests only has no training images"):
        permuted(empty, tasks=2, epochs=1, batch_size=2, seed=0)
