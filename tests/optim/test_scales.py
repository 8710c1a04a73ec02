"""The first step warns of inputs and targets that are far from standardised, and of no others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity
from conformance import stand_in
from conformance.rules import Rule, captured_rules, layer_rules, rules, tensor_rules
from posterity import ScaleWarning, VariationalOptimizer
from posterity.train.compiled import CapturedStep

GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(16, 5, generator=GENERATOR)
LABELS = torch.randint(0, 3, (16,), generator=GENERATOR)
TARGETS = torch.randn(16, 1, generator=GENERATOR)


def net(*first: nn.Module, inputs: int = 5, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*first, nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


def by_closure(model: nn.Module, opt: VariationalOptimizer, loss_fn: Any, *batch: Tensor) -> None:
    for _ in range(3):
        opt.step(lambda: loss_fn(model, *batch))


def by_context(model: nn.Module, opt: VariationalOptimizer, loss_fn: Any, *batch: Tensor) -> None:
    for _ in range(3):
        for _ in range(opt.param_groups[0]["mc_samples"]):
            with opt.sampled_params():
                loss_fn(model, *batch).backward()
        opt.step()


def by_stack(model: nn.Module, opt: Any, loss_fn: Any, *batch: Tensor, **more: Any) -> None:
    step = posterity.compile_step(model, loss_fn, opt, **more)
    for _ in range(3):
        step(*batch)


def by_gradient(model: nn.Module, loss_fn: Any, *batch: Tensor, **settings: Any) -> None:
    bayesian = posterity.variational(model, seed=0, **settings)
    adam = torch.optim.Adam(bayesian.parameters())
    by_stack(bayesian, adam, loss_fn, *batch, num_data=16, mc_samples=3)


def labels_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def squared_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * F.mse_loss(model(x), y)


def said(run: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    found = [each for each in caught if each.category is ScaleWarning]
    assert all(each.filename == __file__ for each in found)  # where the step is called
    return [str(each.message) for each in found]


ways = pytest.mark.parametrize("way", [by_closure, by_context, by_stack])


@rules
@ways
def test_raw_pixels_are_warned_of_once(rule: Rule, way: Any) -> None:
    model = net()
    (message,) = said(lambda: way(model, rule.make(model), labels_loss, 255 * X, LABELS))
    rms = (255 * X).square().mean().sqrt()
    assert f"first layer have a root mean square of {float(rms):.3g}," in message
    assert "standardise inputs" in message


@rules
@ways
def test_targets_far_from_zero_or_wide_are_warned_of_once(rule: Rule, way: Any) -> None:
    for y in (200 * TARGETS, 500 + TARGETS):
        model = net(outputs=1)
        (message,) = said(lambda: way(model, rule.make(model), squared_loss, X, y))  # noqa: B023
        assert "standardise targets" in message
        error = float(message.split("root mean square error of ")[1].split(",")[0])
        assert error == pytest.approx(float(y.square().mean().sqrt()), rel=0.1)


@rules
@ways
def test_standardised_data_is_not_warned_of(rule: Rule, way: Any) -> None:
    for x in (X, 7 * torch.randn(16, 5, generator=torch.Generator().manual_seed(1))):
        model = net()
        assert not said(lambda: way(model, rule.make(model), labels_loss, x, LABELS))  # noqa: B023
    model = net(outputs=1)
    assert not said(lambda: way(model, rule.make(model), squared_loss, X, 3 * TARGETS))


@pytest.mark.parametrize("estimator", ["weight", "local", "flipout"])
def test_gradient_methods_warn_of_both(estimator: Any) -> None:
    run = lambda x, y: by_gradient(net(outputs=1), squared_loss, x, y, estimator=estimator)  # noqa: E731
    messages = said(lambda: run(255 * X, 200 * TARGETS))
    assert [message.partition(" have")[0].partition(" begins")[0] for message in messages] == [
        "the inputs of the first layer",
        "mse_loss",
    ]
    assert not said(lambda: run(X, TARGETS))


class Image(nn.Module):
    """As images of one row."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, None, None]


@layer_rules
@pytest.mark.parametrize("norm", ["before", "after", "after, without weights", "after a convolution", "none"])
def test_norm_after_the_first_layer_silences_the_scale_warning(rule: Rule, norm: str) -> None:
    layers: dict[str, list[nn.Module]] = {
        "before": [nn.BatchNorm1d(5)],
        "after": [nn.Linear(5, 5), nn.LayerNorm(5)],
        "after, without weights": [nn.Linear(5, 5), nn.LayerNorm(5, elementwise_affine=False)],
        "after a convolution": [Image(), nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten()],
        "none": [Image(), nn.Conv2d(1, 2, 1), nn.Flatten()],
    }
    model = net(*layers[norm], inputs=10 if "Conv2d" in str(layers[norm]) else 5)
    found = said(lambda: by_closure(model, rule.make(model), labels_loss, 255 * X, LABELS))
    assert len(found) == (norm == "none")


@rules
def test_what_embeddings_give_is_not_taken_for_inputs(rule: Rule) -> None:
    model = net(nn.Embedding(4, 5))
    with torch.no_grad():
        model[0].weight.mul_(100)
    ids = torch.arange(16) % 4
    assert not said(lambda: by_closure(model, rule.make(model), labels_loss, ids, LABELS))


@rules
def test_layers_that_are_not_trained_are_passed_over(rule: Rule) -> None:
    model, teacher = net(), net().requires_grad_(False)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return 0 * teacher(x).sum() + F.cross_entropy(model(x / 255), y)

    assert not said(lambda: by_closure(model, rule.make(model), loss_fn, 255 * X, LABELS))


class ByRows(nn.Module):
    """Gives its layers one example after another."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.transform = net(outputs=1), transform

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.transform(self.net))(x)


@tensor_rules
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "transform", [lambda f: f, lambda f: lambda row: torch.func.grad(lambda x: f(x).sum())(row)[:1]]
)
def test_transforms_of_a_users_own_are_seen_through(rule: Rule, transform: Any, parts: int) -> None:
    model = ByRows(transform)
    step = posterity.compile_step(model, squared_loss, rule.make(model), parts=parts)
    inputs, targets = said(lambda: step(255 * X, 200 * TARGETS))
    assert f"root mean square of {float((255 * X).square().mean().sqrt()):.3g}," in inputs
    assert "standardise targets" in targets


@captured_rules
def test_a_captured_step_neither_looks_nor_waits(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)  # which refuses to wait inside a capture
    model = net()
    step = CapturedStep(posterity.compile_step(model, labels_loss, rule.make(model)))  # type: ignore[arg-type]

    def run() -> None:
        for _ in range(9):
            step(255 * X, LABELS)

    assert len(said(run)) == 1
