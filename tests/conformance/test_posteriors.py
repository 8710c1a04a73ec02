"""What every posterior must do. A new family is one more row of ``FAMILIES``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import posterity
from posterity import (
    Density,
    DiagonalGaussian,
    EigenGaussian,
    Factorised,
    GroupHorseshoe,
    GroupNormalJeffreys,
    IsotropicGaussian,
    KernelGaussian,
    Leaf,
    MatrixGaussian,
    ScaledGaussian,
    ghs,
    gnj,
    kl,
    mnf,
)

STANDARD = IsotropicGaussian(1.0)
SHAPES = {"fc.weight": (3, 4), "fc.bias": (3,), "scale": (), "conv.weight": (2, 1, 2, 2)}


Moments = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Family:
    name: str
    blocks: Callable[[Moments], dict[str | tuple[str, ...], Leaf]]  # from means and stds by tensor
    trainable: bool = False
    density: bool = True
    prior: Density = STANDARD

    def __repr__(self) -> str:
        return self.name


def each(leaf: Callable[[Tensor, Tensor], Leaf]) -> Callable[[Moments], dict[str | tuple[str, ...], Leaf]]:
    return lambda moments: {name: leaf(mean, std) for name, (mean, std) in moments.items()}


def layer_together(moments: Moments, keep: Tensor | None = None) -> dict[str | tuple[str, ...], Leaf]:
    """A layer's weight and bias as one matrix block, with as much correlation as its stds are wide."""
    (weight, spread), (bias, _), *rest = moments.values()
    height, width = spread.shape
    rows = torch.eye(height).to(spread) + torch.tril(spread[:, :height], -1)
    columns = 0.3 * torch.eye(width + 1).to(spread)
    columns[1:, :width] += torch.tril(spread[:1].expand(width, -1))
    leaf = MatrixGaussian((weight, bias), rows, columns, keep=keep)
    return {("fc.weight", "fc.bias"): leaf, **beside(rest)}


def beside(rest: list[tuple[Tensor, Tensor]]) -> dict[str | tuple[str, ...], Leaf]:
    """The tensors after the first two, each by itself."""
    return {name: DiagonalGaussian(*both) for name, both in zip(("scale", "conv.weight"), rest, strict=True)}


def layer_in_its_basis(moments: Moments, keep: Tensor | None = None) -> dict[str | tuple[str, ...], Leaf]:
    """The same block, with the stds along the eigenvectors of some matrices."""
    (weight, spread), (bias, wide), *rest = moments.values()
    rows, columns = (
        torch.linalg.eigh(each.double()).eigenvectors.to(spread)
        for each in (spread @ spread.T, torch.cat([spread, wide[:, None]], 1).T.cov(correction=0))
    )
    stds = torch.cat([spread, wide[:, None]], 1)
    leaf = EigenGaussian((weight, bias), rows, columns, stds, keep=keep)
    return {("fc.weight", "fc.bias"): leaf, **beside(rest)}


def kernels(mean: Tensor, std: Tensor) -> Leaf:
    """Kernels with covariances of both signs."""
    if mean.dim() < 3:
        return DiagonalGaussian(mean, std, trainable=True)
    columns = std.flatten(2)
    below = (columns[..., :, None] - columns[..., None, :]).tril(-1)
    return KernelGaussian(mean, below + torch.diag_embed(columns))


def flows(mean: Tensor, std: Tensor) -> Leaf:
    """Scales of a flow that is far from its start."""
    if mean.dim() < 2:
        return DiagonalGaussian(mean, std, trainable=True)
    torch.manual_seed(0)
    leaf = mnf(mean, 1.0, conv="kernel", hidden=4, z_std=0.2)
    assert isinstance(leaf, ScaledGaussian)
    with torch.no_grad():
        leaf.raw.copy_(torch.log(torch.expm1(std)))
        for p in leaf.scales.parameters():
            if p.dim() == 2:  # weights of its layers
                p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
    return leaf


def grouped(family: Callable[..., Leaf]) -> Callable[[Tensor, Tensor], Leaf]:
    """Scales that are far from their start."""

    def made(mean: Tensor, std: Tensor) -> Leaf:
        if mean.dim() < 2:
            return DiagonalGaussian(mean, std, trainable=True)
        leaf = family(mean, std, z_std=0.1)
        assert isinstance(leaf, ScaledGaussian)
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in leaf.scales.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype))
        return leaf

    return made


def thinned(leaf: Leaf) -> Leaf:
    keep = torch.arange(leaf.loc.numel()).reshape(leaf.shape) % 3 != 1
    return leaf.pruned(keep)


def without_a_group(leaf: Leaf) -> Leaf:
    keep = torch.arange(leaf.group_shape.numel()).reshape(leaf.group_shape) % 3 != 1
    return leaf.pruned(keep.expand(leaf.shape))


FAMILIES = [
    Family("diagonal", each(DiagonalGaussian)),
    Family(
        "diagonal-trainable",
        each(lambda mean, std: DiagonalGaussian(mean, std, trainable=True)),
        trainable=True,
    ),
    Family(
        "diagonal-pruned",
        each(
            lambda mean, std: DiagonalGaussian(mean, std, keep=mean > mean.median() if mean.dim() else None)
        ),
    ),
    Family("matrix", layer_together),
    Family(
        "matrix-pruned", lambda moments: layer_together(moments, (torch.arange(15) % 4 != 1).reshape(3, 5))
    ),
    Family("eigen", layer_in_its_basis),
    Family(
        "eigen-pruned", lambda moments: layer_in_its_basis(moments, (torch.arange(15) % 4 != 1).reshape(3, 5))
    ),
    Family("kernel", each(kernels), trainable=True),
    Family("kernel-pruned", each(lambda mean, std: thinned(kernels(mean, std))), trainable=True),
    Family("flow", each(flows), trainable=True, density=False),
    Family("flow-pruned", each(lambda mean, std: thinned(flows(mean, std))), trainable=True, density=False),
    Family("gnj", each(grouped(gnj)), trainable=True, density=False, prior=GroupNormalJeffreys()),
    Family("ghs", each(grouped(ghs)), trainable=True, density=False, prior=GroupHorseshoe()),
    Family(
        "ghs-pruned",
        each(lambda mean, std: without_a_group(grouped(ghs)(mean, std))),
        trainable=True,
        density=False,
        prior=GroupHorseshoe(),
    ),
]
families = pytest.mark.parametrize("family", FAMILIES, ids=repr)
with_density = pytest.mark.parametrize("family", [each for each in FAMILIES if each.density], ids=repr)


def build(family: Family, seed: int = 0, dtype: torch.dtype = torch.float64) -> Factorised:
    g = torch.Generator().manual_seed(seed)
    moments = {
        name: (
            torch.randn(shape, generator=g, dtype=dtype),
            torch.rand(shape, generator=g, dtype=dtype) + 0.1,
        )
        for name, shape in SHAPES.items()
    }
    return Factorised(family.blocks(moments))


def written_out(leaf: Leaf) -> torch.distributions.MultivariateNormal:
    """The kept weights of a block with their whole covariance: the definition, and far too slow."""
    if isinstance(leaf, MatrixGaussian):
        covariance = torch.kron(leaf.rows @ leaf.rows.T, leaf.columns @ leaf.columns.T)  # vec by rows
    elif isinstance(leaf, EigenGaussian):
        basis = torch.kron(leaf.rows, leaf.columns)  # vec by rows
        covariance = basis * leaf.scale.flatten().square() @ basis.T
    elif isinstance(leaf, KernelGaussian):
        covariance = torch.block_diag(*(leaf.lower() @ leaf.lower().mT).flatten(0, 1))
    else:
        covariance = leaf.std().square().flatten().diag()
    keep = leaf.kept.flatten()
    return torch.distributions.MultivariateNormal(leaf.mean().flatten()[keep], covariance[keep][:, keep])


@families
def test_samples_have_a_leading_dimension_and_the_right_dtype(family: Family) -> None:
    for name, value in build(family).sample(7, seed=1).items():
        assert value.shape == (7, *SHAPES[name])
        assert value.dtype == torch.float64


@families
def test_samples_have_the_stated_moments(family: Family) -> None:
    q = build(family)
    n = 20_000
    draws = q.sample(n, seed=3)
    for name, value in draws.items():
        mean, std = q.mean()[name], q.std()[name]
        # Standard errors: s/√n of a mean, s/√(2n) of a standard deviation; five of them for ~60 comparisons.
        assert ((value.mean(0) - mean).abs() <= 5 * std / n**0.5).all()
        assert ((value.std(0) - std).abs() <= 5 * std / (2 * n) ** 0.5).all()


@families
def test_sampling_is_a_pure_function_of_its_seed(family: Family) -> None:
    q = build(family)
    a, b, c = q.sample(2, seed=5), q.sample(2, seed=5), q.sample(2, seed=5, step=1)
    assert torch.equal(a["fc.weight"], b["fc.weight"])
    assert not torch.equal(a["fc.weight"], c["fc.weight"])
    fresh = q.sample(2)
    assert not torch.equal(fresh["fc.weight"], q.sample(2)["fc.weight"])
    assert not torch.equal(fresh["fc.weight"], build(family).sample(2)["fc.weight"])  # nor from a twin


@with_density
def test_autocast_is_for_layers_and_not_for_posteriors(family: Family) -> None:
    q = build(family).float()
    drawn, std, density = q.sample(3, seed=1), q.std(), q.log_prob(q.sample(3, seed=2))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(q.sample(3, seed=1), drawn, rtol=0.0, atol=0.0)
        torch.testing.assert_close(q.std(), std, rtol=0.0, atol=0.0)
        torch.testing.assert_close(q.log_prob(q.sample(3, seed=2)), density, rtol=0.0, atol=0.0)


@families
def test_kl_to_itself_is_zero_and_to_others_positive(family: Family) -> None:
    q = build(family)
    assert abs(kl(q, q.frozen()).item()) < 1e-12
    assert kl(q, family.prior).item() > 0


@with_density
def test_closed_form_kl_agrees_with_monte_carlo(family: Family) -> None:
    q = build(family)
    n = 40_000
    weights = q.sample(n, seed=2)
    for p in (build(FAMILIES[0], seed=1), IsotropicGaussian(0.7, mean=0.2)):
        log_p = torch.zeros(n, dtype=torch.float64)
        for name, keep in q.kept().items():
            mean, std = (0.2, 0.7) if isinstance(p, IsotropicGaussian) else (p.mean()[name], p.std()[name])
            each_weight = torch.distributions.Normal(mean, std).log_prob(weights[name])
            log_p += each_weight[:, keep].sum(-1)
        terms = q.log_prob(weights) - log_p
        assert abs(terms.mean() - kl(q, p)) < 5 * terms.std() / n**0.5


@with_density
def test_log_prob_agrees_with_torch_distributions(family: Family) -> None:
    q = build(family)
    weights = q.sample(4, seed=1)
    expected = torch.zeros(4, dtype=torch.float64)
    for block, value in q.join(weights).items():
        leaf = q.block(block)
        expected += written_out(leaf).log_prob(value.reshape(4, -1)[:, leaf.kept.flatten()])
    torch.testing.assert_close(q.log_prob(weights), expected)
    with pytest.raises(KeyError, match=r"'fc.bias' is missing"):
        q.log_prob({"fc.weight": weights["fc.weight"]})


@with_density
def test_closed_form_kl_agrees_with_the_covariances_written_out(family: Family) -> None:
    q, p = build(family), build(family, seed=1)
    both = {name: leaf.kept & p.block(name).kept for name, leaf in q.blocks.items()}
    q, p = (each.rebuilt({name: each.block(name).pruned(both[name]) for name in both}) for each in (q, p))
    expected = sum(
        torch.distributions.kl_divergence(written_out(leaf), written_out(p.block(name)))
        for name, leaf in q.blocks.items()
        if both[name].any()
    )
    torch.testing.assert_close(kl(q, p), expected)


@families
def test_gradients_flow_exactly_where_they_are_wanted(family: Family) -> None:
    q = build(family)
    value = sum(w.square().sum() for w in q.sample(3, seed=0).values()) + kl(q, family.prior)
    assert isinstance(value, Tensor)
    assert value.requires_grad == family.trainable
    if family.trainable:
        value.backward()
        grads = [p.grad for p in q.parameters()]
        assert len(grads) >= 2 * len(SHAPES)
        assert all(g is not None and bool(g.any()) and bool(torch.isfinite(g).all()) for g in grads)


@families
def test_saved_and_loaded_bit_for_bit(family: Family, tmp_path: Path) -> None:
    q = build(family)
    q.save(tmp_path / "q.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["q.safetensors"]
    for _ in range(5):
        q.save(tmp_path / "other")
        assert (tmp_path / "other").read_bytes() == (tmp_path / "q.safetensors").read_bytes()
    (tmp_path / "other").unlink()
    (tmp_path / "other").touch()
    assert (tmp_path / "q.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    loaded = Factorised.load(tmp_path / "q.safetensors")
    assert list(loaded.blocks) == list(q.blocks)
    for ours, theirs in zip(q.blocks.values(), loaded.blocks.values(), strict=True):
        assert type(theirs) is type(ours)
        assert theirs.config() == ours.config()
        assert torch.equal(theirs.mean(), ours.mean())
        assert torch.equal(theirs.std(), ours.std())
    assert torch.equal(loaded.sample(2, seed=0)["fc.weight"], q.sample(2, seed=0)["fc.weight"])
    assert any(p.requires_grad for p in loaded.parameters()) == family.trainable


@families
def test_pruned_weights_are_zero_in_every_draw(family: Family) -> None:
    q = posterity.prune(build(family), 0.5)
    for name, keep in q.kept().items():
        assert not q.sample(3, seed=0)[name][:, ~keep].any()
        assert not q.mean()[name][~keep].any()
        assert not q.std()[name][~keep].any()
    removed = sum(int((~keep).sum()) for keep in q.kept().values())
    largest = max(leaf.loc.numel() // max(leaf.group_shape.numel(), 1) for leaf in q.blocks.values())
    assert 12 - largest < removed <= 12  # half of 24, or as many whole groups
    assert torch.isfinite(kl(q, family.prior))
    assert kl(q, q.frozen()).item() == pytest.approx(0.0, abs=1e-12)


def model() -> nn.Module:
    net = nn.Module()
    net.fc = nn.Linear(4, 3)
    net.scale = nn.Parameter(torch.ones(()))
    net.conv = nn.Conv2d(1, 2, 2, bias=False)
    return net


def test_a_mismatch_names_the_first_tensor_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    build(FAMILIES[0]).save(path)
    assert isinstance(Factorised.load(path, model()), Factorised)
    wrong = model()
    wrong.fc = nn.Linear(5, 3)
    with pytest.raises(ValueError, match=r"'fc.weight' has shape \(3, 4\) in the posterior and \(3, 5\)"):
        Factorised.load(path, wrong)
    del wrong.fc
    with pytest.raises(
        ValueError, match=r"the posterior has 'fc.weight', but the model has no such parameter"
    ):
        Factorised.load(path, wrong)


def test_other_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="holds no posterior"):
        Factorised.load(tmp_path / "weights.safetensors")
    (tmp_path / "text").write_text("no tensors here")
    with pytest.raises(ValueError, match="is not a safetensors file, or is cut short"):
        Factorised.load(tmp_path / "text")
    build(FAMILIES[0]).save(tmp_path / "q.safetensors")
    whole = (tmp_path / "q.safetensors").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="cut short"):
        Factorised.load(tmp_path / "cut")
    newer = whole.replace(rb"\"version\": 2", rb"\"version\": 9")
    assert newer != whole
    (tmp_path / "newer").write_bytes(newer)
    with pytest.raises(ValueError, match="written by a newer Posterity"):
        Factorised.load(tmp_path / "newer")
    with pytest.raises(FileNotFoundError):
        Factorised.load(tmp_path / "none")
    with pytest.raises(ValueError, match="is damaged"):
        (tmp_path / "json").write_bytes(whole.replace(rb"{\"version\"", rb"[\"version\""))
        Factorised.load(tmp_path / "json")
    with pytest.raises(ValueError, match="is damaged"):
        (tmp_path / "parts").write_bytes(whole.replace(b"fc.bias|raw", b"fc.bias|rew"))
        Factorised.load(tmp_path / "parts")
    negative = Factorised({"w": DiagonalGaussian(torch.zeros(2), 1.0)})
    negative.block("w").raw.neg_()
    negative.save(tmp_path / "negative")
    with pytest.raises(ValueError, match="a saved std is -1"):
        Factorised.load(tmp_path / "negative")


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"std must be finite and 0 or more; the lowest is -1"):
        DiagonalGaussian(torch.zeros(2), torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="greater than 0; the lowest is 0"):
        DiagonalGaussian(torch.zeros(2), 0.0, trainable=True)
    with pytest.raises(ValueError, match="the lowest is nan"):
        DiagonalGaussian(torch.zeros(2), torch.nan)
    with pytest.raises(ValueError, match=r"mask of shape \(3,\) does not fit"):
        DiagonalGaussian(torch.zeros(2), 1.0, keep=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least one block"):
        Factorised({})
    q = build(FAMILIES[0])
    with pytest.raises(ValueError, match="at least one sample, not 0"):
        q.sample(0)
    with pytest.raises(KeyError, match=r"no block 'other'"):
        q.block("other")


def test_the_prior_must_not_have_pruned_what_q_holds() -> None:
    q = build(FAMILIES[0])
    with pytest.raises(ValueError, match="prune q at the same places"):
        kl(q, posterity.prune(q, 0.5))
    half, most = posterity.prune(q, 0.5), posterity.prune(q, 0.8)
    with pytest.raises(ValueError, match="prune q at the same places"):
        kl(half, most)
    assert kl(most, half).item() == pytest.approx(0.0, abs=1e-12)


def test_an_estimated_kl_needs_equal_masks() -> None:
    class Twin(DiagonalGaussian.__base__):  # a leaf with no closed form
        device, dtype = torch.device("cpu"), torch.float64

        def __init__(self, keep: Tensor | None = None) -> None:
            super().__init__(torch.Size([2]), keep)

        def mean(self) -> Tensor:
            return torch.zeros(2)

        std = config = restore = pruned = mean

        def log_prob(self, value: Tensor) -> Tensor:
            return self.total(-0.5 * value**2)

        def _draw(self, noise: Mapping[str, Tensor]) -> Tensor:
            return noise[""]

    keep = torch.tensor([True, False])
    assert kl(Twin(keep), Twin(keep)).item() == 0.0
    with pytest.raises(ValueError, match="prune both alike"):
        kl(Twin(keep), Twin())


def test_pruned_weights_are_left_out_of_a_density_infinite_at_zero() -> None:
    class LogUniform(posterity.Density):
        def log_density(self, value: Tensor) -> Tensor:
            return -value.abs().log()

    q = posterity.prune(build(FAMILIES[1]), 0.5)
    value = kl(q, LogUniform())
    value.backward()
    assert torch.isfinite(value)
    assert all(torch.isfinite(p.grad).all() for p in q.parameters() if p.grad is not None)


def test_pruning_a_leaf_twice_keeps_what_both_kept() -> None:
    leaf = DiagonalGaussian(torch.ones(3), 0.5).pruned(torch.tensor([True, True, False]))
    assert leaf.pruned(torch.tensor([True, False, True])).mean().tolist() == [1.0, 0.0, 0.0]


def test_a_posterior_and_its_copy_share_nothing() -> None:
    q = build(FAMILIES[1])
    frozen = q.frozen()
    before = frozen.mean()["fc.bias"].clone()
    with torch.no_grad():
        for p in q.parameters():
            p.add_(1.0)
    assert torch.equal(frozen.mean()["fc.bias"], before)
    assert not any(p.requires_grad for p in frozen.parameters())


@pytest.mark.parametrize("estimated", [False, True])
def test_all_but_a_point_mass_is_infinitely_far_from_it(estimated: bool) -> None:
    point, wide = (DiagonalGaussian(torch.zeros(2), std) for std in (0.0, 1.0))
    elsewhere, half = (
        DiagonalGaussian(torch.ones(2), 0.0),
        DiagonalGaussian(torch.zeros(2), torch.tensor([0.0, 1.0])),
    )
    if estimated:  # a prior without a formula sees densities alone
        assert kl(point, posterity.ScaleMixture()).item() == torch.inf
        assert point.log_prob(torch.zeros(2)).item() == torch.inf
        assert half.log_prob(torch.ones(2)).item() == -torch.inf
        assert elsewhere.log_prob(torch.stack([torch.ones(2), torch.tensor([1.0, 0.0])])).tolist() == [
            torch.inf,
            -torch.inf,
        ]
        return
    for q, p in ((wide, point), (wide, half), (point, wide), (half, wide), (half, point), (point, elsewhere)):
        assert kl(q, p).item() == torch.inf
    assert kl(point, point).item() == kl(half, half).item() == 0.0
    mean = nn.Parameter(torch.zeros(2))
    loss = kl(
        DiagonalGaussian(mean, 0.5, trainable=True), DiagonalGaussian(torch.ones(2), torch.tensor([0.5, 0.0]))
    )
    loss.backward()
    assert mean.grad is not None
    assert mean.grad[0] == -4.0


def test_repr_is_one_line_of_counts_kinds_and_names() -> None:
    leaves = {name: DiagonalGaussian(torch.zeros(2, 3), 0.1) for name in ("a.weight", "b.weight")}
    assert repr(Factorised(leaves)) == (
        "Factorised(blocks=2, weights=12, kinds=[2 DiagonalGaussian], names=['a.weight', 'b.weight'])"
    )
    rows = MatrixGaussian(torch.zeros(2, 3), torch.eye(2), torch.eye(3))
    assert repr(Factorised({**leaves, "c": rows}, linearised=True)) == (
        "Factorised(blocks=3, weights=18, kinds=[2 DiagonalGaussian, 1 MatrixGaussian], "
        "names=['a.weight', …, 'c'], linearised=True)"
    )
