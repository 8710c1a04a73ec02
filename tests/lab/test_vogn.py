"""The VOGN paper's experiments: how nets are scored, schedules, and VOGN that hands its posterior on."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import posterity
from posterity import IVON, MCDropout, predict
from posterity_lab import baselines, data
from posterity_lab.baselines.handed import vogn_told
from posterity_lab.data import Dataset, Split
from posterity_lab.errors import error_auroc
from posterity_lab.files import DataError
from posterity_lab.reproduce import EXPERIMENTS, calibration, learners, toy, training
from posterity_lab.reproduce.learners import learner
from posterity_lab.reproduce.study import Cell, Unit

CELLS = {(cell.setting, cell.method): cell for cell in calibration.cells(quick=False)}
QUIET = lambda done, total, what: None  # noqa: E731


def quick(method: str, setting: str = "digits", **config: Any) -> Unit:
    cells = {(cell.setting, cell.method): cell for cell in calibration.cells(quick=True)}
    cell = cells[setting, method]
    return Unit("vogn-cifar10", setting, method, 0, {**cell.config, "epochs": 1, **config}, "")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], training.Training]:
    found: dict[str, training.Training] = {}

    def get(method: str) -> training.Training:
        if method not in found:
            folder = tmp_path_factory.mktemp(method)
            found[method] = training.fit(quick(method), "cpu", folder, QUIET, lambda _: {})
        return found[method]

    return get


def test_confidence_tells_right_from_wrong_by_pairs() -> None:
    torch.manual_seed(0)
    probs, y = torch.randn(60, 4).softmax(-1), torch.randint(0, 4, (60,))
    confidence, label = probs.max(-1)
    right, wrong = confidence[label == y].tolist(), confidence[label != y].tolist()
    by_hand = sum((a > b) + 0.5 * (a == b) for a, b in product(right, wrong)) / (len(right) * len(wrong))
    assert error_auroc(probs, y) == pytest.approx(by_hand, abs=1e-6)
    with pytest.raises(ValueError, match="one of the two sets are empty"):
        error_auroc(torch.eye(3), torch.arange(3))


def test_at_full_size_the_settings_are_the_papers() -> None:
    assert EXPERIMENTS["vogn-table"].paper.keys() <= CELLS.keys()
    methods = {setting: {m for s, m in CELLS if s == setting} for setting, _ in CELLS}
    four = {"adam", "mc-dropout", "vogn", "ivon"}
    assert methods["lenet5"] == {*four, "bbb"}
    assert methods["alexnet unaugmented"] == methods["resnet18"] == four
    assert methods["alexnet"] == {*four, "kfac", "noisy-kfac"}
    asked = {
        "lenet5": (210, 128, None, 100.0, 6, 1.0, 0.1427, 4),
        "alexnet unaugmented": (161, 256, None, 0.5, 3, 1.0, 0.25, 8),  # a warm-up of our own
        "alexnet": (161, 256, True, 0.5, 3, 10.0, 0.0619, 8),
        "resnet18": (161, 256, True, 50.0, 5, 10.0, None, 8),
    }
    keys = (
        "epochs",
        "batch_size",
        "augment",
        "prior_precision",
        "mc_samples",
        "augmentation",
        "warmup",
        "parts",
    )
    for setting, values in asked.items():
        config = CELLS[setting, "vogn"].config
        assert tuple(config.get(key) for key in keys) == values
        lr = 2e-4 if setting == "lenet5" else 1e-4  # the former, and the end of its run, are our own
        assert [config[key] for key in ("lr", "momentum", "beta2", "damping")] == [lr, 0.9, 0.001, 1e-3]
        changed = {"net", "lr", "weight_decay", "prior_std", "std_init", "epochs"}
        same = {key: value for key, value in config.items() if key in CELLS[setting, "adam"].config}
        for key, value in same.items():
            assert key in changed or CELLS[setting, "adam"].config[key] == value
    drops = [epoch for epoch in range(1, 161) if _factor("vogn", epoch) < _factor("vogn", epoch - 1)]
    assert drops == [80, 120]
    drops = [
        epoch for epoch in range(1, 81) if _factor("noisy-kfac", epoch) < _factor("noisy-kfac", epoch - 1)
    ]
    assert drops == [30, 50]
    assert CELLS["lenet5", "vogn"].config["milestones"] == [0.95]


def _factor(method: str, epoch: int) -> float:
    return training.lr_factor(CELLS["alexnet", method].config, epoch)


def test_the_ablation_takes_momentum_and_batchnorm_away() -> None:
    whole, neither = (CELLS[f"resnet18{name}", "vogn"].config for name in (" whole", " neither"))
    assert whole == CELLS["resnet18", "vogn"].config
    assert {key for key in whole if whole[key] != neither[key]} == {"net", "momentum", "lr"}
    assert neither["momentum"] == 0.0
    assert neither["lr"] == pytest.approx(whole["lr"] / (1 - whole["momentum"]))  # the same pace
    shown = {(cell.setting, cell.method) for cell in EXPERIMENTS["vogn-ablation"].cells(quick=False)}
    names = (" whole", " no momentum", " no BatchNorm", " neither")
    assert shown == {(f"resnet18{name}", "vogn") for name in names}


def test_the_temperature_rises_in_a_straight_line_over_all_epochs(tmp_path: Path, monkeypatch) -> None:
    seen: list[float] = []
    step = type(learner("ivon", quick("ivon").config, nn.Linear(2, 2), num_data=8, seed=0)).step

    def spied(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.extend(group["temperature"] for group in self.optimizer.param_groups)
        return step(self, x, y)

    unit = quick("ivon", warmup_start=0.2, warmup=40 / 46, epochs=2, net="mlp-4", bfloat16=False)
    monkeypatch.setattr("posterity_lab.continual._Rule.step", spied)
    training.fit(unit, "cpu", tmp_path, QUIET, lambda _: {})
    line = [0.2 + 0.8 * min(number / 40, 1.0) for number in range(2 * 23)]  # 1437 images in batches of 64
    assert seen == pytest.approx(line)


def test_seconds_are_of_every_epoch_and_survive_a_resume(tmp_path: Path) -> None:
    def kill(done: int, total: int, what: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    unit = quick("mc-dropout", epochs=3, batch_size=360)
    whole = calibration.train(unit, "cpu", tmp_path / "whole", QUIET).metrics
    with pytest.raises(KeyboardInterrupt):
        calibration.train(unit, "cpu", tmp_path / "killed", kill)
    again = calibration.train(unit, "cpu", tmp_path / "killed", QUIET).metrics
    assert whole["epoch_seconds"] > 0
    assert {**again, "epoch_seconds": 0} == {**whole, "epoch_seconds": 0}
    assert [each["epoch"] for each in whole["curve"]] == [1, 2, 3]


def test_dropout_predicts_with_masks_and_adam_and_kfac_with_one_network(fitted: Callable) -> None:
    dropping, plain = fitted("mc-dropout"), fitted("adam")
    x = plain.test.x[:20]
    found = calibration.predictions(dropping, x)
    assert torch.equal(found.samples, predict(dropping.model, MCDropout(), x, samples=10).samples)
    assert not torch.equal(found.samples[0], found.samples[1])
    for one in (plain, fitted("kfac")):  # K-FAC has stds, and is one network nevertheless
        one.model.eval()
        drawn = calibration.predictions(one, x).samples
        assert len(drawn) == 1
        torch.testing.assert_close(drawn[0], one.model(x))


def test_a_net_of_nans_is_a_divergence(fitted: Callable, monkeypatch) -> None:
    nans = lambda *args, **kwargs: posterity.Prediction(torch.full((1, 2, 3), torch.nan))  # noqa: E731
    monkeypatch.setattr(calibration, "predict", nans)
    with pytest.raises(FloatingPointError, match="the predictions are not finite"):
        calibration.predictions(fitted("adam"), torch.zeros(2, 1, 16, 16))


def test_nll_of_a_confidently_wrong_net_is_not_capped(fitted: Callable, monkeypatch) -> None:
    asked = fitted("adam")
    logits = torch.zeros(1, len(asked.test), 10)
    logits[..., 0] = 200.0
    monkeypatch.setattr(calibration, "predict", lambda *args, **kwargs: posterity.Prediction(logits))
    wrong = float((asked.test.y != 0).double().mean())
    assert calibration._scores(asked)["nll"] == pytest.approx(200.0 * wrong)


def test_another_data_set_is_told_apart_or_said_to_be_missing(fitted: Callable, monkeypatch) -> None:
    asked = fitted("adam")
    assert calibration.outside(asked, "cpu") == {"outside": None, "outside_auroc": None}
    unit = quick("adam", outside="svhn")
    asked = training.Training(**{**vars(asked), "unit": unit})
    digits = data.load("digits")
    # Blank images that the padding makes 16 pixels wide, and which the net has never seen.
    blank = Split(torch.ones(50, 1, 8, 8), torch.zeros(50, dtype=torch.long))
    monkeypatch.setattr(training.data, "load", lambda name, device: Dataset(name, digits.train, blank, 10))
    found = calibration.outside(asked, "cpu")
    there = calibration.predictions(asked, asked.test.x).entropy
    away = calibration.predictions(asked, training.ready(Dataset("x", blank, blank, 10), unit.config).test.x)
    assert found == {"outside": "svhn", "outside_auroc": posterity.metrics.auroc(there, away.entropy)}

    def missing(name: str, device: str) -> Dataset:
        raise DataError("svhn needs a file")

    monkeypatch.setattr(training.data, "load", missing)
    assert calibration.outside(asked, "cpu") == {"outside": "svhn needs a file", "outside_auroc": None}


@pytest.mark.parametrize("method", ["vogn", "kfac", "noisy-kfac"])
def test_rules_are_given_what_the_config_says(method: str, monkeypatch) -> None:
    seen: dict[str, Any] = {}

    def rule(model: nn.Module, **given: Any) -> IVON:
        seen.update(given)
        return IVON(model, num_data=1)

    monkeypatch.setitem(learners._OSAWA, method, rule)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.LazyLinear(2))
    net(torch.zeros(2, 1, 4, 4))
    config = CELLS["alexnet", method].config
    learner(method, config, net, num_data=50_000, seed=3)
    expected = {"num_data": 50_000, "betas": (0.9, config["beta2"]), "deterministic": ["1.weight", "1.bias"]}
    expected |= {key: config[key] for key in ("lr", "prior_precision", "damping")} | {"preset": "osawa2019"}
    if method != "kfac":
        expected |= {"mc_samples": 3, "augmentation": 10.0, "seed": 3}
    if method != "vogn":
        expected |= {"factors_every": 10}
    assert seen == expected


def test_weight_decay_spares_batch_norm() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    other.load_state_dict(net.state_dict())
    method = baselines.adam(net, lr=0.01, weight_decay=0.5)
    linear = [p for layer in (other[0], other[2]) for p in layer.parameters()]
    groups = [{"params": linear, "weight_decay": 0.5}, {"params": list(other[1].parameters())}]
    adam = torch.optim.Adam(groups, lr=0.01)
    for _ in range(3):
        x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
        method.step(x, y)
        adam.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        adam.step()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_grids_survive_being_packed() -> None:
    grid = torch.rand(5, 7)
    assert (toy.unpacked(toy.packed(grid)) - grid).abs().max() <= 0.5 / 99 + 1e-6
    low, high = toy.bounds(toy.made(100).x)
    assert bool(((toy.made(100).x > low) & (toy.made(100).x < high)).all())


def told(**how: Any) -> Any:
    net = nn.Sequential(nn.Linear(3, 4, dtype=torch.float64), nn.Tanh(), nn.Linear(4, 2, dtype=torch.float64))
    torch.manual_seed(1)
    for p in net.parameters():
        nn.init.normal_(p)
    return vogn_told(net, num_data=12, lr=0.05, prior_precision=2.0, damping=0.1, **how)


def taught(seed: int) -> Split:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    return Split(x, (x[:, 0] > 0).long())


def test_the_posterior_is_handed_on() -> None:
    method = told()
    for seed in range(3):
        method.step(*vars(taught(seed)).values())
    before = [method.optimizer.state[p]["hess"].clone() for p in _params(method)]
    method.boundary(taught(0))
    for p, hess in zip(_params(method), before, strict=True):
        state = method.optimizer.state[p]
        assert torch.equal(state["prior_mean"], p)
        torch.testing.assert_close(state["known"], 12 * (hess - 0.99**3) / (1 - 0.99**3))
        assert not state["hess"].any()
        assert not state["momentum"].any()


def test_a_strength_counts_the_curvature_of_a_task_so_many_times() -> None:
    once, thrice = told(), told(strength=3.0)
    for method in (once, thrice):
        method.step(*vars(taught(0)).values())
        method.boundary(taught(0))
    for one, three in zip(_params(once), _params(thrice), strict=True):
        found, more = (method.optimizer.state[p]["known"] for method, p in ((once, one), (thrice, three)))
        torch.testing.assert_close(more, 3.0 * found)


def test_the_step_of_vogn_with_a_prior_by_hand() -> None:
    method = told()
    data = taught(0)
    for _ in range(2):
        method.step(data.x, data.y)
    method.boundary(data)
    prior = {
        p: {key: value.clone() for key, value in method.optimizer.state[p].items()} for p in _params(method)
    }
    means = [p.detach().clone() for p in _params(method)]
    method.step(data.x, data.y)
    for p, mean in zip(_params(method), means, strict=True):
        state, decay = method.optimizer.state[p], (2.0 + prior[p]["known"]) / 12
        assert torch.equal(state["known"], prior[p]["known"])
        assert torch.equal(state["prior_mean"], mean)  # at the boundary the pull is 0
        torch.testing.assert_close(
            p.detach(), mean - 0.05 * state["momentum"] / (state["hess"] + decay + 0.1)
        )
    middle = [p.detach().clone() for p in _params(method)]
    momenta = [method.optimizer.state[p]["momentum"].clone() for p in _params(method)]
    method.step(data.x, data.y)
    for p, mean, at, momentum in zip(_params(method), means, middle, momenta, strict=True):
        pull = (2.0 + prior[p]["known"]) / 12 * (at - mean)
        grad = method.optimizer.state[p]["momentum"] - 0.9 * momentum - pull
        assert pull.abs().max() > 0
        torch.testing.assert_close(grad, p.grad)


def _params(method: Any) -> list[nn.Parameter]:
    return list(method.model.parameters())


def test_vogn_that_is_told_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole, cut = told(), told()
    for method in (whole, cut):
        for seed in range(2):
            method.step(*vars(taught(seed)).values())
        method.boundary(taught(0))
        method.step(*vars(taught(5)).values())
    torch.save(cut.state_dict(), tmp_path / "state.pt")
    resumed = told()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for method in (whole, resumed):
        method.step(*vars(taught(6)).values())
        method.boundary(taught(1))
        method.step(*vars(taught(7)).values())
    for name, std in whole.posterior().std().items():
        assert torch.equal(std, resumed.posterior().std()[name])
        assert torch.equal(whole.posterior().mean()[name], resumed.posterior().mean()[name])


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"prior_precision": -1.0}, "prior_precision must be 0 or more"),
        ({"damping": -1.0}, "damping must be 0 or more"),
        ({"strength": -1.0}, "strength must be 0 or more"),
    ],
)
def test_wrong_settings_are_refused(how: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        vogn_told(nn.Linear(3, 2), num_data=12, lr=0.1, **how)


def test_every_cell_of_vogn_runs(tmp_path: Path) -> None:
    for setting in ("digits", "digits neither"):
        found = calibration.train(quick("vogn", setting), "cpu", tmp_path / setting, QUIET).metrics
        assert 0.0 <= found["accuracy"] <= 1.0
    (_, vogn) = toy.cells(quick=True)
    found = toy.draw(Unit("vogn-toy", "moons", "vogn", 0, vogn.config, ""), "cpu", tmp_path, QUIET).metrics
    assert len(found["samples"]) == 10
    # Of the second class, the lower half circle, more in the lower right than in the upper left.
    for grid in (found["mean"], found["average"], *found["samples"][:1]):
        shares = toy.unpacked(grid)
        assert shares[26:, :10].mean() > shares[:15, 31:].mean() + 0.1
    assert isinstance(vogn, Cell)
