"""A model's inputs and outputs: inputs of any form in batches, and the tensor among the outputs.

Inputs are a tensor, a NumPy array, or a tuple, list or mapping of them, nested at will, with examples along
the first axis of each. A model is called as ``model(x)``; with a tuple or list as ``model(*x)``, with a
mapping as ``model(**x)``. Any other iterable, such as a DataLoader, yields batches of inputs. If such a batch
also has targets, they are

- the last element of a tuple or list of two or more: ``(x, y)``, ``(ids, mask, labels)``;
- the entry ``"labels"`` of a mapping.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, RandomSampler

from posterity.arguments import described
from posterity.caller import warn

T = TypeVar("T")
Inputs: TypeAlias = Any
# A key or attribute, an index, or a function.
Pick: TypeAlias = str | int | Callable[[Any], Any]


def is_loader(x: Inputs) -> bool:
    """Whether it is an iterable of batches rather than of tensors.

    Example:
        >>> is_loader(iter([torch.ones(3)])), is_loader([torch.ones(3)])
        (True, False)
    """
    if isinstance(x, Dataset):
        raise TypeError("a Dataset gives single examples: pass DataLoader(dataset, batch_size=…)")
    return isinstance(x, Iterable) and not (isinstance(x, str | list | tuple | Mapping) or _is_array(x))


def batches(x: Inputs, batch_size: int, pick: Pick | None = None) -> Iterator[Inputs]:
    """Inputs in batches; from a loader's batches the part that ``pick`` picks, by default all but the
    targets."""
    if is_loader(x):
        if isinstance(getattr(x, "sampler", None), RandomSampler):
            warn(
                "the loader shuffles, and results come in the order of its batches: pass one with "
                "shuffle=False to compare them with targets"
            )
        found = None
        for batch in x:
            found = separated(batch)[0] if pick is None else picked(batch, pick)
            length(found)
            yield found
        if found is None:
            raise ValueError("the loader gave no batch: pass one that is not at its end")
    elif pick is not None:
        raise TypeError(f"inputs= picks from the batches of a loader, and x is a {type(x).__name__}")
    else:
        for start in range(0, length(x), batch_size):
            yield mapped(x, itemgetter(slice(start, start + batch_size)))


def pairs(data: Any, batch_size: int) -> Iterator[tuple[Inputs, Any]]:
    """Batches of inputs and targets: those of a pair ``(inputs, targets)``, or of an iterable of batches."""
    several = isinstance(data, tuple | list)
    whole = isinstance(data, Mapping) or (several and len(data) == 2 and _is_array(data[1]))
    if not (whole or several or is_loader(data)):
        raise TypeError(f"data must be (inputs, targets) or a DataLoader, not a {type(data).__name__}")
    for batch in [data] if whole else data:
        x, y = separated(batch)
        if y is None or not _is_array(y):
            raise TypeError(
                f"a batch must be (inputs, targets), or a mapping with 'labels', not a {type(batch).__name__}"
            )
        if length(x) != len(y):
            raise ValueError(f"a batch has {length(x)} inputs and {len(y)} targets: give one for each")
        yield from batches((x, y), batch_size) if whole else [(x, y)]


def shown(parts: Iterable[T], doing: str) -> Iterable[T]:
    """The same items, such as batches, with a labelled progress bar.

    Example:
        >>> list(shown([1, 2], "counting"))
        [1, 2]
    """
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError as error:
        raise ImportError("a progress bar needs rich: pip install 'posterity[lab]'") from error
    return track(parts, description=doing, console=Console(stderr=True))


def separated(batch: Any) -> tuple[Inputs, Any]:
    """The inputs of a batch and its targets, or None where it has no targets.

    Example:
        >>> separated(["a", "b", "labels"]), separated({"x": 1, "labels": 2}), separated([1])
        ((('a', 'b'), 'labels'), ({'x': 1}, 2), (1, None))
    """
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != "labels"}, batch.get("labels")
    if not isinstance(batch, list | tuple) or not batch:
        return batch, None
    *inputs, last = batch
    if not inputs:
        return last, None
    return inputs[0] if len(inputs) == 1 else tuple(inputs), last


def length(x: Inputs) -> int:
    """The number of examples; raises unless all tensors have the same number, at least one.

    Example:
        >>> length({"ids": torch.ones(4, 7), "more": (torch.ones(4),)})
        4
    """
    shapes: list[tuple[int, ...]] = []

    def look(each: Any) -> None:
        if isinstance(each, Tensor) and each.layout is not torch.strided:
            raise TypeError(
                f"the inputs have {described(each)}, which cannot be cut into batches: pass .to_dense()"
            )
        shapes.append(tuple(each.shape))

    mapped(x, look)
    if not shapes:
        raise TypeError(f"the inputs must hold tensors or arrays, which a {type(x).__name__} does not")
    if len({shape[:1] for shape in shapes}) > 1 or not shapes[0]:
        raise ValueError(f"all inputs need the same number of examples on axis 0, not the shapes {shapes}")
    if shapes[0][0] == 0:
        raise ValueError("there are no examples: the inputs, or those of a batch, are empty")
    return shapes[0][0]


def moved(x: Inputs, model: nn.Module) -> Inputs:
    """The inputs as tensors on the model's device; arrays of floats take its dtype, tensors keep theirs.

    Tensors made in inference mode are copied outside it: no backward pass could keep them.
    """
    own = chain(model.parameters(), model.buffers())
    like = next((each for each in own if each.is_floating_point()), None)

    def move(each: Any) -> Tensor:
        dtype = None
        if isinstance(each, Tensor) and each.is_meta:
            raise TypeError("the inputs have a tensor on the device 'meta', which holds no numbers")
        if not isinstance(each, Tensor):
            each = torch.as_tensor(each.__array__().copy())  # torch takes no read-only or reversed arrays
            dtype = like.dtype if like is not None and each.is_floating_point() else None
        elif each.is_inference() and not torch.is_inference_mode_enabled():
            each = each.clone()
        return cast(Tensor, each if like is None else each.to(like.device, dtype))

    return mapped(x, move)


def mapped(x: Inputs, function: Callable[[Any], Any]) -> Inputs:
    """The same structure with a function of each tensor or array; all else stays as it is."""
    if isinstance(x, Mapping):
        new = {key: mapped(value, function) for key, value in x.items()}
        return x if all(new[key] is value for key, value in x.items()) else new  # of its own type
    if isinstance(x, list | tuple):
        parts = [mapped(value, function) for value in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return function(x) if _is_array(x) else x


def rows_of(outputs: Tensor, x: Inputs) -> Tensor:
    """Networks' outputs ``[S, B, ...]``, after checking that each input has its rows: one, or several such as
    tokens."""
    rows = outputs.shape[1] if outputs.dim() > 1 else 0
    if rows == 0 or rows % length(x):
        raise ValueError(
            f"the model gave outputs {list(outputs.shape[1:])} for a batch of {length(x)} inputs: "
            "keep the batch on axis 0, and pass a single input x as x[None]"
        )
    return outputs


def arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the model's call."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x) if isinstance(x, list | tuple) else (x,)), {}


def called(model: nn.Module, x: Inputs, output: Pick | None = None) -> Tensor:
    """The model's output for a batch of inputs, which go to its device."""
    args, kwargs = arguments(moved(x, model))
    return tensor_of(model(*args, **kwargs), output)


def tensor_of(result: Any, output: Pick | None = None) -> Tensor:
    """The model's output if it is a tensor, else its ``logits``; or the one that ``output`` picks.

    Example:
        >>> tensor_of({"logits": torch.ones(2), "loss": torch.zeros(())})
        tensor([1., 1.])
        >>> tensor_of((torch.ones(2), torch.zeros(3)), output=1)
        tensor([0., 0., 0.])
    """
    if output is not None:
        found = picked(result, output)
    elif isinstance(result, Mapping):
        found = result.get("logits", result)
    else:
        found = result if isinstance(result, Tensor) else getattr(result, "logits", result)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"the model must return one tensor, not {type(found).__name__}: pick one by output=, a key, an "
            "index or a function"
        )
    return found


def picked(whole: Any, pick: Pick) -> Any:
    """One part of a batch or an output, by key or attribute, by index, or by a function."""
    if callable(pick):
        return pick(whole)
    try:
        return (
            getattr(whole, pick) if isinstance(pick, str) and not isinstance(whole, Mapping) else whole[pick]
        )
    except (AttributeError, LookupError, TypeError) as error:
        has = f" with {', '.join(map(repr, whole))}" if isinstance(whole, Mapping) else ""
        raise ValueError(f"there is no {pick!r} to pick from a {type(whole).__name__}{has}") from error


@contextmanager
def random_numbers_kept(*models: nn.Module) -> Iterator[None]:
    """A context in which a loader or a model may draw from torch's generators, which are restored afterwards.

    Loaders draw a seed whenever they start, shuffled or not. Generators are global to the process: restoring
    them from a thread other than the main one would repeat numbers drawn there in the meantime.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    generators = [torch.default_generator]
    if torch.cuda.default_generators:  # there are none before CUDA is used
        tensors = chain.from_iterable(chain(model.parameters(), model.buffers()) for model in models)
        devices = {each.device.index for each in tensors if each.is_cuda}
        generators += [torch.cuda.default_generators[device] for device in devices]
    before = [each.get_state() for each in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            if not torch.equal(generator.get_state(), state):  # else it is nobody's
                generator.set_state(state)


def _is_array(x: object) -> bool:
    return isinstance(x, Tensor) or hasattr(x, "__array__")
