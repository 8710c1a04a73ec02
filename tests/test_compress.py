"""Pruning by signal-to-noise ratio."""

from pathlib import Path

import pytest
import torch
from torch import nn

import posterity
from posterity import DiagonalGaussian, Factorised, IsotropicGaussian, elbo, prune, snr


def posterior() -> Factorised:
    g = torch.Generator().manual_seed(0)
    return Factorised(
        {
            "a": DiagonalGaussian(torch.randn(10, 10, generator=g), torch.rand(10, 10, generator=g) + 0.1),
            "b": DiagonalGaussian(torch.randn(50, generator=g) * 3, 0.5),
        }
    )


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.95, 1.0])
def test_exactly_the_weakest_go(fraction: float) -> None:
    q = posterior()
    ratios = torch.cat([value.flatten() for value in snr(q).values()])
    pruned = prune(q, fraction)
    kept = torch.cat([leaf.keep.flatten() for leaf in pruned.blocks.values()])
    assert int((~kept).sum()) == round(fraction * 150)
    if 0 < fraction < 1:
        assert ratios[kept].min() >= ratios[~kept].max()
    assert torch.equal(pruned.mean()["a"], q.mean()["a"] * pruned.block("a").keep)
    assert q.block("a").keep is None  # the original is left as it is


def test_equal_ratios_still_give_the_exact_number() -> None:
    q = Factorised({"w": DiagonalGaussian(torch.ones(100), 0.5)})
    assert int((~prune(q, 0.37).block("w").keep).sum()) == 37


def test_pruning_again_counts_what_is_gone() -> None:
    twice = prune(prune(posterior(), 0.4), 0.6)
    once = prune(posterior(), 0.6)
    for name in ("a", "b"):
        assert torch.equal(twice.block(name).keep, once.block(name).keep)


def test_certain_weights_come_last_and_certain_zeros_first() -> None:
    q = Factorised({"w": DiagonalGaussian(torch.tensor([1e-6, 5.0, 0.0]), torch.tensor([0.0, 0.1, 0.0]))})
    assert snr(q)["w"].tolist() == [float("inf"), pytest.approx(50.0), 0.0]
    assert prune(q, 2 / 3).mean()["w"].tolist() == [pytest.approx(1e-6), 0.0, 0.0]


def test_zeros_survive_saving_and_training_by_gradient(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    model = posterity.variational(net, std_init=0.1)
    pruned = prune(model.posterior, 0.5)
    pruned.save(tmp_path / "q.safetensors")
    q = Factorised.load(tmp_path / "q.safetensors", net)
    keep = q.block("weight").keep
    assert keep is not None
    assert not keep.all()
    model = posterity.Variational(net, q)
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    x, y = torch.randn(20, 6), torch.randint(0, 3, (20,))
    for _ in range(5):
        opt.zero_grad()
        nll = nn.functional.cross_entropy(model(x), y)
        elbo(nll, model.kl(IsotropicGaussian()), num_data=20).backward()
        opt.step()
    assert not q.mean()["weight"][~keep].any()
    assert not q.std()["weight"][~keep].any()
    assert not q.sample(3)["weight"][:, ~keep].any()
    assert not torch.equal(q.mean()["weight"][keep], pruned.mean()["weight"][keep])


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction must lie between 0 and 1"):
        prune(posterior(), fraction)
