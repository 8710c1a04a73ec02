"""Training steps that keep a GPU busy: CUDA graphs, with losses checked asynchronously."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn


@final
class Watch:
    """Raises for non-finite losses: at once, or on a GPU when their number has reached the host."""

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros((), device=device)
        self._host = torch.zeros((), pin_memory=device.type == "cuda")

    def see(self, loss: Tensor) -> Tensor:
        """1 if the loss is not finite, so that the step must not be taken; 0 otherwise."""
        bad = (~torch.isfinite(loss.detach())).float()
        self.count += bad
        self._host.copy_(self.count, non_blocking=True)
        if not loss.is_cuda:
            self.refuse()
        return bad

    def refuse(self) -> None:
        """Raise if there was such a loss, without waiting for the device."""
        if self._host > 0:
            self.count.zero_()
            self._host.zero_()
            raise FloatingPointError(
                "the loss is not finite; the weights were not touched: look for bad values in the batch, "
                "or lower lr"
            )


def rates_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Move learning rates to the device of the parameters, where captured steps read them.

    Example:
        >>> sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> rates_on_device(sgd)
        >>> sgd.param_groups[0]["lr"]
        0.5
    """
    for group in optimizer.param_groups:
        if (device := group["params"][0].device).type == "cuda":
            group["lr"] = torch.tensor(float(group["lr"]), device=device)


@final
class Captured:
    """A step that on a GPU becomes a CUDA graph when a batch shape comes for the second time.

    Args:
        model: The model whose modes the step depends on.
        learn: The step; it must do all its work on the device and change tensors in place.
        tensors: All tensors that a step changes.
    """

    def __init__(
        self,
        model: nn.Module,
        learn: Callable[..., Tensor],
        tensors: Callable[[], list[Tensor]],
    ) -> None:
        self._model, self._learn, self._tensors = model, learn, tensors
        self._seen: set[Any] = set()
        self._graphs: dict[Any, _Graph] = {}
        self._eager = False

    def __call__(self, *batch: Tensor) -> Tensor:
        """Learn from a batch, and return its loss."""
        if self._eager or not batch[0].is_cuda:
            return self._learn(*batch)
        key = (
            tuple((x.shape, x.dtype) for x in batch),
            tuple(module.training for module in self._model.modules()),
        )
        if key not in self._seen:  # a shape that comes only once is not worth a graph
            self._seen.add(key)
            return self._learn(*batch)
        if key not in self._graphs:
            try:
                self._graphs[key] = _Graph(self._learn, self._tensors(), batch)
            except Exception as error:
                self._eager = True
                reason = str(error).partition("\n")[0]
                warnings.warn(
                    f"this step cannot be captured ({reason}); it runs without a graph", stacklevel=3
                )
                return self._learn(*batch)
        return self._graphs[key](*batch)

    def forget(self) -> None:
        """Drop the graphs: the tensors that they change have moved."""
        self._graphs.clear()
        self._seen.clear()


@final
class Descent:
    """Steps of a fused optimiser on a loss; on a GPU each is a CUDA graph, without synchronisation.

    A non-finite loss changes nothing, and raises an error at once, or on a GPU in one of the next steps.

    Args:
        model: The model to train.
        optimizer: The optimiser of its parameters.
        loss: The loss of a batch.
        after: A further change of the parameters after each step, on the device and in place.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
        after: Callable[[], object] = int,
    ) -> None:
        self._model, self._optimizer, self._loss, self._after = model, optimizer, loss, after
        self._watch = Watch(next(model.parameters()).device)
        self._run = Captured(model, self._learn, self._tensors)
        rates_on_device(optimizer)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Learn from a batch, and return its loss."""
        self._watch.refuse()
        return self._run(x, y)

    def forget(self) -> None:
        """Drop the graphs: loaded state has other addresses."""
        self._run.forget()

    def _learn(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self._loss(x, y)
        bad = self._watch.see(loss)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        # Fused optimisers change neither weights nor state where this is 1.
        self._optimizer.found_inf = bad  # type: ignore[attr-defined]
        self._optimizer.step()
        self._after()
        return loss.detach()

    def _tensors(self) -> list[Tensor]:
        state = [value for own in self._optimizer.state.values() for value in own.values()]
        changed = [*self._model.parameters(), *self._model.buffers(), *state, self._watch.count]
        return [tensor for tensor in changed if isinstance(tensor, Tensor)]


@final
class _Graph:
    """A captured step for one shape of batch."""

    def __init__(
        self,
        learn: Callable[..., Tensor],
        tensors: list[Tensor],
        batch: tuple[Tensor, ...],
    ) -> None:
        self._batch = [x.clone() for x in batch]
        before = [(tensor, tensor.detach().clone()) for tensor in tensors]
        dropout = torch.cuda.default_generators[batch[0].device.index]  # restored after capturing
        state = dropout.get_state()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(2):
                    learn(*self._batch)
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._loss = learn(*self._batch)
        finally:
            torch.cuda.synchronize()
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            dropout.set_state(state)

    def __call__(self, *batch: Tensor) -> Tensor:
        for mine, given in zip(self._batch, batch, strict=True):
            mine.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._loss.clone()
