"""The tasks of the literature, made from data sets."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from posterity_lab.data import Dataset, Split
from posterity_lab.streams.tasks import Pair, Task, Tasks, as_tasks, many_heads, one_head

Scenario: TypeAlias = Literal["domain", "class", "task"]


def permuted(dataset: Dataset, tasks: int, seed: int) -> Tasks:
    """Tasks that show the same images with their pixels rearranged, one arrangement per task.

    The first task is the data as it is. Labels stay, so one output layer serves all tasks.

    Args:
        dataset: What to rearrange.
        tasks: Number of arrangements.
        seed: Of the arrangements.

    Example:
        >>> from posterity_lab.data import load
        >>> first, second = permuted(load("digits"), tasks=2, seed=0).items
        >>> bool((second.seen(second.test).x == first.test.x).all())
        False
    """
    _at_least_one(tasks)
    _learnable(dataset)
    generator = torch.Generator().manual_seed(seed)
    pixels, device = dataset.test.x[0].numel(), dataset.test.x.device
    orders = [torch.randperm(pixels, generator=generator).to(device) for _ in range(tasks - 1)]
    views = [None, *(partial(_rearranged, order=order) for order in orders)]
    return Tasks([Task(dataset.train, dataset.test, view) for view in views], dataset.classes)


def split(dataset: Dataset, tasks: int, scenario: Scenario) -> Tasks:
    """Tasks of equally many classes each, in the order of their labels: 0 and 1, then 2 and 3, and so on.

    Args:
        dataset: What to split; its number of classes must be a multiple of ``tasks``.
        tasks: Number of groups of classes.
        scenario: ``"domain"``: labels are those within a group, 0 and 1 in every task; ``"class"``: labels
            stay, and one output layer must tell all of them apart; ``"task"``: labels stay, and every task
            has its own head.

    Example:
        >>> from posterity_lab.data import load
        >>> tasks = split(load("digits"), tasks=5, scenario="task")
        >>> tasks.heads, tasks.items[1].test.y.unique()
        (tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]), tensor([2, 3]))
    """
    _at_least_one(tasks)
    _learnable(dataset)
    if dataset.classes % tasks:
        raise ValueError(
            f"{dataset.name} has {dataset.classes} classes, which cannot be split evenly into {tasks} tasks"
        )
    size = dataset.classes // tasks
    groups = [_group(dataset, range(task * size, (task + 1) * size)) for task in range(tasks)]
    match scenario:
        case "domain":
            return one_head(groups, size)
        case "class":
            heads = many_heads(groups)
            return Tasks(heads.items, heads.classes)
        case "task":
            return many_heads(groups)
    raise ValueError(f"scenario must be 'domain', 'class' or 'task', not {scenario!r}")


def parts(dataset: Dataset, tasks: int, seed: int) -> Tasks:
    """One data set in equal parts that arrive one by one; all are tested on the whole test set.

    Args:
        dataset: What to cut.
        tasks: Number of parts; where they cannot be equal, the first have one example more.
        seed: Chooses which example goes where.

    Example:
        >>> from posterity_lab.data import load
        >>> [len(task.train) for task in parts(load("digits"), tasks=4, seed=0).items]
        [360, 359, 359, 359]
    """
    _at_least_one(tasks)
    _learnable(dataset)
    order = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(seed))
    items = [Task(dataset.train.subset(part), dataset.test) for part in order.tensor_split(tasks)]
    return Tasks(items, dataset.classes)


def cifar(cifar10: Dataset, cifar100: Dataset, groups: int = 5) -> Tasks:
    """CIFAR-10, then groups of ten classes of CIFAR-100, one head per task (Zenke et al. 2017).

    Args:
        cifar10: The first task.
        cifar100: What the groups are taken from, in the order of its labels.
        groups: Tasks after the first, at most 10.

    Example:
        >>> from posterity_lab.data import load
        >>> cifar(load("cifar10"), load("cifar100")).classes  # doctest: +SKIP
        60
    """
    _learnable(cifar10)
    _learnable(cifar100)
    if not 0 <= groups <= cifar100.classes // 10:
        raise ValueError(f"groups must lie in 0 … {cifar100.classes // 10}, not {groups}")
    later = [_group(cifar100, range(10 * group, 10 * group + 10)) for group in range(groups)]
    return many_heads([(cifar10.train, cifar10.test), *later])


def held_out(tasks: Tasks | Iterable[Pair], share: float, seed: int) -> Tasks:
    """The same tasks, tested on a share of their training examples, which is not learned from: to tune on.

    Args:
        tasks: What to hold out from; their own test sets are left out. A user's own pairs of training and
            test data are taken as by ``one_head``.
        share: Part of every task's training examples, between 0 and 1.
        seed: Chooses the examples.

    Example:
        >>> from posterity_lab.data import load
        >>> tasks = held_out(permuted(load("digits"), tasks=2, seed=0), share=0.2, seed=0)
        >>> [(len(task.train), len(task.test)) for task in tasks.items]
        [(1150, 287), (1150, 287)]
    """
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, not {share:g}")
    given = as_tasks(tasks)
    cuts = dict[int, tuple[Split, Split]]()  # tasks that share their data share what is cut from them
    for task in given.items:
        if id(task.train) not in cuts:
            order = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(seed))
            kept = len(order) - int(share * len(order))
            cuts[id(task.train)] = task.train.subset(order[:kept]), task.train.subset(order[kept:])
    items = [Task(*cuts[id(task.train)], view=task.view) for task in given.items]
    return Tasks(items, given.classes, given.heads)


def _group(dataset: Dataset, classes: range) -> tuple[Split, Split]:
    """The training and test examples of some classes, labelled from 0."""
    return _among(dataset.train, classes), _among(dataset.test, classes)


def _among(data: Split, classes: range) -> Split:
    chosen = data.subset((data.y >= classes.start) & (data.y < classes.stop))
    return Split(chosen.x, chosen.y - classes.start)


def _rearranged(x: Tensor, order: Tensor) -> Tensor:
    return x.flatten(1)[:, order].view_as(x)


def _at_least_one(tasks: int) -> None:
    if tasks < 1:
        raise ValueError(f"tasks must be at least 1, not {tasks}")


def _learnable(dataset: Dataset) -> None:
    if len(dataset.train) == 0:
        raise ValueError(f"{dataset.name} has no training images, so nothing can be learned from it")
