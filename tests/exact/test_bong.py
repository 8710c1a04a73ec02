"""BONG against a scalar transcription of its equations, and what its units promise."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from posterity import BONG, Factorised
from posterity.noise import normal
from posterity.optim.bong import bong_evidence, bong_mean


def scalar_step(
    m: float, v: float, by_example: list[list[float]], eta: float, tau: float
) -> tuple[float, float]:
    """The two lines of the paper's step, one weight, plain Python floats; gradients by sample and example."""
    k = len(by_example)
    squares = sum(sum(g * g for g in each) for each in by_example) / k
    total = sum(sum(each) for each in by_example) / k
    v = (v**-2 + squares / tau) ** -0.5
    return m - eta * v**2 * total / tau, v


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_a_run_equals_the_scalar_transcription(temperature: float) -> None:
    torch.manual_seed(3)
    model = nn.Linear(1, 1, bias=False).double()
    x, y = torch.randn(6, 1).double(), torch.randn(6, 1).double()
    scale, lr, after = 0.3, 0.7, 20.0
    opt = BONG(
        model,
        std_scale=scale,
        lr=lr,
        consolidate_after=after,
        temperature=temperature,
        mc_samples=4,
        max_step=float("inf"),
        seed=0,
    )
    m, v = model.weight.item(), scale
    tau = scale**2 * after * temperature  # one input, one output
    for step in range(5):
        eps = normal(range(4), (1, 1), seed=0, step=step, block="weight", dtype=torch.float64)
        by_example = [
            [float(xi) * (w * float(xi) - float(yi)) for xi, yi in zip(x, y, strict=True)]
            for w in (m + v * float(e) for e in eps)
        ]
        eta = lr * tau / (6 * scale**2)  # so that a step is lr · E[mean gradient] · σ² / σ₀²
        m, v = scalar_step(m, v, by_example, eta, tau)
        opt.step(lambda: 0.5 * (model(x) - y).square().mean(), batch_size=6)
        assert model.weight.item() == pytest.approx(m, rel=1e-12)
        assert opt.posterior().std()["weight"].item() == pytest.approx(v, rel=1e-12)


def test_pure_functions() -> None:
    evidence = bong_evidence(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.1]), torch.tensor([4.0, 10.0]))
    assert evidence.tolist() == [3.0, 3.0]
    assert bong_mean(torch.tensor(1.0), torch.tensor(4.0), torch.tensor(2.0), 0.5).item() == 0.75


def evidence_gained(width: int) -> list[float]:
    """By layer, in four batches at the start."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 10)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    opt = BONG(model, std_scale=1e-3, lr=0.0, seed=0)
    for _ in range(4):
        x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
        opt.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
    return [float(opt.state[layer.weight]["evidence"].mean()) - 1.0 for layer in layers]


def test_stds_fall_as_fast_in_wide_nets_as_in_narrow_ones() -> None:
    """The outputs of the last layer are as many, so evidence for its weights does not depend on the width."""
    narrow, wide = evidence_gained(50), evidence_gained(800)
    for few, many in zip(narrow, wide, strict=True):
        # By Bayes' rule alone, the hidden layers of the wide net would gain a 16th and a 256th of that.
        assert many == pytest.approx(few, rel=0.3)


def test_loaded_posterior_keeps_its_stds_and_their_evidence() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    opt = BONG(model, seed=0)
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    opt.step(lambda: F.cross_entropy(model(x), y))
    posterior = opt.posterior()
    assert isinstance(posterior, Factorised)
    new = BONG(other, seed=0)
    new.load_posterior(posterior)
    torch.testing.assert_close(new.posterior().std(), posterior.std())
    torch.testing.assert_close(new.state[other.weight]["evidence"], opt.state[model.weight]["evidence"])
