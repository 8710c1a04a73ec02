"""Pruning by signal-to-noise ratio, by log α, and by magnitude."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import posterity
from posterity import DiagonalGaussian, Factorised, IsotropicGaussian, elbo, prune, snr
from posterity.compress import magnitude, point_mass, sparsity


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


def named() -> Factorised:
    g = torch.Generator().manual_seed(1)
    shapes = {"0.weight": (8, 5), "0.bias": (8,), "2.weight": (3, 8), "2.bias": (3,)}
    scale = {"0.weight": 1.0, "0.bias": 1.0, "2.weight": 10.0, "2.bias": 30.0}
    return Factorised(
        {
            name: DiagonalGaussian(scale[name] * torch.randn(shape, generator=g), 0.3)
            for name, shape in shapes.items()
        }
    )


def test_a_threshold_removes_what_is_below_it() -> None:
    q = posterior()
    pruned = prune(q, threshold=1.5)
    for name, ratio in snr(q).items():
        assert torch.equal(pruned.block(name).keep, ratio >= 1.5)
        assert not pruned.std()[name][ratio < 1.5].any()
    assert sparsity(pruned)["a"] == pytest.approx(float((snr(q)["a"] < 1.5).float().mean()))
    assert sparsity(q) == {"a": 0.0, "b": 0.0}


def test_log_alpha_removes_what_is_at_it_or_above() -> None:
    alpha = torch.tensor([2.9, 3.1, -1.0, 8.0], dtype=torch.float64).exp()
    mean = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    q = Factorised(
        {
            "w": DiagonalGaussian(mean, mean.abs() * alpha.sqrt()),
            "sure": DiagonalGaussian(torch.tensor([1.0, 0.0]), 0.0),
        }
    )
    assert prune(q, log_alpha=3.0).kept()["w"].tolist() == [True, False, True, False]
    assert prune(q, log_alpha=3.0).kept()["sure"].tolist() == [True, False]  # a zero is of no use
    level = DiagonalGaussian(torch.tensor([0.25, 0.5]), 1.0)  # α = 16 and 4
    assert prune(q, log_alpha=-1e9).kept()["sure"].tolist() == [True, False]
    assert prune(Factorised({"w": level}), log_alpha=math.log(16.0)).kept()["w"].tolist() == [False, True]
    # A group's 1/α is the mean of its weights': 0.5 · (1/16 + 1/4) for these.
    rows = Factorised({"w": DiagonalGaussian(level.mean()[None].repeat(2, 1), 1.0)})
    for log_alpha, kept in ((math.log(32 / 5) + 1e-4, True), (math.log(32 / 5) - 1e-4, False)):
        assert bool(prune(rows, log_alpha=log_alpha, groups="outputs").kept()["w"].all()) is kept


def test_per_layer_each_layer_loses_its_share() -> None:
    q = named()
    everywhere, by_layer = prune(q, 0.5), prune(q, 0.5, scope="layer")
    assert sparsity(everywhere)["0.weight"] > sparsity(everywhere)["2.weight"]
    for layer, size in (("0", 48), ("2", 27)):
        names = [f"{layer}.weight", f"{layer}.bias"]
        kept = torch.cat([by_layer.block(name).keep.flatten() for name in names])
        ratios = torch.cat([snr(q)[name].flatten() for name in names])
        assert int((~kept).sum()) == round(0.5 * size)
        assert ratios[kept].min() >= ratios[~kept].max()  # one cut for weight and bias


def test_spared_tensors_stay_whole_and_are_not_counted() -> None:
    pruned = prune(named(), 0.5, spare="*.bias")
    assert sparsity(pruned)["0.bias"] == sparsity(pruned)["2.bias"] == 0.0
    assert sum(int((~leaf.keep).sum()) for leaf in pruned.blocks.values()) == 32  # half of 64 weights
    assert torch.equal(pruned.std()["2.bias"], named().std()["2.bias"])


def test_a_plain_net_is_pruned_by_magnitude() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    sizes = torch.cat([p.detach().abs().flatten() for p in net.parameters()])
    limit = sizes.sort().values[round(0.6 * len(sizes)) - 1]
    for pruned in (prune(point_mass(net), 0.6), prune(point_mass(net), 0.6, score=magnitude)):
        for name, p in net.named_parameters():
            assert torch.equal(pruned.block(name).keep, p.abs() > limit)
            assert torch.equal(pruned.sample(2)[name][1], p.detach() * (p.abs() > limit))
    by_value = prune(point_mass(net), threshold=0.2, score=magnitude)
    assert torch.equal(by_value.block("0.weight").keep, net[0].weight.abs() >= 0.2)


def test_magnitude_and_ratio_disagree_where_stds_differ() -> None:
    q = Factorised({"w": DiagonalGaussian(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 5.0]))})
    assert prune(q, 0.5).mean()["w"].tolist() == [1.0, 0.0]
    assert prune(q, 0.5, score=magnitude).mean()["w"].tolist() == [0.0, 2.0]


def test_what_is_gone_goes_first_even_among_zeros() -> None:
    mean = torch.tensor([0.0, 0.0, 0.0, 1.0])
    keep = torch.tensor([True, True, False, True])
    q = Factorised({"w": DiagonalGaussian(mean, 0.1, keep=keep)})
    assert torch.equal(prune(q, 0.25).block("w").keep, keep)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of these: a fraction of the weights, a threshold"),
        ({"fraction": 0.5, "threshold": 1.0}, "one of these: a fraction of the weights, a threshold"),
        ({"log_alpha": 3.0, "threshold": 1.0}, "one of these: a fraction of the weights, a threshold"),
        ({"log_alpha": float("nan")}, "log_alpha must be a number"),
        ({"log_alpha": 3.0, "score": magnitude}, "log_alpha is a limit of the SNR"),
        ({"threshold": float("nan")}, "threshold must be a number"),
        ({"fraction": 0.5, "scope": "row"}, "scope must be 'global' or 'layer', not 'row'"),
        ({"fraction": 0.5, "spare": "*"}, "spares every tensor"),
        ({"fraction": 0.5, "spare": "*.gamma"}, "no parameter is named like"),
        ({"fraction": 0.5, "score": lambda q: {"a": torch.ones(3)}}, r"each weight of 'a', \(10, 10\)"),
    ],
)
def test_bad_calls_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prune(posterior(), **options)


def test_weights_that_are_nan_are_refused() -> None:
    q = Factorised({"w": DiagonalGaussian(torch.tensor([1.0, float("nan")]), 0.1)})
    with pytest.raises(ValueError, match="score of a weight of 'w' is nan"):
        prune(q, 0.5)


def test_groups_go_whole_by_the_mean_square_of_their_ratios() -> None:
    mean = torch.tensor([[3.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.1, 0.2, 0.3], [2.0, 2.0, 0.0]])
    q = Factorised({"w": DiagonalGaussian(mean, 0.5), "b": DiagonalGaussian(torch.tensor([1e-3] * 4), 1.0)})
    found = prune(q, 0.5, groups="outputs")
    assert found.kept()["w"].tolist() == [[True] * 3, [False] * 3, [False] * 3, [True] * 3]
    assert bool(found.kept()["b"].all())
    by_column = prune(q, threshold=2.0, groups="inputs")  # the third has ratios 0, 2, .6, 0
    assert by_column.kept()["w"].tolist() == [[True, True, False]] * 4
    again = prune(found, 0.75, groups="outputs")
    assert again.kept()["w"].any(1).tolist() == [True, False, False, False]
    # No group is cut: of 12 weights, 7 are two whole rows and a part of the next.
    assert int(prune(q, 7 / 12, groups="outputs").kept()["w"].sum()) == 6
    with pytest.raises(ValueError, match="groups must be 'outputs' or 'inputs', not 'rows'"):
        prune(q, 0.5, groups="rows")  # type: ignore[arg-type]
