"""Baselines: each against its definition by hand, and that what they share changes nothing else."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from posterity import IsotropicGaussian, ScaleMixture, elbo, kl, run
from posterity.noise import Domain
from posterity_lab.baselines import adam, bbb, ewc, fisher, l2, sgd, si, vcl
from posterity_lab.data import Split
from posterity_lab.methods import Method
from posterity_lab.streams import own_head, present

PENALTIES: dict[str, Callable[[nn.Module], Method]] = {
    "l2": lambda net: l2(net, lr=0.01, strength=0.3),
    "ewc": lambda net: ewc(net, lr=0.01, strength=0.3, labels="data"),
    "si": lambda net: si(net, lr=0.01, strength=0.3),
}
POINTS = {
    "sgd": lambda net: sgd(net, lr=0.1, momentum=0.9),
    "adam": lambda net: adam(net, lr=0.01),
    **PENALTIES,
}
ALL = {
    **POINTS,
    "bbb": lambda net: bbb(net, prior=ScaleMixture(), num_data=12, lr=0.01),
    "vcl": lambda net: vcl(net, num_data=12, lr=0.01),
}


def small(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).to(dtype)


def examples(count: int, seed: int, classes: int = 4) -> Split:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return Split(x, torch.randint(0, classes, (count,), generator=generator))


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def gradients(net: nn.Module, data: Split) -> list[Tensor]:
    loss = cross_entropy(net(data.x), data.y)
    return list(torch.autograd.grad(loss, list(net.parameters())))


def naive_fisher(net: nn.Module, data: Split, heads: Tensor | None = None) -> list[Tensor]:
    total = [torch.zeros_like(p) for p in net.parameters()]
    for x, y in zip(data.x, data.y, strict=True):
        logits = net(x[None])
        if heads is not None:
            own = (heads == heads[y]).nonzero().flatten()
            logits, y = logits[:, own], (own == y).nonzero()[0, 0]
        loss = cross_entropy(logits, y[None])
        for sum_, g in zip(total, torch.autograd.grad(loss, list(net.parameters())), strict=True):
            sum_ += g**2 / len(data)
    return total


@pytest.mark.parametrize("heads", [None, torch.tensor([0, 0, 1, 1])])
def test_the_empirical_fisher_is_the_mean_of_squared_gradients(heads: Tensor | None) -> None:
    net, data = small(), examples(70, seed=1)  # more than are taken at once
    mask = None if heads is None else partial(own_head, heads=heads)
    found = fisher(net, data, labels="data", mask=mask)
    assert list(found) == [name for name, _ in net.named_parameters()]
    for mine, naive in zip(found.values(), naive_fisher(net, data, heads), strict=True):
        assert torch.allclose(mine, naive, rtol=1e-10, atol=1e-14)


def test_fisher_uses_all_labels_of_a_task() -> None:
    net, data = small(), Split(examples(70, seed=1).x, torch.arange(70) % 2)
    found = fisher(net, data, labels="data", mask=partial(present, classes=4))
    naive = naive_fisher(net, data, heads=torch.tensor([0, 0, 1, 1]))
    for mine, by_hand in zip(found.values(), naive, strict=True):
        assert torch.allclose(mine, by_hand, rtol=1e-10, atol=1e-14)


def test_the_fisher_draws_labels_from_the_model() -> None:
    net, x, count = small(), torch.tensor([[0.3, -1.0, 0.7]], dtype=torch.float64), 3000
    found = fisher(net, Split(x.expand(count, -1), torch.zeros(count, dtype=torch.long)))
    probs = net(x).softmax(-1)[0].detach()
    squares = [[g**2 for g in gradients(net, Split(x, torch.tensor([label])))] for label in range(len(probs))]
    for number, mine in enumerate(found.values()):
        values = torch.stack([square[number] for square in squares], dim=-1)
        mean = (values * probs).sum(-1)
        error = ((values**2 * probs).sum(-1) - mean**2).clamp_min(0).sqrt() / count**0.5
        assert ((mine - mean).abs() <= 5 * error + 1e-12).all()


def test_fisher_keeps_model_modes_and_uses_some_examples() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 4)).double()
    net[0].eval()
    fisher(net, examples(5, seed=0))
    assert [module.training for module in net.modules()] == [True, False, True, True]
    # Dropout is off, and two examples of two are all of them.
    one, two = (fisher(net, examples(2, seed=0), labels="data", examples=count) for count in (2, None))
    assert torch.equal(one["0.weight"], two["0.weight"])
    single = fisher(net, examples(9, seed=0), labels="data", examples=1)
    assert not torch.allclose(single["0.weight"], fisher(net, examples(9, seed=0), labels="data")["0.weight"])


def test_the_fisher_of_some_examples_is_the_mean_over_these() -> None:
    net, one = small(), examples(1, seed=0)
    alike = Split(one.x.expand(90, -1), one.y.expand(90))  # whichever are chosen, their squares are the same
    found = fisher(net, alike, labels="data", examples=40)
    for mine, by_hand in zip(found.values(), naive_fisher(net, one), strict=True):
        assert torch.allclose(mine, by_hand, rtol=1e-10, atol=1e-14)


def test_online_ewc_lets_earlier_tasks_decay() -> None:
    net, first, second = small(), examples(8, seed=1), examples(8, seed=2)
    method = ewc(net, lr=0.01, strength=1.0, decay=0.7, labels="data")
    one = naive_fisher(net, first)
    method.boundary(first)
    method.step(first.x, first.y)
    two = naive_fisher(net, second)
    method.boundary(second)
    for mine, a, b in zip(method._penalty.importance, one, two, strict=True):
        assert torch.allclose(mine, 0.7 * a + b, rtol=1e-10, atol=1e-14)


def test_the_path_integral_of_si_by_hand() -> None:
    net, damping = small(), 0.05
    method = si(net, lr=0.01, strength=2.0, damping=damping)
    importance = [torch.zeros_like(p) for p in net.parameters()]
    for task in range(2):
        begin = weights(net)
        path = [torch.zeros_like(p) for p in begin]
        for step in range(5):
            batch = examples(6, seed=10 * task + step)
            before, grads = weights(net), gradients(net, batch)  # of the loss alone
            method.step(batch.x, batch.y)
            for total, g, old, new in zip(path, grads, before, weights(net), strict=True):
                total -= g * (new - old)
        method.boundary(batch)
        importance = [
            omega + total / ((now - old) ** 2 + damping)
            for omega, total, now, old in zip(importance, path, weights(net), begin, strict=True)
        ]
        for mine, by_hand in zip(method._penalty.importance, importance, strict=True):
            assert torch.allclose(mine, by_hand, rtol=1e-9, atol=1e-14)
        assert all((each == 0).all() for each in method._penalty.rule.tensors())


@pytest.mark.parametrize("name", PENALTIES)
def test_the_gradient_is_that_of_loss_and_penalty(name: str) -> None:
    net = small()
    method = PENALTIES[name](net)
    for seed in range(3):
        batch = examples(6, seed)
        method.step(batch.x, batch.y)
    anchor = weights(net)
    method.boundary(batch)
    method.step(batch.x, batch.y)  # away from the anchor
    importance = [each.clone() for each in method._penalty.importance]
    assert any((each != 0).any() for each in importance)
    total = cross_entropy(net(batch.x), batch.y) + 0.3 * sum(
        (weight * (p - at).square()).sum()
        for weight, p, at in zip(importance, net.parameters(), anchor, strict=True)
    )
    expected = torch.autograd.grad(total, list(net.parameters()))
    method.step(batch.x, batch.y)
    for p, g in zip(net.parameters(), expected, strict=True):
        assert torch.allclose(p.grad, g, rtol=1e-9, atol=1e-14)
    if name == "l2":
        assert all((each == 1).all() for each in importance)


@pytest.mark.parametrize("name", PENALTIES)
def test_before_the_first_boundary_a_penalty_is_plain_adam(name: str) -> None:
    nets = small(), small()
    for net, method in zip(nets, (PENALTIES[name](nets[0]), adam(nets[1], lr=0.01)), strict=True):
        for seed in range(3):
            batch = examples(6, seed)
            method.step(batch.x, batch.y)
        assert net is method.model
    assert all(torch.equal(a, b) for a, b in zip(weights(nets[0]), weights(nets[1]), strict=True))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_plain_training_is_that_of_torch(name: str) -> None:
    net = small()
    other = deepcopy(net)
    method = POINTS[name](net)
    if name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    for seed in range(4):
        batch = examples(6, seed)
        loss = cross_entropy(other(batch.x), batch.y)
        assert torch.allclose(method.step(batch.x, batch.y), loss.detach(), rtol=1e-9)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for a, b in zip(weights(net), weights(other), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def snapshot(method: Method) -> dict:
    """All but where noise is drawn from, which goes on whatever the loss."""
    return deepcopy({key: value for key, value in method.state_dict().items() if key != "noise"})


def equal(one: object, two: object) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(equal, one, two))
    return one == two


@pytest.mark.parametrize(
    ("name", "known"), [*((name, "at once") for name in ALL), *((name, "later") for name in POINTS)]
)
def test_non_finite_loss_changes_nothing(name: str, known: str, monkeypatch) -> None:
    net = small()
    method, batch = ALL[name](net), examples(6, seed=0)
    method.step(batch.x, batch.y)
    before = snapshot(method)
    bad = batch.x.clone().index_fill(0, torch.tensor([1]), float("nan"))
    if known == "at once":
        with pytest.raises(FloatingPointError, match="look for bad values in the batch, or lower"):
            method.step(bad, batch.y)
    else:  # as on a GPU, where the step is over before its loss is read
        with monkeypatch.context() as patch:
            patch.setattr(type(method._watch), "refuse", lambda self: None)
            method.step(bad, batch.y)
        assert equal(snapshot(method), before)
        with pytest.raises(FloatingPointError, match="the weights were not touched"):
            method.step(batch.x, batch.y)
    assert equal(snapshot(method), before)
    method.step(batch.x, batch.y)
    assert not equal(snapshot(method), before)


@pytest.mark.parametrize("name", ALL)
def test_saved_state_resumes_bitwise(name: str, tmp_path) -> None:
    whole, cut = ALL[name](small(torch.float32)), ALL[name](small(torch.float32))

    def learn(method: Method, seeds: range) -> None:
        for seed in seeds:
            data = examples(12, seed)
            method.step(data.x.float(), data.y)

    for method in (whole, cut):
        learn(method, range(3))
        method.boundary(Split(examples(12, 0).x.float(), examples(12, 0).y))
        learn(method, range(3, 5))
    torch.save(cut.state_dict(), tmp_path / "state.pt")
    resumed = ALL[name](small(torch.float32))
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for method in (whole, resumed):
        learn(method, range(5, 8))
        method.boundary(Split(examples(12, 1).x.float(), examples(12, 1).y))
    assert equal(whole.state_dict(), resumed.state_dict())


def by_hand(method: Method, prior: object, x: Tensor, y: Tensor, samples: int) -> Tensor:
    """The loss of the next step."""
    net, posterior = method.model, method.posterior()
    weights = posterior._sample(range(samples), net.seed, net.draws, Domain.TRAIN)
    nll = cross_entropy(run(method.model.module, weights, x).flatten(0, 1), y.repeat(samples))
    return elbo(nll, kl(posterior, prior, weights=weights), num_data=12)


@pytest.mark.parametrize("prior", [IsotropicGaussian(0.3), ScaleMixture(0.25, 1.0, 0.01)])
def test_the_loss_of_bayes_by_backprop_is_the_elbo(prior: object) -> None:
    method, data = bbb(small(torch.float32), prior=prior, num_data=12, lr=0.05), examples(12, seed=0)
    x = data.x.float()
    for _ in range(3):
        expected = by_hand(method, prior, x, data.y, samples=1)
        assert torch.allclose(method.step(x, data.y), expected, rtol=1e-6)
        method.boundary(data)  # a density stays as it is


def test_vcl_takes_its_posterior_for_the_next_prior() -> None:
    method, data = vcl(small(torch.float32), num_data=12, lr=0.05, samples=2), examples(12, seed=0)
    x, prior = data.x.float(), IsotropicGaussian(1.0)
    for _ in range(3):
        for _ in range(3):
            expected = by_hand(method, prior, x, data.y, samples=2)
            assert torch.allclose(method.step(x, data.y), expected, rtol=1e-6)
        prior = method.posterior()
        method.boundary(data)
        assert float(kl(method.posterior(), method._prior)) == 0.0


def test_the_noise_of_bayes_by_backprop_is_its_own() -> None:
    data, losses = examples(12, seed=0), []
    for seed in (0, 0, 1):
        method = vcl(small(torch.float32), num_data=12, lr=0.01, std_init=0.5, seed=seed)
        before = torch.get_rng_state()
        losses.append([float(method.step(data.x.float(), data.y)) for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[2][0]


@pytest.mark.parametrize("name", ALL)
def test_masks_are_used_in_training(name: str) -> None:
    net = nn.Linear(3, 4)
    makers = {
        "sgd": partial(sgd, lr=0.1),
        "adam": partial(adam, lr=0.1),
        "l2": partial(l2, lr=0.1, strength=0.1),
        "ewc": partial(ewc, lr=0.1, strength=0.1),
        "si": partial(si, lr=0.1, strength=0.1),
        "bbb": partial(bbb, prior=IsotropicGaussian(), lr=0.1, num_data=5, kl_factor=0.0),
        "vcl": partial(vcl, lr=0.1, num_data=5, kl_factor=0.0),
    }
    before = net.weight.detach().clone()
    method = makers[name](net, mask=partial(present, classes=4))
    data = Split(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 0]))
    method.step(data.x, data.y)
    assert (net.weight != before).any(1).tolist() == [True, True, False, False]
    method.boundary(data)
    if name == "ewc":
        assert (method._penalty.importance[0] != 0).any(1).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (partial(l2, lr=0.1, strength=-1.0), "strength must be at least 0"),
        (partial(ewc, lr=0.1, strength=1.0, decay=1.5), "decay must lie in 0 … 1"),
        (partial(ewc, lr=0.1, strength=1.0, examples=0), "examples must be at least 1"),
        (partial(ewc, lr=0.1, strength=1.0, labels="both"), "labels must be 'model' or 'data'"),
        (partial(si, lr=0.1, strength=1.0, damping=0.0), "damping must be greater than 0"),
        (partial(vcl, lr=0.1, num_data=1, samples=0), "samples must be at least 1"),
        (partial(vcl, lr=0.1, num_data=1, prior_std=0.0), "prior_std must be finite and greater than 0"),
    ],
)
def test_wrong_settings_are_refused(make: Callable, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(nn.Linear(3, 4))


def test_a_net_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="there is nothing to train"):
        sgd(nn.Linear(3, 4).requires_grad_(False), lr=0.1)


def test_parameters_that_do_not_matter_or_do_not_learn_are_left() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.fixed = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 4)
            self.fixed.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.fixed(self.used(x))

    net, data = Odd(), Split(torch.randn(6, 3), torch.arange(6) % 4)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    method = ewc(net, lr=0.1, strength=1.0)
    for _ in range(2):
        method.step(data.x, data.y)
        method.boundary(data)
    moved = {name for name, p in net.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"used.weight", "used.bias"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", POINTS)  # the others go by compile_step
def test_captured_step_equals_eager_step_without_synchronising(name: str, no_waiting: Callable) -> None:
    results = []
    for captured in (True, False):
        net = small(torch.float32).cuda()
        method = ALL[name](net)
        if not captured:
            method._run._eager = True
        data = [Split(examples(6, seed).x.float(), examples(6, seed).y).to("cuda") for seed in range(12)]
        for number, batch in enumerate(data):
            with no_waiting() if number > 3 else nullcontext():
                method.step(batch.x, batch.y)
            if number == 5:
                method.boundary(batch)
        assert bool(method._run._graphs) == captured
        results.append(weights(net))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", POINTS)  # the others go by compile_step
def test_a_bad_loss_in_a_graph_moves_nothing_and_is_raised_later(name: str) -> None:
    method = ALL[name](small(torch.float32).cuda())
    batch = Split(examples(6, 0).x.float(), examples(6, 0).y).to("cuda")
    for _ in range(4):
        method.step(batch.x, batch.y)
    before = snapshot(method)
    method.step(batch.x * float("nan"), batch.y)
    torch.cuda.synchronize()
    assert equal(snapshot(method), before)
    with pytest.raises(FloatingPointError, match="the weights were not touched"):
        method.step(batch.x, batch.y)
