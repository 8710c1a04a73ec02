"""One call of a supported operation: its arguments, and for a layer with weights its report.

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

# Numbers that are held at once, of per-example gradients and their factors: on a CPU allocating memory costs
# more than filling it, and a GPU needs large operations.
AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}


class Sink(Protocol):
    """Takes the gradient of a stacked weight where it is computed, so that it need not be stored."""

    def parts(self) -> list[slice]:
        """The samples whose gradients to compute and take at once; none to leave them to autograd."""

    def take(self, grads: Tensor, rows: slice) -> None:
        """Take the gradients of some of the samples."""


class Call:
    """A call of an operation that has a fast form for stacks of weight samples."""

    def stacked(self, sinks: Mapping[Tensor, Sink]) -> Any:
        """Its result by that form, inside vmap; NotImplemented to let vmap handle it.

        Args:
            sinks: By stacked weight; what they take, autograd does not return.
        """
        return NotImplemented


class Part(NamedTuple):
    """A watched parameter, or some of its rows.

    Attributes:
        name: The parameter's name.
        rows: The first row, the end, and the parameter's number of rows; None for all.
        sample: The sample of a stack, if samples are used one after another.
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
    """Per-example statistics of a layer's weights.

    Attributes:
        weight: Σ g² of the weight, over examples and samples.
        bias: Σ g² of the bias, if watched.
        gradient: The weight's Σ g, with samples on the first axis if there are several, if computed here.
        by_example: Squares of weight and bias of equal length, ``[2, N, n]``, instead of sums, so that many
            layers can be summed at once.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    gradient: Tensor | None = None
    by_example: Tensor | None = None


class Listener(Protocol):
    """Watches parameters, and gets the reports of their layers' backward passes.

    Attributes:
        stacked: Whether watched tensors are stacks of samples, used by vmap or one by one.
        batch_dim: The axis of the examples, if a layer has several.
        only: Names whose gradients the current backward pass computes; None for all.
        reported: Names that it has reported.
    """

    stacked: bool
    batch_dim: int
    only: set[str] | None
    reported: set[str]

    def begin(self, call: LayerCall) -> None:
        """Called when a layer runs."""

    def seen_examples(self) -> int | None:
        """Number of examples of the last layer in this forward pass."""

    def brings_gradient(self, call: LayerCall) -> bool:
        """Whether report() gives the gradient of such a layer's weight."""

    def report(self, call: LayerCall, x: Tensor | None, grad: Tensor) -> Tensor | None:
        """Take a layer's inputs and its outputs' gradient; returns the weight's gradient if computed here."""

    def refuse(self, names: Sequence[str], reason: str) -> None:
        """Refuse parameters that are used in an unsupported way."""

    def end_pass(self) -> None:
        """Called after a backward pass."""


_FREED = torch.empty(0)


class LayerCall(Call, ABC):
    """A call of a layer with weights, and from its forward to its backward pass the hook that reports it.

    Attributes:
        input: Its inputs; None if not needed.
        weight: Its weight, if it has one; None once it has run.
        bias: Its bias, likewise.
        listener: The listener to which it reports.
        run: The forward pass that it is part of.
        parts: The watched parts of weight and bias.
        names: Their names.
        examples: Their number.
        axis: The axis of the examples, not counting samples.
        folded: Whether examples share one axis with the positions, positions outside.
        counted: The axis of the examples in the model around the layer; None if unknown.
        samples: K, or 1.
        x_axis: The axis of the samples in inputs, if any.
        grad_axis: That of outputs; None only outside vmap.
        from_data: Whether inputs come from outside the model.
        fresh: Whether its backward pass has not run yet; a retained graph may run several.
        version: Version of the inputs at the call.
        alias: Alias of the weight for a gradient that the listener computes; None if autograd does.
    """

    # Whether squares() also computes the gradient, so that autograd need not.
    brings_gradient: ClassVar[bool] = False
    __match_args__: ClassVar[tuple[str, ...]]
    input: Any
    weight: Tensor | None
    bias: Tensor | None = None
    alias: Tensor | None = None
    fresh = True
    run: Any

    # Properties of an operation.

    def known(self) -> bool:
        """Whether its report is right for these arguments."""
        return True

    def leading(self) -> int:
        """How many of the inputs' first axes may hold the examples; if 1, the first one does."""
        return 1

    def keep(self, out: Tensor) -> None:
        """Save what else the report needs from the forward pass."""

    @abstractmethod
    def terms(self, x: Tensor, grad: Tensor) -> Tensor:
        """The weight's gradient of each of some examples, ``[n, *shape]``; x as :meth:`prepared` gives it."""

    @abstractmethod
    def bias_terms(self, grad: Tensor) -> Tensor:
        """The bias's gradient of each of some examples, ``[n, *shape]``."""

    def prepared(self, x: Tensor) -> Tensor:
        """The inputs that the weight multiplies, for all examples."""
        return x

    def held(self, x: Tensor, grad: Tensor) -> int:
        """How many numbers :meth:`terms` holds for each example."""
        return 1

    def squares(self, x: Tensor, grad: Tensor, bias: bool) -> Found:
        """Σ g² of the weight, and of the bias if it is watched too."""
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
        """Register a listener."""
        self.listener, self.parts, self.samples = listener, parts, samples
        self.names = [part.name for part in parts if part is not None]

    def find_examples(self, attending: tuple[int, int | None] | None) -> bool:
        """Find the axis of its examples, if it has one.

        Args:
            attending: Inside an attention layer, the number of examples and their axis around it.
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
        """Save only what the report needs from the forward pass, with samples on these axes."""
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
        """Pass the outputs' gradient to the listener; returns the weight's gradient if it computes it."""
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
        """Inputs or gradients as ``[N, …]``; shared ones get a row for each example."""
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
        """Whether the weight is a single matrix; grouped filters are several."""
        return True

    def by_channel(self, x: Tensor) -> Tensor:
        """Numbers ``[O]``, such as biases, in a shape that broadcasts to outputs."""
        return x.view(-1, *[1] * (-1 - self.channel_axis))

    @abstractmethod
    def columns(self, x: Tensor, grad: Tensor) -> Iterator[Tensor]:
        """The columns that the matrix multiplies at all T positions, ``[I, n·T]``, some examples at a
        time."""

    @abstractmethod
    def products(self, grad: Tensor) -> Tensor:
        """The gradients of its products, ``[O, N, T]``."""


@cache
def _arguments(kind: type[LayerCall]) -> Callable[[LayerCall], tuple[Any, ...]]:
    """Reads the fields of such a call, in their order."""
    return attrgetter(*kind.__match_args__)


def chunks(numbers: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks of examples of tensors ``[N, …]``, given the numbers held for each example."""
    step = max(1, AT_ONCE.get(tensors[0].device.type, AT_ONCE["cuda"]) // numbers)
    if step >= len(tensors[0]):
        yield tensors
    else:
        yield from zip(*(torch.split(each, step) for each in tensors), strict=True)


def spread(x: Tensor, grad: Tensor) -> Tensor:
    """Inputs with a row for every row of gradients, even if samples share them."""
    return x if len(x) == len(grad) else x.expand(len(grad) // len(x), *x.shape).flatten(0, 1)


def positions(x: Tensor) -> Tensor:
    """``[N, T…, F]`` as ``[N, T, F]``."""
    return x if x.dim() == 3 else x.reshape(len(x), -1, x.shape[-1])


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: never half."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
