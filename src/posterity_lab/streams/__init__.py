"""Streams: data that arrives batch by batch while what it is about changes underneath.

Two ideas, and any of the first goes with any of the second:

* *tasks*, what there is to learn: :func:`permuted`, :func:`split`, :func:`parts`, :func:`cifar`, or a user's
  own pairs of training and test data, with :func:`one_head` or with :func:`many_heads`;
* a *stream*, when it is shown: one task after another or fading into each other (:func:`stream`), or all at
  once (:func:`joint`).

A method sees a stream's batches and nothing else. Where the tasks change, and the test set of each task, are
there for the one who evaluates.
"""

from posterity_lab.streams.images import normalised, padded
from posterity_lab.streams.makers import cifar, held_out, parts, permuted, split
from posterity_lab.streams.masks import Mask, masked_loss, own_head, present, restricted
from posterity_lab.streams.schedule import Batch, Stream, joint, stream, trapezoids
from posterity_lab.streams.tasks import Task, Tasks, many_heads, one_head

__all__ = [
    "Batch",
    "Mask",
    "Stream",
    "Task",
    "Tasks",
    "cifar",
    "held_out",
    "joint",
    "many_heads",
    "masked_loss",
    "normalised",
    "one_head",
    "own_head",
    "padded",
    "parts",
    "permuted",
    "present",
    "restricted",
    "split",
    "stream",
    "trapezoids",
]
