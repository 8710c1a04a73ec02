"""Training steps that benchmarks compare, from other packages and ours, as functions without arguments.

Every step does the same work on a batch on the device: cross-entropy, backward, update.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from posterity_lab.bench import Column
from posterity_lab.nets import build, initialise, recipe

LOOP, OURS, ADAM, ADAM_GRAPH = "loop over samples", "compile_step", "Adam", "Adam in a CUDA graph"
EAGER, BACKPACK = "eager step", "BackPACK's squares, Adam"
PRECISIONS, LAYOUTS = ("fp32", "tf32", "bf16"), ("nchw", "channels-last")


class Loss:
    """Mean cross-entropy, under bf16 autocast where asked for.

    Autocast is entered anew for every loss: weights that were cast for one step are never used in the next,
    captured or not.
    """

    def __init__(self, precision: str, device: str) -> None:
        self.autocast = precision == "bf16"
        self.device = device

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            return F.cross_entropy(model(x), y)


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Matrix products and convolutions in full fp32, or in tf32 (bf16 too, for what autocast leaves)."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def net(text: str) -> str:
    """An option's value: the name of a net."""
    try:
        recipe(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def setting(text: str) -> str:
    """An option's value: precision and layout."""
    precision, _, layout = text.partition(" ")
    if precision not in PRECISIONS or layout not in LAYOUTS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no precision ({', '.join(PRECISIONS)}) and layout ({', '.join(LAYOUTS)})"
        )
    return text


def for_device(
    options: argparse.ArgumentParser, device: str, asked: list[str] | None, usual: list[str]
) -> list[str]:
    """Settings to measure; where none are asked for, the usual ones of a GPU, with fp32 for tf32 on a CPU."""
    if device == "cuda":
        return asked or usual
    if any("tf32" in each for each in asked or []):
        options.error("a CPU has no tf32: choose fp32")
    return asked or [usual[0].replace("tf32", "fp32")]


def batch(shape: list[int], device: str, layout: str = "nchw") -> tuple[Tensor, Tensor]:
    """Uniform inputs of this shape and labels of ten classes, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(shape, generator=generator).to(device)
    y = torch.randint(0, 10, (shape[0],), generator=generator).to(device)
    return x.to(memory_format=torch.channels_last) if layout == "channels-last" else x, y


def maker(name: str, shape: list[int], device: str, layout: str = "nchw") -> Callable[[], nn.Module]:
    """A function that makes the net of that name, always with the same weights."""
    form = torch.channels_last if layout == "channels-last" else torch.contiguous_format
    return lambda: initialise(build(name, shape, 10), seed=0).to(device, memory_format=form)


def count(model: nn.Module) -> int:
    """Parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def bgd_loop(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, samples: int) -> Callable[[], None]:
    """Algorithm 1 of the BGD paper as its authors run it: one sample after another, sums per tensor.

    Every parameter has a posterior, BatchNorm's too; its running statistics move with every sample.
    """
    params = list(model.parameters())
    stds = [torch.full_like(p, 0.02) for p in params]

    def step() -> None:
        means = [p.detach().clone() for p in params]
        grads, products = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
        for _ in range(samples):
            noise = [torch.randn_like(p) for p in params]
            with torch.no_grad():
                for p, mean, std, eps in zip(params, means, stds, noise, strict=True):
                    p.copy_(mean + std * eps)
            for p in params:
                p.grad = None
            loss_fn(model, x, y).backward()
            for p, grad, product, eps in zip(params, grads, products, noise, strict=True):
                grad += len(x) * p.grad / samples
                product += len(x) * p.grad * eps / samples
        with torch.no_grad():
            for p, mean, std, grad, product in zip(params, means, stds, grads, products, strict=True):
                p.copy_(mean - 1e-6 * std**2 * grad)
                std.copy_(std * torch.sqrt(1 + (0.5 * std * product) ** 2) - 0.5 * std**2 * product)

    return step


def bgd_ours(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, samples: int) -> Callable[[], Tensor]:
    """``posterity.compile_step`` with BGD; BatchNorm's weights have no posterior, Adam trains them."""
    plain = posterity.names_of(model, nn.BatchNorm2d)
    # All examples together count as one, at a small learning rate: thousands of steps on one batch then leave
    # means and stds about where they are, and every step does the same work.
    opt = posterity.BGD(model, lr=1e-6, temperature=len(x), mc_samples=samples, deterministic=plain)
    train_step = posterity.compile_step(model, loss_fn, opt)
    return lambda: train_step(x, y)


def vogn_eager(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, samples: int = 1) -> Callable[[], None]:
    """VOGN in a plain loop, one weight sample after another."""
    opt = _vogn(model, samples)

    def step() -> None:
        opt.zero_grad()
        for _ in range(samples):
            with opt.sampled_params():
                loss_fn(model, x, y).backward()
        opt.step()

    return step


def vogn_ours(
    model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, samples: int = 1
) -> Callable[[], Tensor]:
    """``posterity.compile_step`` with VOGN."""
    train_step = posterity.compile_step(model, loss_fn, _vogn(model, samples))
    return lambda: train_step(x, y)


def _vogn(model: nn.Module, samples: int) -> Any:
    # At a small learning rate, and with a std of at most 0.005: thousands of steps on one batch then leave
    # the net about where it is, and every step does the same work.
    plain = posterity.names_of(model, nn.BatchNorm2d)
    return posterity.VOGN(
        model, num_data=50_000, lr=1e-6, damping=1.0, mc_samples=samples, deterministic=plain
    )


def backpack_adam(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Adam, and the sums of single examples' squared gradients by BackPACK, which knows no BatchNorm."""
    from backpack import backpack, extend
    from backpack.extensions import SumGradSquared

    # A remark of torch's on the hooks that it sets.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    model = extend(model)
    adam = torch.optim.Adam(model.parameters(), fused=True)

    def step() -> None:
        adam.zero_grad()
        with backpack(SumGradSquared()):
            loss_fn(model, x, y).backward()
        adam.step()

    return step


def adam_eager(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One step of torch's fused Adam."""
    adam = torch.optim.Adam(model.parameters(), fused=True)

    def step() -> None:
        adam.zero_grad()
        loss_fn(model, x, y).backward()
        adam.step()

    return step


def adam_graph(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The same under a CUDA graph; like ours, it first copies the batch to where the graph reads it."""
    adam = torch.optim.Adam(model.parameters(), fused=True, capturable=True)
    mine = [x.clone(), y.clone()]

    def body() -> None:
        adam.zero_grad()  # to None: the graph's backward then writes gradients and does not add to them
        loss_fn(model, *mine).backward()
        adam.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()

    def step(held: tuple[Any, ...] = (model, adam)) -> None:
        # A graph does not keep the memory that it works on: weights and state must be held.
        mine[0].copy_(x, non_blocking=True)
        mine[1].copy_(y, non_blocking=True)
        graph.replay()

    return step


def bgd_columns(
    make: Callable[[], nn.Module], loss_fn: Loss, data: tuple[Tensor, Tensor], samples: int, setting: str
) -> dict[str, Column]:
    """One BGD step: the loop and ours, and beside them Adam, which has one sample and no posterior."""
    return {
        LOOP: Column(bgd_loop(make(), loss_fn, *data, samples), setting),
        OURS: Column(bgd_ours(make(), loss_fn, *data, samples), setting),
        **adam_columns(make, loss_fn, data, setting),
    }


def adam_columns(
    make: Callable[[], nn.Module], loss_fn: Loss, data: tuple[Tensor, Tensor], setting: str
) -> dict[str, Column]:
    """Adam, eager and, on a GPU, as a graph."""
    columns = {ADAM: Column(adam_eager(make(), loss_fn, *data), setting)}
    if data[0].is_cuda:
        columns[ADAM_GRAPH] = Column(adam_graph(make(), loss_fn, *data), setting)
    return columns


def fresh_row(device: str) -> None:
    """Before a row: give the last one's memory back.

    Compilations are forgotten as well: torch makes only so many of one function, then runs it uncompiled.
    """
    gc.collect()
    if device == "cuda":
        torch.compiler.reset()
        torch.cuda.empty_cache()


def timing(options: argparse.Namespace) -> dict[str, Any]:
    """What ``posterity_lab.bench.measure`` takes from the command line."""
    keys = ("device", "rounds", "round_seconds", "row_seconds")
    return {key: getattr(options, key) for key in keys}


def kfac_eager(
    rule: type[posterity.KFAC] | type[posterity.NoisyKFAC],
    every: int,
    model: nn.Module,
    loss_fn: Loss,
    x: Tensor,
    y: Tensor,
) -> Callable[[], None]:
    """K-FAC or Noisy K-FAC in a plain loop, with factors and inverses every so many steps."""
    opt = _kfac(rule, every, model)

    def step() -> None:
        opt.zero_grad()
        with opt.sampled_params():
            loss_fn(model, x, y).backward()
        opt.step()

    return step


def kfac_ours(
    rule: type[posterity.KFAC] | type[posterity.NoisyKFAC],
    every: int,
    model: nn.Module,
    loss_fn: Loss,
    x: Tensor,
    y: Tensor,
) -> Callable[[], Tensor]:
    """``posterity.compile_step`` with K-FAC or Noisy K-FAC."""
    train_step = posterity.compile_step(model, loss_fn, _kfac(rule, every, model))
    return lambda: train_step(x, y)


def _kfac(rule: type[posterity.KFAC] | type[posterity.NoisyKFAC], every: int, model: nn.Module) -> Any:
    # As for VOGN, the net stays about where it is.
    plain = posterity.names_of(model, nn.BatchNorm2d)
    return rule(model, num_data=50_000, lr=1e-6, damping=1.0, factors_every=every, deterministic=plain)
