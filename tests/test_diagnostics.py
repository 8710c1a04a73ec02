"""What diagnostics say of posteriors that learn, and of those that do not."""

import contextlib
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import posterity
from posterity import BGD, IVON, DiagonalGaussian, Factorised, NoisyKFAC, VariationalOptimizer, prune
from posterity.diagnostics import COLLAPSED, PosteriorWarning, check, histogram, learning_rates

RULES: dict[str, Callable[[nn.Module], VariationalOptimizer]] = {
    "bgd": lambda model: BGD(model, std_init=0.05, lr=2.0, batch_size=20, seed=0),
    "ivon": lambda model: IVON(model, num_data=20, lr=0.3, hess_init=0.5, betas=(0.0, 0.9), seed=0),
}


class Net(nn.Module):
    """Two layers, of which the loss depends on one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def learn(model: nn.Module, opt: VariationalOptimizer, steps: int = 3) -> Factorised:
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    for _ in range(steps):
        opt.step(lambda: cross_entropy(model(x), y))
    return opt.posterior()


def gaussian(mean: float, std: float, n: int = 100) -> Factorised:
    signs = torch.ones(n)
    signs[::2] = -1.0
    return Factorised({"w": DiagonalGaussian(mean * signs, std)})


@pytest.mark.parametrize("rule", RULES)
def test_learning_posterior_does_not_warn(rule: str) -> None:
    model = nn.Linear(4, 3)
    opt = RULES[rule](model)
    start = opt.posterior()
    health = check(learn(model, opt), start)  # a warning would be an error
    assert set(health) == {"weight", "bias"}
    assert all(each.finite and each.mean_moved and each.std_moved for each in health.values())
    q = opt.posterior()
    for name, each in health.items():
        mean, std = q.mean()[name], q.std()[name]
        assert each.noise == pytest.approx(float(std.norm() / mean.norm()), rel=1e-5)
        assert each.growth == pytest.approx(float(std.norm() / start.std()[name].norm()), rel=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_what_never_moved_is_named(rule: str) -> None:
    model = Net()
    opt = RULES[rule](model)
    start = opt.posterior()
    with pytest.warns(PosteriorWarning, match=r"of 'unused.weight', 'unused.bias' never moved: [^;]*$"):
        health = check(learn(model, opt), start)
    assert health["used.weight"].complaint is None


def test_stds_that_stay_while_means_move_are_named() -> None:
    with pytest.warns(PosteriorWarning, match="'w' has learned no std"):
        check(gaussian(1.1, 0.1), gaussian(1.0, 0.1))


@pytest.mark.parametrize(
    ("now", "complaint"),
    [
        (gaussian(1.1, 1.01 * COLLAPSED * 1.1), None),
        (gaussian(1.1, 0.99 * COLLAPSED * 1.1), "'w' has collapsed"),
        (gaussian(0.1, 1.01), "'w' has blown up"),
        (gaussian(0.11, 1.01), None),  # much more noise than at the start, but not so much more than signal
        (gaussian(0.05, 0.99), None),  # much more noise than signal, but not so much more than at the start
        (gaussian(900.0, 90.0), None),
        (gaussian(1100.0, 0.2), "'w' has blown up"),
        (gaussian(1e30, 1e25), "'w' has blown up"),
        (gaussian(math.nan, 0.2), "'w' is not finite"),
    ],
)
def test_limits_are_where_they_are_said_to_be(now: Factorised, complaint: str | None) -> None:
    start = gaussian(1.0, 0.1)
    if complaint is None:
        assert check(now, start)["w"].complaint is None
    else:
        with pytest.warns(PosteriorWarning, match=complaint):
            check(now, start)


def test_numbers_survive_where_squares_overflow() -> None:
    with pytest.warns(PosteriorWarning, match="has blown up"):
        health = check(gaussian(1e30, 1e25), gaussian(1.0, 0.1))["w"]
    assert health.noise == pytest.approx(1e-5)
    assert health.growth == pytest.approx(1e26)


def test_a_run_that_diverged_has_blown_up() -> None:
    model = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 3))
    opt = BGD(model, std_init=2.0, max_step=math.inf, batch_size=20)
    start = opt.posterior()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", posterity.DivergenceWarning)
        with contextlib.suppress(FloatingPointError):
            learn(model, opt, steps=50)
    with pytest.warns(PosteriorWarning, match="has blown up"):
        check(opt.posterior(), start)


def test_pruned_weights_do_not_count() -> None:
    start = gaussian(1.0, 0.1)
    mean, std = start.mean()["w"].clone(), start.std()["w"].clone()
    mean[:50], std[:50] = 1.5, 0.2
    now = Factorised({"w": DiagonalGaussian(mean, std)})
    kept = torch.arange(100) >= 50
    with pytest.warns(PosteriorWarning, match="never moved"):  # what moved is pruned
        health = check(Factorised({"w": now.block("w").pruned(kept)}), start)
    assert health["w"].growth == pytest.approx(1.0)
    assert check(prune(now, 1.0), start) == {}


def test_another_start_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'w' has shape \(100,\), and \(50,\) at the start"):
        check(gaussian(1.0, 0.1), gaussian(1.0, 0.1, n=50))
    with pytest.raises(ValueError, match="at the start has no 'w'"):
        check(gaussian(1.0, 0.1), Factorised({"v": DiagonalGaussian(torch.ones(2), 0.1)}))


@pytest.mark.parametrize("rule", RULES)
def test_the_rate_is_what_a_step_multiplies_the_gradient_by(rule: str) -> None:
    # The effect of a little more gradient on the next mean, all else equal, where no step is at its bound.
    torch.manual_seed(0)
    means = []
    for extra in (0.0, 1e-3):
        model = nn.Linear(4, 3).double()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
        # IVON's step uses the Hessian after its own update: with β2 next to 1 that is the one before.
        opt = (
            BGD(model, max_step=math.inf, mc_samples=1, seed=0)
            if rule == "bgd"
            else IVON(model, num_data=20, betas=(0.0, 1 - 1e-14), max_step=math.inf, seed=0)
        )
        opt.load_posterior(
            Factorised(
                {
                    name: DiagonalGaussian(
                        p.detach(), torch.linspace(0.05, 0.2, p.numel()).double().view_as(p)
                    )
                    for name, p in model.named_parameters()
                }
            )
        )
        rates = learning_rates(opt, batch_size=20)
        x, y = torch.ones(20, 4).double(), torch.zeros(20, dtype=torch.long)
        with opt.sampled_params():
            cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad += extra
        opt.step(batch_size=20) if rule == "bgd" else opt.step()
        means.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, rate in rates.items():
        torch.testing.assert_close((means[0][name] - means[1][name]) / 1e-3, rate, rtol=1e-8, atol=0)


def test_rates_by_the_papers_formulas() -> None:
    model = nn.Linear(4, 3)
    q = BGD(model, std_init=0.1).posterior()
    keep = torch.arange(12).view(3, 4) % 2 == 0
    opt = BGD(model, lr=3.0, deterministic="bias")
    opt.load_posterior(Factorised({"weight": q.block("weight").pruned(keep)}))
    assert set(learning_rates(opt)) == {"weight"}
    torch.testing.assert_close(learning_rates(opt)["weight"], 3.0 * 0.1**2 * keep)
    torch.testing.assert_close(learning_rates(opt, batch_size=8)["weight"], 24.0 * 0.1**2 * keep)
    # At the start IVON's rate is lr itself, whatever the Hessian.
    ivon = learning_rates(IVON(model, num_data=50, lr=0.2, hess_init=0.7))
    torch.testing.assert_close(ivon["weight"], torch.full((3, 4), 0.2))


def test_rates_refuse_what_has_none() -> None:
    with pytest.raises(TypeError, match="SGD has no rate per weight"):
        learning_rates(torch.optim.SGD(nn.Linear(1, 1).parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1, not 0"):
        learning_rates(BGD(nn.Linear(1, 1)), batch_size=0)


def test_a_histogram_counts_every_positive_value_once() -> None:
    values = {"a": torch.rand(1000) + 1e-4, "b": 10.0 ** torch.linspace(-6, 2, 81), "c": torch.zeros(5)}
    spread = histogram(values, bins=8)
    assert [int(counts.sum()) for counts in spread.counts.values()] == [1000, 81, 0]
    torch.testing.assert_close(spread.edges, 10.0 ** torch.linspace(-6, 2, 9, dtype=torch.float64))
    inner = (values["a"][:, None] > spread.edges[:-1]) & (values["a"][:, None] <= spread.edges[1:])
    assert torch.equal(spread.counts["a"], inner.sum(0))
    odd = histogram({"w": torch.tensor([0.1, math.inf, math.nan, -1.0, 0.0])})
    assert int(odd.counts["w"].sum()) == 1


def test_equal_values_still_have_a_histogram() -> None:
    spread = histogram({"w": torch.full((7,), 0.02)}, bins=11)
    assert spread.counts["w"].tolist() == [0] * 5 + [7] + [0] * 5
    assert float(spread.edges[-1] / spread.edges[0]) == pytest.approx(10.0)


def test_histograms_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one value above 0"):
        histogram({"w": torch.zeros(3)})
    with pytest.raises(ValueError, match="at least one bin"):
        histogram({"w": torch.ones(3)}, bins=0)


def test_blocks_of_several_tensors_are_checked_by_tensor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    opt = NoisyKFAC(model, num_data=8, lr=0.01)
    start = opt.posterior()  # blocks are formed by the first step
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    for _ in range(2):
        opt.step(lambda: nn.functional.cross_entropy(model(x), y))
    health = check(opt.posterior(), start)
    assert list(health) == [name for name, _ in model.named_parameters()]
    assert all(each.mean_moved and each.std_moved for each in health.values())
    assert set(learning_rates(opt)) == {"1.weight", "1.bias"}
