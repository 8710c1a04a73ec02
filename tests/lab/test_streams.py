"""Streams: order, views, heads, fading, starting anywhere, and that bad data is refused at once."""

from collections.abc import Callable
from functools import partial
from itertools import chain, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from posterity import BGD, compile_step
from posterity_lab.data import Dataset, Split, batches, load
from posterity_lab.streams import (
    Stream,
    Tasks,
    cifar,
    held_out,
    joint,
    many_heads,
    masked_loss,
    normalised,
    one_head,
    own_head,
    padded,
    parts,
    permuted,
    present,
    restricted,
    split,
    stream,
    trapezoids,
)

SHORT = {"epochs": 2, "batch_size": 3, "seed": 1}


@pytest.fixture
def numbered() -> Dataset:
    """Seven images of six pixels, all different, with the image's number as its label."""
    x = torch.arange(7 * 6, dtype=torch.float32).view(7, 1, 2, 3)
    return Dataset("numbered", Split(x, torch.arange(7)), Split(x[:4] + 0.5, torch.arange(4)), classes=7)


def classes_of(count: int, each: int = 3) -> Dataset:
    """Examples whose only input is their label."""
    y = torch.arange(count).repeat(each)
    data = Split(y[:, None].float(), y)
    return Dataset(f"{count} classes", data, data, count)


def same(one: list[tuple[Tensor, Tensor]], two: list[tuple[Tensor, Tensor]]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a, b)
        for first, second in zip(one, two, strict=True)
        for a, b in zip(first, second, strict=True)
    )


def test_every_epoch_of_every_task_shows_each_image_once(numbered: Dataset) -> None:
    shown = stream(permuted(numbered, tasks=3, seed=1), **SHORT)
    labels = [y.tolist() for _, y in shown]
    assert [len(batch) for batch in labels] == [3, 3, 1] * 6
    assert len(shown) == len(labels) == 18
    assert shown.ends == [6, 12, 18]
    epochs = [list(chain(*labels[start : start + 3])) for start in range(0, 18, 3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_order_is_that_of_training_on_one_data_set(numbered: Dataset) -> None:
    shown = stream([(numbered.train, numbered.test)], **SHORT)
    plain = [batch for epoch in range(2) for batch in batches(numbered.train, 3, seed=1, epoch=epoch)]
    assert same(list(shown), plain)


def test_one_arrangement_per_task_shared_by_training_and_test(numbered: Dataset) -> None:
    shown = stream(permuted(numbered, tasks=3, seed=1), epochs=1, batch_size=7, seed=1)
    arrangements = []
    for (x, y), test in zip(shown, shown.tests, strict=True):
        assert x.shape == (7, 1, 2, 3)
        # Pixel values number the pixels, so an image without its own offset is the arrangement.
        own = x.flatten(1) - 6 * y[:, None]
        assert (own == own[0]).all()
        assert (test.x.flatten(1) - 6 * test.y[:, None] - 0.5 == own[0]).all()
        assert sorted(own[0].tolist()) == list(range(6))
        arrangements.append(tuple(own[0].tolist()))
    assert arrangements[0] == tuple(range(6))
    assert len(set(arrangements)) == 3


SCHEDULES: dict[str, Callable[[Tasks], Stream]] = {
    "sequence": partial(stream, epochs=3, batch_size=3, seed=1),
    "fading": partial(stream, epochs=40, batch_size=3, seed=1, overlap=0.25),
    "joint": partial(joint, epochs=3, batch_size=4, seed=1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pass_can_be_repeated_and_begin_anywhere(numbered: Dataset, name: str) -> None:
    shown = SCHEDULES[name](permuted(numbered, tasks=3, seed=1))
    whole = list(shown)
    assert len(whole) == len(shown)
    assert same(whole, list(shown))
    for start in {0, 1, 7, len(shown) // 2, len(shown) - 1, len(shown)}:
        assert same(list(shown.batches(start)), whole[start:])
    with pytest.raises(ValueError, match=f"start must lie in 0 … {len(shown)}, not -1"):
        shown.batches(-1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_starting_late_draws_no_batch_before(numbered: Dataset, name: str) -> None:
    shown = SCHEDULES[name](permuted(numbered, tasks=3, seed=1))
    asked = []
    late = Stream(
        shown.tasks,
        shown.ends,
        shown.setting,
        shown._bounds,
        lambda block, generator: asked.append(block) or shown._draw(block, generator),
    )
    next(late.batches(len(shown) - 1))
    assert asked == [len(shown._bounds) - 2]


def test_the_seed_decides(numbered: Dataset) -> None:
    tasks = permuted(numbered, tasks=2, seed=3)
    one, two, other = (list(stream(tasks, epochs=1, batch_size=7, seed=seed)) for seed in (3, 3, 4))
    assert same(one, two)
    assert not same(one, other)
    shuffled = permuted(numbered, tasks=2, seed=4).items[1].seen(numbered.test).x
    assert not torch.equal(tasks.items[1].seen(numbered.test).x, shuffled)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    tasks = permuted(load("digits"), tasks=2, seed=0)
    list(stream(tasks, epochs=1, batch_size=512, seed=0))
    list(stream(tasks, epochs=1, batch_size=512, seed=0, overlap=0.25))
    list(joint(tasks, epochs=1, batch_size=512, seed=0))
    assert torch.equal(before, torch.random.get_rng_state())


def test_trapezoids_follow_their_definition() -> None:
    length, tasks, beta = 40, 4, 4
    probs = trapezoids([length * (task + 1) for task in range(tasks)], 1 / beta)
    reach = length / beta
    for task in range(tasks):
        for batch in range(length * tasks):
            rising = 1.0 if task == 0 else (batch - (task * length - reach)) / (2 * reach)
            falling = 1.0 if task == tasks - 1 else ((task + 1) * length + reach - batch) / (2 * reach)
            expected = max(0.0, min(1.0, rising, falling))
            assert probs[batch, task].item() == pytest.approx(expected, abs=1e-12)
    assert torch.allclose(probs.sum(1), torch.ones(length * tasks, dtype=torch.float64))


def test_overlap_of_tasks_is_limited_by_the_shorter() -> None:
    probs = trapezoids([40, 48], 0.25)
    assert probs[37, 1] == 0
    assert probs[39, 1] > 0
    assert probs[41, 1] < 1
    assert (probs[42:, 1] == 1).all()


def test_a_fading_stream_draws_tasks_by_their_probabilities() -> None:
    data = [Split(torch.full((20, 1), float(task)), torch.zeros(20).long()) for task in range(2)]
    shown = stream([(part, part) for part in data], epochs=30, batch_size=10, seed=2, overlap=0.25)
    assert shown.ends == [60, 120]
    share = torch.stack([x.mean() for x, _ in shown])
    probs = trapezoids(shown.ends, 0.25)[:, 1]
    assert (share[probs == 0] == 0).all()
    assert (share[probs == 1] == 1).all()
    # Means of independent Bernoulli draws: the sum over batches has a variance of sum p (1 - p) / 10.
    error = ((probs * (1 - probs)).sum() / 10).sqrt()
    assert abs(float(share.sum() - probs.sum())) < 5 * float(error)


def test_fading_stream_draws_examples_about_equally_often() -> None:
    data = Split(torch.arange(10.0)[:, None], torch.zeros(10).long())
    shown = stream([(data, data)], epochs=200, batch_size=10, seed=0, overlap=0.5)
    counts = torch.bincount(torch.cat([x for x, _ in shown]).flatten().long(), minlength=10)
    assert len(counts) == 10
    assert ((counts - 200).abs() < 5 * (2000 * 0.1 * 0.9) ** 0.5).all()


def test_a_joint_stream_shows_all_tasks_in_every_epoch(numbered: Dataset) -> None:
    tasks = permuted(numbered, tasks=2, seed=1)
    shown = joint(tasks, epochs=2, batch_size=14, seed=0)
    assert shown.ends == [2]
    wanted = sorted(tuple(row) for task in tasks.items for row in task.seen(task.train).x.flatten(1).tolist())
    for x, _ in shown:
        assert sorted(tuple(row) for row in x.flatten(1).tolist()) == wanted


@pytest.mark.parametrize(
    ("scenario", "outputs", "labels"),
    [
        ("domain", 2, [[0, 1]] * 3),
        ("class", 6, [[0, 1], [2, 3], [4, 5]]),
        ("task", 6, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_split_in_its_three_scenarios(scenario, outputs, labels) -> None:
    tasks = split(classes_of(6), tasks=3, scenario=scenario)
    assert tasks.classes == outputs
    assert [task.train.y.unique().tolist() for task in tasks.items] == labels
    assert [task.test.y.unique().tolist() for task in tasks.items] == labels
    seen = [task.train.x.unique().tolist() for task in tasks.items]
    assert seen == [[0, 1], [2, 3], [4, 5]]
    assert (tasks.heads is not None) == (scenario == "task")
    if tasks.heads is not None:
        assert tasks.heads.tolist() == [0, 0, 1, 1, 2, 2]


def test_parts_are_disjoint_and_together_the_whole(numbered: Dataset) -> None:
    tasks = parts(numbered, tasks=3, seed=0)
    assert [len(task.train) for task in tasks.items] == [3, 2, 2]
    assert sorted(chain(*(task.train.y.tolist() for task in tasks.items))) == list(range(7))
    assert all(task.test is numbered.test for task in tasks.items)


def test_held_out_examples_are_tested_and_not_learned(numbered: Dataset) -> None:
    tasks = permuted(numbered, tasks=2, seed=1)
    tuned = held_out(tasks, share=0.3, seed=0)
    first, second = tuned.items
    assert (len(first.train), len(first.test)) == (5, 2)
    assert sorted([*first.train.y.tolist(), *first.test.y.tolist()]) == list(range(7))
    assert first.train is second.train  # not copied for every arrangement
    assert first.test is second.test
    assert (second.view, tuned.classes, tuned.heads) == (tasks.items[1].view, 7, None)
    heads = split(classes_of(4), tasks=2, scenario="task")
    assert held_out(heads, share=0.5, seed=0).heads is heads.heads
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match="share must lie between 0 and 1"):
            held_out(tasks, share=share, seed=0)
    with pytest.raises(ValueError, match="task 1 has no test examples"):
        held_out(tasks, share=0.1, seed=0)


def test_a_bare_list_of_pairs_is_held_out_from_as_by_one_head() -> None:
    tuned, same = (held_out(tasks, share=0.5, seed=0) for tasks in ([GOOD, GOOD], one_head([GOOD, GOOD])))
    assert tuned.classes == same.classes
    assert [len(task.test) for task in tuned.items] == [2, 2]
    for mine, other in zip(tuned.items, same.items, strict=True):
        assert torch.equal(mine.train.x, other.train.x)
        assert torch.equal(mine.test.y, other.test.y)


def test_the_cifar_sequence_has_a_head_per_task() -> None:
    tasks = cifar(classes_of(10), classes_of(100))
    assert tasks.classes == 60
    assert tasks.heads.tolist() == [task for task in range(6) for _ in range(10)]
    for number, task in enumerate(tasks.items):
        assert task.train.y.unique().tolist() == list(range(10 * number, 10 * number + 10))
    third = tasks.items[2]
    assert (third.train.x[:, 0] == third.train.y - 10).all()  # classes 10 … 19 of CIFAR-100
    with pytest.raises(ValueError, match="groups must lie in 0 … 10, not 11"):
        cifar(classes_of(10), classes_of(100), groups=11)


def test_padding_keeps_the_image_in_the_middle(numbered: Dataset) -> None:
    ready = padded(numbered, 4)
    assert torch.equal(ready.train.x[:, :, 1:3, 0:3], numbered.train.x)
    assert ready.train.x.sum() == numbered.train.x.sum()
    assert ready.test.x.shape[1:] == (1, 4, 4)
    assert torch.allclose(normalised(numbered).test.x, (numbered.test.x - 0.1) / 0.2752)
    with pytest.raises(ValueError, match="images of 2x3, which do not fit in 2x2"):
        padded(numbered, 2)
    with pytest.raises(ValueError, match="std must be greater than 0"):
        normalised(numbered, std=0.0)


X, Y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
GOOD = ((X, Y), (X, Y))
NAN = X.clone().index_fill(0, torch.tensor([2]), float("nan"))
REFUSED = {
    "no tasks": ([], "at least one task"),
    "no training examples": ([GOOD, ((X[:0], Y[:0]), (X, Y))], "task 2 has no training examples"),
    "no test examples": ([GOOD, ((X, Y), (X[:0], Y[:0]))], "task 2 has no test examples"),
    "a label too high": ([GOOD, ((X, Y), (X, Y + 1))], "task 2 has the test label 2, which is not in 0 … 1"),
    "a label below 0": ([GOOD, ((X, Y - 1), (X, Y))], "task 2 has the training label -1"),
    "a NaN": ([GOOD, ((NAN, Y), (X, Y))], "task 2 has training inputs that are not finite, the first at 2"),
    "fewer labels": ([((X, Y[:3]), (X, Y))], "give one label for every input"),
    "another shape": ([GOOD, ((X[:, :1], Y), (X, Y))], r"inputs of shape \[1\], not \[2\] as task 1"),
    "bytes": ([((X.byte(), Y), (X.byte(), Y))], "task 1 has training inputs of torch.uint8"),
    "labels that are floats": ([((X, Y.float()), (X, Y))], r"convert them with .long\(\)"),
    "no tasks but one": ([(X, Y)], r"^task 1 needs two tensors, inputs and labels, for training"),
    "no test data": ([GOOD, ((X, Y),)], r"^task 2 is not a pair of training and test data: pass \(\(x, y\)"),
    "data sets": ([(torch.utils.data.TensorDataset(X, Y),) * 2], r"of a TensorDataset its \.tensors"),
    "arrays": ([((X, Y.numpy()), (X, Y))], r"of an array torch\.as_tensor\(array\)"),
    "only labels below 0": ([((X, Y - 9), (X, Y))], r"label -\d, which is not in 0 … 0: correct it$"),
    "another device": ([GOOD, ((X.to("meta"), Y), (X, Y))], "task 2 has training data on another device"),
}


@pytest.mark.parametrize("how", [one_head, many_heads])
@pytest.mark.parametrize("name", REFUSED)
def test_bad_data_is_refused_in_one_sentence(name: str, how: Callable) -> None:
    pairs, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence) as error:
        how(pairs)
    assert "\n" not in str(error.value)


def test_a_stream_of_bad_data_is_refused_before_its_first_batch() -> None:
    with pytest.raises(ValueError, match="not finite"):
        stream([GOOD, ((NAN, Y), (X, Y))], **SHORT)


def test_given_classes_bound_the_labels() -> None:
    assert one_head([GOOD], classes=5).classes == 5
    with pytest.raises(ValueError, match="training label 1, which is not in 0 … 0"):
        one_head([GOOD], classes=1)


@pytest.mark.parametrize(
    ("key", "value"), [("epochs", 0), ("batch_size", 0), ("overlap", -0.1), ("overlap", 0.6)]
)
def test_wrong_sizes_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        stream([GOOD], **{**SHORT, key: value})


@pytest.mark.parametrize(
    "make",
    [lambda data: permuted(data, 0, 0), lambda data: split(data, 0, "class"), lambda data: parts(data, 0, 0)],
)
def test_no_tasks_are_refused(numbered: Dataset, make: Callable) -> None:
    with pytest.raises(ValueError, match="tasks must be at least 1, not 0"):
        make(numbered)


def test_what_cannot_be_split_is_refused(numbered: Dataset) -> None:
    with pytest.raises(ValueError, match="numbered has 7 classes, which cannot be split evenly into 2 tasks"):
        split(numbered, 2, "class")
    with pytest.raises(ValueError, match="scenario must be"):
        split(classes_of(4), 2, "other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="task 8 has no training examples"):
        parts(numbered, 8, 0)
    empty = Dataset("tests only", numbered.train.subset([]), numbered.test, classes=7)
    with pytest.raises(ValueError, match="tests only has no training images"):
        permuted(empty, tasks=2, seed=0)


def test_masked_classes_have_no_probability_and_no_gradient() -> None:
    net, x, y = nn.Linear(3, 4), torch.randn(5, 3), torch.tensor([0, 2, 0, 2, 2])
    masked_loss(partial(present, classes=4))(net, x, y).backward()
    assert net.weight.grad is not None
    assert (net.weight.grad[[1, 3]] == 0).all()
    assert (net.weight.grad[[0, 2]] != 0).all()
    heads = torch.tensor([0, 0, 1, 1])
    by_hand = torch.stack(
        [
            cross_entropy(logits[:2], label) if label < 2 else cross_entropy(logits[2:], label - 2)
            for logits, label in zip(net(x), y, strict=True)
        ]
    ).mean()
    assert torch.allclose(masked_loss(partial(own_head, heads=heads))(net, x, y), by_hand)
    probs = restricted(torch.randn(6, 5, 4), own_head(y, heads)).softmax(-1)  # [samples, examples, classes]
    assert (probs[:, y < 2][..., 2:] == 0).all()
    assert torch.allclose(masked_loss()(net, x, y), cross_entropy(net(x), y))


@pytest.mark.parametrize(
    "mask", [partial(present, classes=4), partial(own_head, heads=torch.tensor([0, 0, 1, 1]))]
)
def test_masks_work_under_stacked_weight_samples(mask: Callable) -> None:
    net = nn.Linear(3, 4)
    before = net.weight.detach().clone()
    step = compile_step(net, masked_loss(mask), BGD(net, std_init=0.1, mc_samples=4))
    step(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0]))
    moved = (net.weight != before).any(1)
    assert moved.tolist() == [True, True, False, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", SCHEDULES)
def test_data_on_a_gpu_is_drawn_there_in_the_same_order_without_waiting(
    numbered: Dataset, name: str, no_waiting: Callable
) -> None:
    there = Dataset("there", numbered.train.to("cuda"), numbered.test.to("cuda"), numbered.classes)
    here = list(SCHEDULES[name](permuted(numbered, tasks=3, seed=1)))
    shown = SCHEDULES[name](permuted(there, tasks=3, seed=1))
    drawn = []
    for start, end in pairwise(shown._bounds):
        block = shown.batches(start)
        drawn.append(next(block))  # the indices of a block are moved once
        with no_waiting():
            drawn += [next(block) for _ in range(start + 1, end)]
    assert all(x.is_cuda and y.is_cuda for x, y in drawn)
    assert same(here, [(x.cpu(), y.cpu()) for x, y in drawn])
