"""Experiments of methods by gradient: Blundell's, Bayesian incremental learning, and uncertainty."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.nn.functional import softplus

from posterity import Prediction, laplace, metrics
from posterity.noise import Domain
from posterity_lab import continual, data, nets, streams
from posterity_lab.data import Split
from posterity_lab.reproduce import bandit, blundell, curve, doubt, images, incremental, records, training
from posterity_lab.reproduce.learners import FAMILIES, learner
from posterity_lab.reproduce.study import Cell, Study, Unit

QUIET = lambda done, total, what: None  # noqa: E731


def unit(study: Study, method: str, setting: str | None = None, **config: Any) -> Unit:
    """A quick one."""
    cells = [cell for cell in study.cells(True) if cell.method == method]
    cell = next(cell for cell in cells if setting in (None, cell.setting))
    return Unit(study.name, cell.setting, method, 0, {**cell.config, **config}, "")


def trial(study: Study, method: str) -> Unit:
    cell = next(cell for cell in study.cells(True) if cell.method == method)
    return records.trials(study, cell)[0]


def test_bayes_by_backprop_begins_as_the_recipe_says() -> None:
    config = next(cell.config for cell in blundell.cells(quick=False) if cell.method == "bbb-mixture")
    asked = {"weight": 0.75, "std_wide": 1.0, "std_narrow": 0.000335, "kl_factor": 1.0, "optimizer": "sgd"}
    assert asked.items() <= config.items()
    assert config["lr"] == pytest.approx(1e-3 * config["batch_size"])  # the paper's is of a sum
    train = Split(torch.zeros(8, 1, 4, 4), torch.zeros(8, dtype=torch.long))
    method = training.begun("bbb-mixture", {**config, "net": "mlp-50"}, train, 2, "cpu", 0)
    posterior = method.posterior()
    low, high = (softplus(torch.tensor(rho)).item() for rho in (-3.5, -3.0))
    for name, std in posterior.std().items():
        mean = posterior.mean()[name]
        assert low <= std.min() < std.max() <= high
        assert mean.abs().max() <= 0.03
    assert posterior.mean()["1.weight"].abs().max() > 0.029
    assert isinstance(method.optimizer, torch.optim.SGD)


def test_a_step_of_the_recipe_is_sgd_on_the_summed_loss() -> None:
    config = {"prior_std": 1.0, "lr": 8 * 1e-3, "rho": [-3.5, -3.0], "kl_factor": 1.0, "optimizer": "sgd"}
    net = nets.initialise(nets.mlp(3, [], 2), 0)
    method = learner("bbb", config, net, num_data=40, seed=0)
    before = {name: p.detach().clone() for name, p in method.model.named_parameters()}
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    leaves = method.model.posterior.blocks
    at = {"seed": method.model.seed, "step": method.model.draws, "domain": Domain.TRAIN}
    eps = {name: leaf.noise(range(1), block=name, **at)[""][0] for name, leaf in leaves.items()}
    method.step(x, y)
    params = {name: value.requires_grad_() for name, value in before.items()}
    means = [params["module.1.weight"], params["module.1.bias"]]
    rhos = [value for name, value in params.items() if name.endswith("raw")]
    weights = [m + softplus(r) * e for m, r, e in zip(means, rhos, eps.values(), strict=True)]
    summed = nn.functional.cross_entropy(x @ weights[0].T + weights[1], y, reduction="sum")
    # Uniform KL / M: five batches of eight.
    kl = sum(
        torch.distributions.kl_divergence(Normal(m, softplus(r)), Normal(0.0, 1.0)).sum()
        for m, r in zip(means, rhos, strict=True)
    )
    grads = torch.autograd.grad(summed + kl / 5, [*means, *rhos])
    after = dict(method.model.named_parameters())
    for name, value, grad in zip(("module.1.weight", "module.1.bias"), means, grads[:2], strict=True):
        torch.testing.assert_close(after[name], value - 1e-3 * grad)
    moved = [value for name, value in after.items() if name.endswith("raw")]
    for now, value, grad in zip(moved, rhos, grads[2:], strict=True):
        torch.testing.assert_close(now, value - 1e-3 * grad)


def test_shares_of_the_papers_table_are_measured() -> None:
    assert set(blundell.SHARES) <= set(images.FRACTIONS)


def test_counts_of_weights_lie_in_their_bins() -> None:
    values = torch.tensor([-0.199, 0.0005, 0.0006, 0.199, 0.5])
    counts, edges = blundell._counts(values, blundell.WEIGHTS), blundell.edges(blundell.WEIGHTS)
    assert sum(counts) == 4  # what lies outside is left out
    assert (counts[0], counts[35], counts[-1]) == (1, 2, 1)
    assert edges[35] <= 0.0005 < edges[36]


def test_pruning_is_judged_by_the_mean_over_the_papers_shares(tmp_path: Path) -> None:
    found = blundell.train(unit(blundell.BLUNDELL, "bbb", epochs=1), "cpu", tmp_path, QUIET).metrics
    pruned = found["pruning"]["average"]
    errors = [pruned["errors"][pruned["fractions"].index(share)] for share in (0.0, 0.5, 0.75, 0.95, 0.98)]
    assert found["kept_accuracy"] == pytest.approx(1.0 - sum(errors) / 5)
    assert found["averaged_accuracy"] == 1.0 - found["errors"]["average"]
    assert sum(found["snr"]) == sum(p.numel() for p in nets.mlp(64, [24, 24], 10).parameters())


def killed(
    run: Callable[..., Any], asked: Unit, folder: Path, owner: Any, name: str, at: int, monkeypatch: Any
) -> Any:
    """The outcome of a run that is killed at a call of one of its methods, and goes on."""
    called, calls = getattr(owner, name), 0

    def mortal(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return called(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, mortal)
        with pytest.raises(KeyboardInterrupt):
            run(asked, "cpu", folder, QUIET)
    return run(asked, "cpu", folder, QUIET)


@pytest.mark.parametrize("at", [15, 40])  # in the second part, and in the third
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_go_on_with_the_prior_that_was_handed_over(
    tmp_path: Path, monkeypatch: Any, family: str, at: int
) -> None:
    asked = unit(incremental.MNIST, family, epochs=1, batch_size=32, kl_factor=1.0)
    whole = incremental.learn(asked, "cpu", tmp_path / "whole", QUIET)
    backprop = type(learner(family, asked.config, nn.Linear(2, 2), num_data=1, seed=0))
    folder = tmp_path / "killed"
    again = killed(incremental.learn, asked, folder, backprop, "step", at, monkeypatch)
    assert again.metrics == whole.metrics
    assert [each["part"] for each in whole.metrics["curve"]] == [1, 2, 3]


def test_joint_training_has_all_parts_at_once_and_as_many_steps(tmp_path: Path, monkeypatch: Any) -> None:
    steps = []
    for name in ("joint", "fine-tuning"):
        asked, seen = unit(incremental.MNIST, name, net="mlp-8", epochs=1, batch_size=479), list[int]()
        step = type(learner(name, asked.config, nn.Linear(2, 2), num_data=1, seed=0)).step
        told = lambda self, x, y, seen=seen, step=step: (seen.append(len(y)), step(self, x, y))[1]  # noqa: E731
        monkeypatch.setattr("posterity_lab.baselines.point._Point.step", told)
        found = incremental.learn(asked, "cpu", tmp_path / name, QUIET)
        monkeypatch.undo()
        assert [each["part"] for each in found.metrics["curve"]] == ([3] if name == "joint" else [1, 2, 3])
        assert found.n == 360
        steps.append(seen)
    assert steps == [[479, 479, 479]] * 2


def test_test_sets_that_tasks_share_are_tested_once(monkeypatch: Any) -> None:
    tasks = streams.parts(data.load("digits"), tasks=4, seed=0)
    net = nets.mlp(64, [], 10)
    asked = list[int]()
    predictions = continual.methods.predictions
    told = lambda *args, **kwargs: (asked.append(len(args[2])), predictions(*args, **kwargs))[1]  # noqa: E731
    monkeypatch.setattr(continual.methods, "predictions", told)
    method = learner("fine-tuning", {"lr": 1e-3}, net, num_data=359, seed=0)
    shown = streams.stream(tasks, epochs=1, batch_size=400, seed=0)
    scores = continual.run(method, shown, progress=False)
    assert asked == [360] * 5  # before anything is learned, and after every part
    assert bool((scores.accuracy == scores.accuracy[:, :1]).all())
    other = Split(tasks.items[0].test.x.clone(), tasks.items[0].test.y)
    apart = streams.Tasks([replace(tasks.items[0], test=other), *tasks.items[1:]], 10)
    asked.clear()
    continual.run(method, streams.stream(apart, epochs=1, batch_size=400, seed=0), progress=False)
    assert asked == [360] * 10


def test_halves_share_no_class_and_keep_every_image() -> None:
    digits = data.load("digits")
    for seed in range(3):
        first, rest = incremental.halves(digits, seed)
        order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
        for half, classes in ((first, order[:5]), (rest, order[5:])):
            for own, every in ((half.train, digits.train), (half.test, digits.test)):
                chosen = torch.isin(every.y, classes)
                assert torch.equal(own.x, every.x[chosen])
                assert torch.equal(classes[own.y], every.y[chosen])


@pytest.mark.parametrize("prior", ["grid", "laplace"])
def test_the_prior_lies_around_the_pretrained_weights(prior: str, monkeypatch: Any) -> None:
    seen: dict[str, Any] = {}
    fit = laplace.fit

    def spied(model: nn.Module, given: Any, **how: Any) -> Any:
        seen["given"], seen["found"] = given, fit(model, given, **how)
        return seen["found"]

    monkeypatch.setattr(laplace, "fit", spied)
    config = {"net": "mlp-6-5", "pretraining": 2, "batch_size": 64, "prior": prior, "prior_std": 0.2}
    first, _ = incremental.halves(data.load("digits"), 0)
    weights, found = incremental.pretrained(first, config, seed=0)
    assert list(weights) == ["1.weight", "1.bias", "3.weight", "3.bias"]
    for name, weight in weights.items():
        assert torch.equal(found.block(name).mean(), weight)
        expected = torch.full_like(weight, 0.2) if prior == "grid" else seen["found"].posterior().std()[name]
        torch.testing.assert_close(found.block(name).std(), expected)
    for name in ("5.weight", "5.bias"):
        assert (found.block(name).mean, found.block(name).std) == (0.0, 1.0)
    if prior == "laplace":
        std = found.block("1.weight").std()
        assert float(std.max() / std.min()) > 2.0  # one for each weight
        assert all(
            given is kept for given, kept in zip(seen["given"], (first.train.x, first.train.y), strict=True)
        )


@pytest.mark.parametrize(
    ("setting", "method", "moved"),
    [("from scratch", "ffg", False), ("pretrained", "ffg", True), ("pretrained", "fine-tuning", True)],
)
def test_pretrained_weights_are_where_learning_begins(
    tmp_path: Path, monkeypatch: Any, setting: str, method: str, moved: bool
) -> None:
    seen: dict[str, Any] = {}

    def spied(name: str, config: Any, model: nn.Module, **how: Any) -> Any:
        seen.update(model={k: v.clone() for k, v in model.state_dict().items()}, **how)
        return learner(name, config, model, **how)

    monkeypatch.setattr(incremental, "learner", spied)
    asked = unit(incremental.PRETRAINED, method, setting, net="mlp-6", epochs=1)
    incremental.learn(asked, "cpu", tmp_path, QUIET)
    digits = training.prepared(asked, "cpu")
    first, rest = incremental.halves(digits, 0)
    begun = nets.initialise(nets.build("mlp-6", digits.train.x.shape[1:], 5), 0).state_dict()
    if moved:
        begun |= incremental.pretrained(first, asked.config, 0)[0]
    assert all(torch.equal(value, begun[name]) for name, value in seen["model"].items())
    assert (seen["prior"] is None) == (not moved)
    assert seen["num_data"] == -(-len(rest.train) // 3)


def test_every_family_is_an_experiment_in_parts() -> None:
    methods = [cell.method for cell in incremental.mnist_cells(quick=False)]
    assert methods == [*FAMILIES, "fine-tuning", "joint"]
    for cell in incremental.mnist_cells(quick=False)[: len(FAMILIES)]:
        assert [values["kl_factor"] for values in cell.grid] == [1.0, 0.1, 0.01]
    with pytest.raises(ValueError, match="there is no method 'fgf'"):
        learner("fgf", {}, nn.Linear(2, 2), num_data=1, seed=0)


def test_the_curve_is_the_papers() -> None:
    x, noise = 0.3, 0.01
    sines = 0.3 * math.sin(2 * math.pi * (x + noise)) + 0.3 * math.sin(4 * math.pi * (x + noise))
    assert float(curve.curve(torch.tensor(x), noise)) == pytest.approx(x + sines + noise)
    points = curve.points(1000, seed=3)
    assert 0.0 <= float(points.x.min()) < float(points.x.max()) <= 0.5
    off = points.y - curve.curve(points.x)
    assert 0.05 < float(off.std()) < 0.075  # ε of 0.02, as the sines make it


def test_the_log_likelihood_is_that_of_the_mixture_of_networks() -> None:
    torch.manual_seed(0)
    drawn, y = torch.randn(7, 5).double(), torch.randn(5, 1).double()
    mixture = MixtureSameFamily(Categorical(torch.ones(5, 7)), Normal(drawn.T, 0.3))
    expected = mixture.log_prob(y[:, 0]).mean()
    assert curve._log_likelihood(drawn, y, 0.3) == pytest.approx(float(expected))


def test_trials_of_the_curve_learn_other_points(monkeypatch: Any) -> None:
    seen = list[int]()
    points = curve.points
    monkeypatch.setattr(curve, "points", lambda count, seed: (seen.append(seed), points(count, seed))[1])
    for asked in (unit(curve.CURVE, "adam"), trial(curve.CURVE, "adam")):
        curve.draw(asked, "cpu", Path(), QUIET)
    assert len(set(seen)) == 4


def agent(method: str = "greedy", **config: Any) -> bandit.Agent:
    mushrooms = Split(torch.eye(4), torch.tensor([0, 1, 0, 1]))
    return bandit.Agent(unit(bandit.BANDIT, method, **{"updates": 0, **config}), mushrooms)


@pytest.mark.parametrize(("eats", "expected"), [(True, 15.0), (False, 5.0)])
def test_regret_is_what_an_oracle_gets_more(monkeypatch: Any, eats: bool, expected: float) -> None:
    monkeypatch.setattr(bandit.Agent, "_worth", lambda self, choices: torch.tensor([float(eats), 0.5]))
    played, count = agent(), 1500
    for _ in range(count):
        played.meet()
    # Half are poisonous. To eat one costs 15 on average, with a deviation of 20; to pass an edible one, 5.
    spread = math.sqrt(0.5 * (20**2 + expected**2) - (0.5 * expected) ** 2) if eats else 2.5
    assert abs(float(played.regret) / count - 0.5 * expected) < 5 * spread / math.sqrt(count)
    assert abs(float(played.best) / count - 2.5) < 5 * 2.5 / math.sqrt(count)
    eaten = played._seen[:count, 4]
    assert bool((eaten == float(eats)).all())
    assert set(played._rewards[:count].unique().tolist()) == ({-3.5, 0.5} if eats else {0.0})


def test_who_explores_acts_at_random_so_often(monkeypatch: Any) -> None:
    monkeypatch.setattr(bandit.Agent, "_worth", lambda self, choices: torch.tensor([0.0, 1.0]))
    for method, share in (("greedy", 0.0), ("greedy-1", 0.005), ("greedy-5", 0.025), ("thompson", 0.0)):
        played, count = agent(method), 1500  # of random actions half are to eat
        for _ in range(count):
            played.meet()
        eaten = float(played._seen[:count, 4].mean())
        assert abs(eaten - share) <= 5 * math.sqrt(share / count)


def test_what_was_seen_first_is_forgotten_first() -> None:
    played = agent(buffer=3)
    for _ in range(3):
        played.meet()
    before = played._seen.clone()
    played.meet()
    assert torch.equal(played._seen[1:], before[1:])
    assert played._seen[0].sum() == 2  # one feature and one action


def test_agents_learn_from_what_they_have_seen_alone(monkeypatch: Any) -> None:
    played = agent(updates=5, batch_size=50)
    seen = list[torch.Tensor]()
    monkeypatch.setattr(played.method, "step", lambda x, y: seen.append(x))
    for _ in range(2):
        played.meet()
    assert [len(x) for x in seen] == [50] * 10
    assert all(bool((x.sum(1) == 2).all()) for x in seen)  # no empty place of the buffer


def test_thompson_sampling_draws_its_networks_anew() -> None:
    played = agent("thompson", std_init=0.5)
    choices = torch.rand(2, 6)
    assert not torch.equal(played._worth(choices), played._worth(choices))
    assert torch.equal(agent()._worth(choices), agent()._worth(choices))


def test_the_divergence_counts_once_in_all_that_is_kept(tmp_path: Path, monkeypatch: Any) -> None:
    """The mushrooms in the buffer, and the images of one part."""
    counted = list[int]()

    def told(make: Any) -> Any:
        return lambda *args, **kwargs: (counted.append(kwargs["num_data"]), make(*args, **kwargs))[1]

    monkeypatch.setattr(bandit, "backprop", told(bandit.backprop))
    agent("thompson", buffer=300)
    monkeypatch.setattr(incremental, "learner", told(incremental.learner))
    incremental.learn(unit(incremental.MNIST, "ffg", net="mlp-4", epochs=1), "cpu", tmp_path, QUIET)
    assert counted == [300, 1437 // 3]


@pytest.mark.parametrize("method", ["thompson", "greedy-5"])
def test_resumed_agent_has_the_same_regret(tmp_path: Path, monkeypatch: Any, method: str) -> None:
    asked = unit(bandit.BANDIT, method, epochs=3, interactions=8)
    whole = bandit.play(asked, "cpu", tmp_path / "whole", QUIET)
    again = killed(bandit.play, asked, tmp_path / "killed", bandit.Agent, "meet", 20, monkeypatch)
    assert again == whole
    assert whole.n == 24


def test_trials_meet_mushrooms_that_no_run_meets() -> None:
    run, tried = unit(bandit.BANDIT, "greedy"), trial(bandit.BANDIT, "greedy")
    met, others = (bandit._mushrooms(each, "cpu") for each in (run, tried))
    assert (len(met), len(others)) == (1150, 287)
    digits = data.load("digits").train
    both = torch.cat([met.x, others.x])
    assert torch.equal(both.sort(0).values, digits.x.flatten(1).sort(0).values)
    assert bool(((digits.y >= 5).sum() == met.y.sum() + others.y.sum()).all())


def test_scores_by_networks_are_means_over_groups() -> None:
    torch.manual_seed(0)
    logits, y = torch.randn(7, 30, 4), torch.randint(0, 4, (30,))
    found = doubt.by_networks(logits, y, 3)
    groups = [Prediction(logits[:3]), Prediction(logits[3:6])]  # the seventh makes none
    assert found["groups"] == 2
    assert found["nll"] == pytest.approx(sum(metrics.nll(group, y) for group in groups) / 2)
    assert found["accuracy"] == pytest.approx(sum(metrics.accuracy(group.probs, y) for group in groups) / 2)


def test_images_are_turned_around_their_middle() -> None:
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(doubt.rotated(x, 180.0), x.flip(2, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(doubt.rotated(x, 90.0), x.rot90(1, (2, 3)), atol=1e-4, rtol=0)
    torch.testing.assert_close(doubt.rotated(x, 0.0), x, atol=1e-4, rtol=0)
    corner = doubt.rotated(x, 45.0)[0, 0, 0, 0]
    assert float(corner) == pytest.approx(float(x.amin()), abs=1e-4)  # from outside the image


def test_cells_of_the_bandit_are_the_papers() -> None:
    cells: list[Cell] = bandit.cells(quick=False)
    for cell in cells:
        steps = cell.config["epochs"] * cell.config["interactions"]
        keys = ("net", "buffer", "updates", "batch_size", "decision_samples")
        asked = ("mlp-100-100", 4096, 64, 64, 2)
        assert (steps, *(cell.config[key] for key in keys)) == (50_000, *asked)
