"""A stand-in for CUDA graphs, for machines without a GPU: what was captured is run again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import posterity
from conformance.rules import loss_fn
from posterity.train import compiled, cuda_graph
from posterity.train.replays import RuleReplays
from posterity.train.step import TrainStep


class _Capture(TorchDispatchMode):
    """Refuses to wait for a number that would be on the device; the host has its counts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            assert args[0].dtype in (torch.int32, torch.int64), "a capture cannot wait"
        return func(*args, **(kwargs or {}))


class Graph(cuda_graph.Graph):  # type: ignore[misc]
    """Replays by running the captured body again, into the memory that the first run has left.

    Attributes:
        replays: Numbers of the steps that were replayed.
    """

    def __init__(self, step: TrainStep, batch: Any, count: float | None) -> None:
        super().__init__(step, batch, count)
        self.pieces = [(_Piece(self, i), sent) for i, (_, sent) in enumerate(self.pieces)]
        self.replays: list[int] = []
        self.ran: list[int] = []
        if isinstance(self.live, RuleReplays):
            self.captured_at = self.live.opt.param_groups[0]["steps"]

    def replay(self, piece: int) -> None:
        """The first piece of the body, or the next, which finds in captured memory what was added up."""
        live, loss = self.live, self.loss
        with self._by_rule(live, piece) if isinstance(live, RuleReplays) else self._by_gradient(piece):
            if piece == 0:
                self.body = self._body()
                self.ran.append(len(self.ran))
            else:
                _fill(self.sent, self.pieces[piece - 1][1])
            self.sent = next(self.body, None) or ()
            _fill(self.pieces[piece][1], self.sent)
        if self.loss is not loss:
            loss.data.copy_(self.loss)
            self.loss = loss

    @contextlib.contextmanager
    def _by_gradient(self, piece: int) -> Iterator[None]:
        learner = self.learner
        params = learner.optimizer.parameters()
        held = [p.grad for p in params]
        if piece == 0:  # what a step that was given up has left
            learner.reset()
        with self.live.inside():
            yield
        for p, grad in zip(params, held, strict=True):
            p.grad = grad

    @contextlib.contextmanager
    def _by_rule(self, live: RuleReplays, piece: int) -> Iterator[None]:
        opt = live.opt
        held = {p: grad for p, grad, _ in live.grads}
        counts = [step.clone() for flat in opt.cache.groups() for step in flat.steps]
        shown = {p: p.grad for p in opt.parameters()}
        entries = [{key: group[key] for key in (*opt.scheduled, "steps")} for group in opt.param_groups]
        eager, opt.numbers = opt.numbers, live.numbers
        if piece == 0:
            self.replays.append(opt.param_groups[0]["steps"])
        try:
            for group in opt.param_groups:
                group.update(dict.fromkeys(opt.scheduled, torch.nan))  # a device cannot read them
                group["steps"] = self.captured_at
            with self.learner.pooling():
                if piece:
                    opt.local = self.local
                else:  # what a step that was given up has left
                    opt.local.clear()
                yield
                self.local = opt.local
            if piece == len(self.pieces) - 1:
                for p, grad in held.items():
                    assert p.grad is not None
                    grad.data.copy_(p.grad)  # past the version counter, as a device would
        finally:
            opt.numbers = eager
            for group, values in zip(opt.param_groups, entries, strict=True):
                group.update(values)
            steps = [step for flat in opt.cache.groups() for step in flat.steps]
            for step, before in zip(steps, counts, strict=True):
                step.copy_(before)
            for p, grad in shown.items():
                p.grad = grad
            opt.ledger.remember(opt.parameters())


def _fill(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for there, value in zip(into, values, strict=True):
        there.copy_(value)


class _Piece:
    """A piece of a graph."""

    def __init__(self, graph: Graph | None = None, number: int = 0) -> None:
        self.graph, self.number = graph, number

    def replay(self) -> None:
        """Run it."""
        assert self.graph is not None
        self.graph.replay(self.number)

    def pool(self) -> None:
        """Its memory is everybody's."""


class _Event:
    def record(self) -> None:
        """What a host has queued is done."""

    synchronize = record


class _Stream:
    def wait_stream(self, other: Any) -> None:
        """There is one stream only."""


def install(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Let steps be captured without a device; the graphs that are made from here on."""
    monkeypatch.setattr(torch.cuda, "stream", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: _Capture())
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, _Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Piece)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    made: list[Graph] = []

    def make(step: TrainStep, batch: Any, count: float | None) -> Graph:
        made.append(Graph(step, batch, count))
        return made[-1]

    monkeypatch.setattr(compiled, "Graph", make)
    return made


def captured(model: nn.Module, opt: posterity.VariationalOptimizer, **more: Any) -> compiled.CapturedStep:
    """``compile_step`` as it would be on a GPU."""
    step = posterity.compile_step(model, loss_fn, opt, **more)
    assert isinstance(step, TrainStep)  # there is no GPU here
    return compiled.CapturedStep(step)


def near(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Fail unless both are the same, up to rounding."""
    assert a.keys() == b.keys()
    for key, value in a.items():
        torch.testing.assert_close(b[key], value, rtol=1e-4, atol=1e-5, msg=key)
