"""What one call of a known operation is: its arguments, and for a layer with weights what it reports.

Each operation of torch has a dataclass whose fields are its arguments, by their names and in their order.
Layers see inputs and gradients as ``[N, …]``: N examples, each once for every weight sample, samples outside.
Inputs that all samples share have one row for each example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from posterity.torch_private import any_autocast_enabled, keeps_graph

# Numbers that are held at once, of examples' gradients and of what they are made of: on a CPU new memory
# costs more than what fills it, and a GPU wants much to do.
AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}


class Sink(Protocol):
    """Takes the gradient of a stacked weight where it is made, so that it need not be kept."""

    def parts(self) -> list[slice]:
        """Which samples' gradients to make and bring at once; none if they may be left to autograd."""

    def take(self, grads: Tensor, rows: slice) -> None:
        """Take the gradients of some of the samples."""


class Call:
    """A call of an operation that has a fast form for stacks of weight samples."""

    def stacked(self, sinks: Mapping[Tensor, Sink]) -> Any:
        """Its result by that form, inside vmap; NotImplemented where vmap's own way will do.

        Args:
            sinks: By stacked weight; what they take, autograd does not return.
        """
        return NotImplemented


class Part(NamedTuple):
    """A watched parameter, or some of its rows.

    Attributes:
        name: Of the parameter.
        rows: First one, end, and how many the parameter has; None for all.
        sample: Which of a stack's samples, where they are used one after another.
    """

    name: str
    rows: tuple[int, int, int] | None = None
    sample: int | None = None

    def meets(self, other: Part) -> bool:
        """Whether two parts have weights in common."""
        if self.name != other.name or self.sample != other.sample:
            return False
        if self.rows is None or other.rows is None:
            return True
        return self.rows[0] < other.rows[1] and other.rows[0] < self.rows[1]


class Found(NamedTuple):
    """What single examples say of a layer's weights.

    Attributes:
        weight: Σ g² of the weight, over examples and samples.
        bias: Σ g² of the bias, if it was asked for.
        gradient: The weight's Σ g, with samples in front if there are several, if the layer brings it.
        by_example: Squares of weight and bias, which are as long, ``[2, N, n]``, in the place of sums: many
            layers' are summed at once.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    gradient: Tensor | None = None
    by_example: Tensor | None = None


class Listener(Protocol):
    """Who watches parameters, and hears of the backward passes of their layers.

    Attributes:
        stacked: Whether watched tensors are stacks of samples, to be used by vmap or one by one.
        batch_dim: The axis that counts examples, where a layer leaves a choice.
        only: Names whose gradients the running backward pass makes; None for all.
        reported: Names that it has reported.
    """

    stacked: bool
    batch_dim: int
    only: set[str] | None
    reported: set[str]

    def begin(self, call: LayerCall) -> None:
        """A layer is called."""

    def seen_examples(self) -> int | None:
        """How many examples the last layer of this forward pass had."""

    def brings_gradient(self, call: LayerCall) -> bool:
        """Whether report() gives the gradient of such a layer's weight."""

    def report(self, call: LayerCall, x: Tensor | None, grad: Tensor) -> Tensor | None:
        """A layer's inputs and its outputs' gradient, as it had them; the weight's gradient, if brought."""

    def refuse(self, names: Sequence[str], reason: str) -> None:
        """Parameters are used in a way that nothing can be collected from."""

    def end_pass(self) -> None:
        """A backward pass is over."""


_FREED = torch.empty(0)


class LayerCall(Call, ABC):
    """A call of a layer with weights, and from its forward to its backward pass the hook that reports it.

    Attributes:
        input: Its inputs; None if nothing will look at them.
        weight: Its weight, if it has one; None once it has run.
        bias: Its bias, likewise.
        listener: Whom it reports to.
        run: The forward pass that it is part of.
        parts: What the listener watches of weight and bias.
        names: Of these.
        examples: How many.
        axis: Of the examples, samples aside.
        folded: Whether they are one axis together with the positions, positions outside.
        counted: The axis of the examples as the model has them around the layer; None if unknown.
        samples: K, or 1.
        x_axis: Where inputs have their samples, if they have any.
        grad_axis: Where outputs have theirs; None outside vmap alone.
        from_data: Whether inputs come from outside the model.
        fresh: Whether its backward pass has not come yet; a graph that is kept may bring several.
        version: Of the inputs when the layer was called.
        alias: Of the weight, to be given the gradient that the listener brings; None if autograd brings it.
    """

    # Whether squares() brings the gradient too, so that autograd need not make it again.
    brings_gradient: ClassVar[bool] = False
    __match_args__: ClassVar[tuple[str, ...]]
    input: Any
    weight: Tensor | None
    bias: Tensor | None = None
    alias: Tensor | None = None
    fresh = True
    run: Any

    # What an operation says of itself.

    def known(self) -> bool:
        """Whether what it reports would be right for these arguments."""
        return True

    def leading(self) -> int:
        """How many of the inputs' first axes may count examples; the first one does where it is 1."""
        return 1

    def keep(self, out: Tensor) -> None:
        """Keep what else the report needs of the forward pass."""

    @abstractmethod
    def terms(self, x: Tensor, grad: Tensor) -> Tensor:
        """The weight's gradient of each of some examples, ``[n, *shape]``; x as :meth:`prepared` gives it."""

    @abstractmethod
    def bias_terms(self, grad: Tensor) -> Tensor:
        """The bias's gradient of each of some examples, ``[n, *shape]``."""

    def prepared(self, x: Tensor) -> Tensor:
        """What the weight multiplies, of all examples."""
        return x

    def held(self, x: Tensor, grad: Tensor) -> int:
        """How many numbers :meth:`terms` holds for each example."""
        return 1

    def squares(self, x: Tensor, grad: Tensor, bias: bool) -> Found:
        """Of the weight, and of the bias if it is wanted too."""
        total = None
        for some, own in chunks(self.held(x, grad), spread(self.prepared(x), grad), grad):
            squares = self.terms(some, own).square().sum(0)
            total = squares if total is None else total.add_(squares)
        return Found(total, self.bias_squares(grad) if bias else None)

    def bias_squares(self, grad: Tensor) -> Tensor:
        """Σ g² of the bias over examples and samples."""
        return self.bias_terms(grad).square().sum(0)

    # From the forward to the backward pass.

    def listened(self, listener: Listener, parts: tuple[Part | None, Part | None], samples: int) -> None:
        """It is to report to a listener."""
        self.listener, self.parts, self.samples = listener, parts, samples
        self.names = [part.name for part in parts if part is not None]

    def find_examples(self, attending: tuple[int, int | None] | None) -> bool:
        """Find the axis of its examples, if it has one.

        Args:
            attending: Inside an attention layer how many examples there are, and their axis around it.
        """
        shape, leading = self.input.shape, self.leading()
        if attending is None:
            self.folded, self.axis = False, min(self.listener.batch_dim, leading - 1)
            self.counted = self.axis if leading > 1 else None
            self.examples = shape[self.axis] if leading else 0
            return leading > 0
        examples, self.counted = attending
        self.folded, self.axis = len(shape) == 2, 1
        self.examples = examples if self.folded else shape[1]
        return True

    def call(self, func: Callable[..., Any]) -> Any:
        """Call torch's operation with the weights that it has."""
        return func(*_arguments(type(self))(self))

    def ran(self, x: Tensor, x_axis: int | None, out: Tensor, grad_axis: int | None) -> None:
        """Keep what the report needs of the forward pass, with samples on these axes, and nothing else."""
        self.version, self.from_data, self.x_axis, self.grad_axis = x._version, x.is_leaf, x_axis, grad_axis
        self.keep(out)
        self.input = None if self.parts[0] is None else x  # a bias has no need of inputs
        self.weight = self.bias = None

    def __call__(self, grad: Tensor) -> None:
        """The hook on the layer's outputs."""
        into, alias = self.report(grad), self.alias
        if into is not None and alias is not None:
            into = into if into.dtype is alias.dtype else into.to(alias.dtype)
            alias.grad = into if alias.grad is None else alias.grad + into

    def report(self, grad: Tensor) -> Tensor | None:
        """Tell the listener of the gradient in the outputs; the weight's gradient, if it brings it."""
        x = self.input
        if x is _FREED:
            raise RuntimeError(
                "backward() was called a second time through a graph that was freed: pass "
                "retain_graph=True to the first call"
            )
        if x is not None and x._version != self.version:
            raise RuntimeError(
                f"the inputs of the layer of {', '.join(map(repr, self.names))} were changed in place before "
                "its backward pass: change a copy"
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True does not work with per-example gradients: use a method that "
                "collects no curvature"
            )
        if any_autocast_enabled() and torch.is_autocast_enabled(grad.device.type):
            with torch.autocast(grad.device.type, enabled=False):
                into = self.listener.report(self, x, grad)
        else:
            into = self.listener.report(self, x, grad)
        self.fresh = False
        if not keeps_graph():
            self.input = _FREED
        return into

    def rows(self, x: Tensor, samples_axis: int | None) -> Tensor:
        """``[N, …]`` of inputs or gradients as the layer had them; of shared ones a row for each example."""
        x = x.unsqueeze(0) if samples_axis is None else x.movedim(samples_axis, 0)
        x = x.reshape(x.shape[0], -1, self.examples, *x.shape[2:]) if self.folded else x
        return (x.movedim(self.axis + 1, 1) if self.axis else x).flatten(0, 1)


class Multiplying(LayerCall):
    """A layer whose weight is a matrix that multiplies inputs: it has Kronecker factors, and estimators."""

    @property
    def channel_axis(self) -> int:
        """The axis of channels or features, of inputs and outputs, from the end."""
        assert self.weight is not None
        return 1 - self.weight.dim()

    @property
    def matrix(self) -> bool:
        """Whether it is one; filters in groups are several."""
        return True

    def by_channel(self, x: Tensor) -> Tensor:
        """Numbers ``[O]``, such as biases, so that they broadcast to outputs."""
        return x.view(-1, *[1] * (-1 - self.channel_axis))

    @abstractmethod
    def columns(self, x: Tensor, grad: Tensor) -> Iterator[Tensor]:
        """What the matrix multiplies at all T positions, ``[I, n·T]`` for some examples after others."""

    @abstractmethod
    def products(self, grad: Tensor) -> Tensor:
        """The gradients of its products, ``[O, N, T]``."""


@cache
def _arguments(kind: type[LayerCall]) -> Callable[[LayerCall], tuple[Any, ...]]:
    """Reads the fields of such a call, in their order."""
    return attrgetter(*kind.__match_args__)


def chunks(numbers: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some examples after others of tensors ``[N, …]``, if so many numbers are held for each."""
    step = max(1, AT_ONCE.get(tensors[0].device.type, AT_ONCE["cuda"]) // numbers)
    if step >= len(tensors[0]):
        yield tensors
    else:
        yield from zip(*(torch.split(each, step) for each in tensors), strict=True)


def spread(x: Tensor, grad: Tensor) -> Tensor:
    """Inputs with a row for every row of gradients, though samples may share them."""
    return x if len(x) == len(grad) else x.expand(len(grad) // len(x), *x.shape).flatten(0, 1)


def positions(x: Tensor) -> Tensor:
    """``[N, T…, F]`` as ``[N, T, F]``."""
    return x if x.dim() == 3 else x.reshape(len(x), -1, x.shape[-1])


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are kept in: never half."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
