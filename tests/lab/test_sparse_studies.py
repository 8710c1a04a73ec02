"""Sparse nets: what makes them so, the nets that papers prune, and the experiments on them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import posterity
from posterity import DiagonalGaussian, LogUniform, prune
from posterity.compress import point_mass
from posterity_lab import baselines, data, nets, prunable
from posterity_lab.baselines import gates
from posterity_lab.baselines.sparse import kl_factor, without_zeros
from posterity_lab.data import Split
from posterity_lab.methods import Method
from posterity_lab.reproduce import artefact, records, sparse, sparse_groups, sparse_vgg, training
from posterity_lab.reproduce.groups import Group
from posterity_lab.reproduce.learners import learner, scale_lr
from posterity_lab.reproduce.sparse_views import _architecture, _layers, _ratio, _times
from posterity_lab.reproduce.study import Study, Unit

QUIET = lambda done, total, what: None  # noqa: E731
METHODS = ["sparse-vd", "sparse-ard", "magnitude", "l0"]


def unit(method: str, study: Study = sparse.LENET, setting: str = "32-24", **config: Any) -> Unit:
    cell = next(each for each in study.cells(True) if (each.setting, each.method) == (setting, method))
    return Unit(study.name, setting, method, 0, {**cell.config, **config}, "as it is")


def begun(method: str, **config: Any) -> tuple[Method, Split]:
    asked = unit(method, **config)
    train = training.prepared(asked, "cpu").train
    return training.begun(method, asked.config, train, 10, "cpu", 0), train


def test_biases_and_batch_norm_are_not_drawn() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    how = {"num_data": 8, "lr": 1e-3, "std_init": 0.01}
    method = baselines.variational_dropout(net, prior=LogUniform(), **how)
    assert sorted(method.posterior().mean()) == ["0.weight", "3.weight"]


def test_the_kl_counts_nothing_at_first_and_then_more_and_more() -> None:
    config = next(
        c.config for c in sparse.lenet_cells(False) if (c.setting, c.method) == ("300-100", "sparse-vd")
    )
    steps = 600 * config["epochs"]
    factor = kl_factor(config["kl_factor"], steps, config["kl_delay"], config["kl_rise"])
    assert callable(factor)
    assert [factor(600 * epoch) for epoch in (0, 5, 20, 200)] == [0.0, 0.0, 1.0, 1.0]
    assert factor(7500) == pytest.approx(0.5)
    asked = dict[str, Any]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "posterity_lab.baselines.sparse.compile_step", lambda *given, **how: asked.update(how)
        )
        begun("sparse-vd", kl_delay=0.5, kl_rise=0.1)
    whole = 15 * unit("sparse-vd").config["epochs"]
    assert [asked["factor"](step) for step in (0, whole // 2, whole)] == [0.0, 0.0, 1.0]
    assert kl_factor(2.0, whole, 0.5, 0.1)(whole) == 2.0  # type: ignore[operator]


def test_magnitudes_go_until_the_share_is_reached_and_stay_at_zero() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    method = baselines.magnitudes(net, lr=0.01, keep=0.1, steps=40)
    x, y = torch.randn(16, 10), torch.randint(0, 5, (16,))
    left = list[int]()
    for _ in range(40):
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        method.step(x, y)
        left.append(sum(int(p.count_nonzero()) for p in net.parameters() if p.dim() > 1))
        if len(left) > 30:
            assert all(
                bool((p[before[name] == 0] == 0).all()) for name, p in net.named_parameters() if p.dim() > 1
            )
    assert left[8] == 300  # a quarter of the steps has passed after ten
    assert left == sorted(left, reverse=True)
    assert left[19] == 300 - round(270 * (1 - 0.5**3))  # halfway: 1 − (1 − ½)³ of what goes
    assert left[29:] == [30] * 11
    assert all(bool((p != 0).all()) for p in net.parameters() if p.dim() == 1)
    assert sum(int(kept.sum()) for name, kept in method.pruned()[1].kept().items() if "weight" in name) == 30


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", [*METHODS, "gnj", "ghs"])
def test_a_captured_step_reads_the_learning_rate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = unit(name, sparse.LENET if name in METHODS else sparse_groups.GROUPS)
    train = training.prepared(asked, "cuda").train
    method = training.begun(name, asked.config, train, 10, "cuda", 0)

    def moved(factor: float) -> float:
        scale_lr(method, factor)
        before = [p.detach().clone() for p in method.model.parameters()]
        method.step(train.x[:9], train.y[:9])
        pairs = zip(before, method.model.parameters(), strict=True)
        return max(float((a - b).detach().abs().max()) for a, b in pairs)

    assert all(moved(factor) > 0.0 for factor in (1.0, 1.0, 1.0, 0.5))
    monkeypatch.setattr(torch.cuda, "graph", None)  # nothing is captured from here on
    assert moved(0.0) == 0.0
    assert 0.0 < moved(1e-3) < moved(1.0)


def test_the_largest_weights_are_those_that_stay() -> None:
    net = nn.Linear(3, 2, bias=False)
    method = baselines.magnitudes(net, lr=1e-9, keep=0.5, steps=1, begin=0.0, end=0.0)
    net.weight.data = torch.tensor([[1.0, -5.0, 0.1], [0.2, -0.3, 4.0]])
    method.step(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    assert (net.weight != 0).tolist() == [[True, True, False], [False, False, True]]


def gated(layer: nn.Module) -> gates.Gated:
    torch.manual_seed(0)
    made = gates.Gated(layer, 0.5)  # type: ignore[arg-type]
    made.log_a.data = torch.linspace(-4.0, 4.0, len(made.log_a))
    return made


@pytest.mark.parametrize(("layer", "each"), [(nn.Linear(6, 5), 5), (nn.Conv2d(3, 6, 2), 12)])
def test_gates_are_open_as_often_as_expected(layer: nn.Module, each: int) -> None:
    made, draws = gated(layer), 20_000
    drawn = made._gates(draws).detach()
    share = (drawn > 0).double().mean(0)
    expected = torch.sigmoid(made.log_a.detach() - 2 / 3 * math.log(0.1 / 1.1)).double()
    assert bool(((share - expected).abs() < 5 * (expected * (1 - expected) / draws).sqrt() + 1e-4).all())
    assert made.expected().item() == pytest.approx(each * float(expected.sum()))
    assert 0.0 < float((drawn == 1.0).double().mean()) < 1.0  # exactly open, too


@pytest.mark.parametrize("start", ["linear", "conv"])
def test_the_net_without_gates_is_the_one_with_them(start: str) -> None:
    torch.manual_seed(0)
    conv = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)]
    net = nn.Sequential(*(conv if start == "conv" else [nn.Flatten(), nn.Linear(64, 5)]))
    method = baselines.l0(net, strength=0.1, num_data=8, lr=1e-3)
    for each in method.model.modules():
        if isinstance(each, gates.Gated):
            each.log_a.data.uniform_(-4.0, 4.0)
    x = torch.randn(3, 1, 8, 8)
    plain, posterior = method.pruned()
    method.model.eval()
    torch.testing.assert_close(plain(x), method.model(x))
    assert (
        0
        < sum(int(kept.sum()) for kept in posterior.kept().values())
        < sum(p.numel() for p in net.parameters())
    )
    names = dict(net.named_parameters()).keys()
    assert posterior.kept().keys() == names


def test_l0_loss_counts_the_expected_number_of_open_gates(monkeypatch: Any) -> None:
    torch.manual_seed(0)
    method = baselines.l0(
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), strength=5.0, num_data=10, lr=0.1
    )
    monkeypatch.setattr(gates.Gated, "_gates", lambda self, examples: torch.ones(examples, len(self.log_a)))
    x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
    price = 0.5 * sum(each.expected().item() for each in method.model if isinstance(each, gates.Gated))
    plain = cross_entropy(method.model(x), y).item()
    assert method.step(x, y).item() == pytest.approx(plain + price)


def test_nets_that_papers_prune_have_their_sizes() -> None:
    net = nets.build("lenet5-caffe", [1, 28, 28], 10)
    shapes = [tuple(p.shape) for p in net.parameters() if p.dim() > 1]
    assert shapes == [(20, 1, 5, 5), (50, 20, 5, 5), (500, 800), (10, 500)]
    assert [type(layer) for layer in net if not list(layer.parameters())] == [
        *(nn.MaxPool2d, nn.MaxPool2d, nn.Flatten),
        nn.ReLU,
    ]
    vgg = nets.build("vgglike-0.5", [3, 32, 32], 10)
    widths = [layer.out_channels for layer in vgg if isinstance(layer, nn.Conv2d)]
    assert widths == [32, 32, 64, 64, 128, 128, 128, *[256] * 6]
    assert [tuple(layer.weight.shape) for layer in vgg if isinstance(layer, nn.Linear)] == [
        (256, 256),
        (10, 256),
    ]
    assert sum(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) for layer in vgg) == 14
    dropping = nets.build("vgglike-0.25-dropout", [3, 32, 32], 10)
    assert [layer.p for layer in dropping if isinstance(layer, nn.Dropout)] == [0.3, *[0.4] * 7, 0.5, 0.5]
    assert not any(isinstance(layer, nn.Dropout) for layer in vgg)
    assert dropping(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    first = nets.build("vgglike", [3, 32, 32], 10)[0]
    assert isinstance(first, nn.Conv2d)
    assert first.out_channels == 64


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: nets.recipe("vgglike-wide"),
            "there is no net 'vgglike-wide': name one like vgglike, vgglike-0.5",
        ),
        (lambda: nets.recipe("vgglike-1-2"), "there is no net 'vgglike-1-2'"),
        (lambda: nets.build("vgglike-0.001", [3, 32, 32], 10), "a width of 0.001 leaves layers"),
        (lambda: nets.build("vgglike", [3, 28, 28], 10), "at least 32x32 pixels, not 28x28"),
        (lambda: prunable.lenet5_caffe(1, 15, 10), "at least 16x16 pixels, not 15x15"),
        (
            lambda: baselines.magnitudes(nn.Linear(2, 2), lr=0.1, keep=0.0, steps=4),
            "greater than 0 and at most 1",
        ),
        (lambda: baselines.l0(nn.Sequential(), strength=-1.0, num_data=1, lr=0.1), "at least 0, not -1"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_weights_begin_as_the_authors_have_them() -> None:
    net = nets.build("lenet5-caffe", [1, 28, 28], 10)
    generator = torch.get_rng_state()
    prunable.narrow(net, 0.01, seed=0)
    assert torch.equal(torch.get_rng_state(), generator)
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    large = parameters["5.weight"]
    assert float(large.std()) == pytest.approx(0.01, rel=5 / math.sqrt(2 * large.numel()))
    conv, reach = parameters["2.weight"], math.sqrt(6 / (25 * 20 + 25 * 50))
    assert 0.99 * reach < float(conv.abs().max()) <= reach
    assert all(bool((p == 0).all()) for name, p in parameters.items() if name.endswith("bias"))


def test_images_are_less_the_mean_of_those_that_are_trained_on() -> None:
    digits = data.load("digits")
    ready = training.ready(digits, sparse.base(quick=True))
    scale = 255 / 256
    torch.testing.assert_close(ready.train.x.mean(0), torch.zeros(1, 8, 8), atol=1e-5, rtol=0)
    expected = scale * (digits.test.x - digits.train.x.mean(0))
    torch.testing.assert_close(ready.test.x, expected, atol=1e-5, rtol=0)


def test_random_labels_say_nothing_and_the_test_keeps_its_own() -> None:
    asked = unit("adam", sparse.LABELS)
    ready, digits = training.prepared(asked, "cpu"), data.load("digits")
    same = (ready.train.y == digits.train.y).double().mean()
    assert abs(float(same) - 0.1) < 5 * math.sqrt(0.09 / len(digits.train))
    assert torch.equal(ready.test.y, digits.test.y)
    assert torch.equal(training.prepared(asked, "cpu").train.y, ready.train.y)


def test_random_labels_leave_no_weight(tmp_path: Path) -> None:
    asked = unit("sparse-vd", sparse.LABELS)
    found = sparse.train(asked, "cpu", tmp_path, QUIET).metrics
    assert sum(found["kept"].values()) == 0
    assert found["compression"] == found["weights"]
    assert found["train_accuracy"] < 0.2
    record = {"metrics": found, "config": asked.config}
    assert _times(Group("32-24", "sparse-vd", [record], 0, "–")) == "nothing stays"


RESUMED = {
    **dict.fromkeys(METHODS, (sparse.train, sparse.LENET, "32-24")),
    "gnj": (sparse_groups.train, sparse_groups.GROUPS, "32-24 bounded"),
    "ghs": (sparse_groups.train, sparse_groups.GROUPS, "32-24 bounded"),
}


@pytest.mark.parametrize("method", RESUMED)
def test_a_net_that_was_killed_is_pruned_to_the_same_numbers(tmp_path: Path, method: str) -> None:
    train, study, setting = RESUMED[method]
    asked = unit(method, study, setting, epochs=4)

    def kill(done: int, total: int, what: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    whole = train(asked, "cpu", tmp_path / "whole", QUIET)
    with pytest.raises(KeyboardInterrupt):
        train(asked, "cpu", tmp_path / "killed", kill)
    again = train(asked, "cpu", tmp_path / "killed", QUIET)
    timed = ("before", "after")
    found, wanted = ({k: v for k, v in each.metrics.items() if k not in timed} for each in (again, whole))
    assert found == wanted


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_digits_with_few_weights(tmp_path: Path, method: str) -> None:
    more = {"strength": 1.0, "lr": 0.03} if method == "l0" else {}
    found = sparse.train(unit(method, epochs=20, **more), "cpu", tmp_path, QUIET).metrics
    assert found["accuracy"] > 0.9
    assert found["compression"] > (1.3 if method == "l0" else 2.5)
    assert found["weights"] == 64 * 32 + 32 * 24 + 24 * 10  # no bias
    assert found["compression"] == found["weights"] / sum(found["kept"].values())


def test_the_trial_that_removes_most_within_the_limit_is_taken(tmp_path: Path) -> None:
    free = sparse.train(unit("magnitude", keep=0.1, limit=1.0), "cpu", tmp_path / "free", QUIET).metrics
    bound = sparse.train(unit("magnitude", keep=0.1, limit=0.0), "cpu", tmp_path / "bound", QUIET).metrics
    assert free["removed_within_limit"] == pytest.approx(0.9, abs=1e-3)
    assert bound["removed_within_limit"] == -bound["error"] < 0
    for cell in sparse.lenet_cells(False):
        assert cell.config["limit"] == {"300": 0.0192, "len": 0.0075}[cell.setting[:3]]
        assert bool(cell.grid) == cell.setting.endswith(sparse.CHOSEN)
        assert len(cell.grid) in (0, 5)
        for tried in records.trials(sparse.LENET, cell):
            assert tried.config["epochs"] == 60


def test_the_settings_are_the_papers() -> None:
    cells = {c.setting: c.config for c in sparse.lenet_cells(False) if c.method == "sparse-vd"}
    for setting, decay in (("300-100", 0.5), ("lenet5", 0.0)):
        config = cells[setting]
        assert 2 * math.log(config["std_init"]) == pytest.approx(-10, abs=1e-3)
        asked = {"batch_size": 100, "epochs": 200, "lr": 1e-3, "mean_std": 0.01, "kl_factor": 1.0}
        assert asked.items() <= config.items()
        assert config["decay_from"] == decay
        assert training.lr_factor(config, 199) == pytest.approx(0.5 / (200 * (1 - decay)))
        assert training.lr_factor(config, 0) == pytest.approx(1.0, abs=0.003)


def test_pictures_show_what_stays() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(300, 120), nn.Linear(120, 2))
    net[0].weight.data[1] = 0.0
    net[2].weight.data[:, 150] = 0.0
    seen = sparse.picture(net, without_zeros(net))
    assert seen["kernels"][0] == [round(value, 3) for value in net[0].weight[0].flatten().tolist()]
    assert seen["kernels"][1] == [0.0] * 9
    assert len(seen["patch"]) == len(seen["patch"][0]) == 100
    assert [row[50] for row in seen["patch"]] == ["0"] * 100  # of columns 100 to 199
    assert sum(row.count("0") for row in seen["patch"]) == 100
    mlp = nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 2))
    mlp[0].weight.data[:3, 5] = 0.0
    assert sparse.picture(mlp, without_zeros(mlp))["pixels"] == [4, 4, 4, 4, 4, 1, 4, 4, 4]


def test_a_picture_is_kept_of_the_start_and_of_some_epochs(tmp_path: Path) -> None:
    asked = unit("sparse-vd", epochs=20)
    found = sparse.train(asked, "cpu", tmp_path, QUIET).metrics
    assert [each["epoch"] for each in found["curve"] if "picture" in each] == [1, 2, 3, 4, 6, 10, 20]
    assert set(found["begun"]["pixels"]) == {32}
    net = prunable.narrow(nets.build("mlp-32-24", [1, 8, 8], 10), asked.config["mean_std"], 0)
    assert sparse.picture(net, point_mass(net)) == found["begun"]


def test_removed_shares_are_shown_by_layer() -> None:
    runs = [
        {"metrics": {"sizes": {"a": 100, "b": 10}, "kept": {"a": kept, "b": 5}, "weights": 110}, "config": {}}
        for kept in (1, 3)
    ]
    group = Group("300-100", "sparse-vd", runs, 0, "–")
    assert _layers(group) == "98.0 – 50.0"


def test_the_learner_has_the_prior_of_its_name() -> None:
    config = {**unit("sparse-vd").config}
    kinds = {"sparse-vd": posterity.LogUniform, "sparse-ard": posterity.ARD}
    kinds |= {"gnj": posterity.GroupNormalJeffreys, "ghs": posterity.GroupHorseshoe}
    for method, kind in kinds.items():
        made = learner(method, config, nets.mlp(4, [3], 2), num_data=10, seed=0)
        assert isinstance(made.model.prior, kind)
        assert method in ("gnj", "ghs") or float(made.posterior().std()["1.weight"].mean()) == pytest.approx(
            config["std_init"]
        )


def test_shrunk_net_is_counted_tested_and_timed() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3)
    )
    with torch.no_grad():
        net[3].weight[:, :4] = 0.0  # the first map is not used, and some of the second
        net[3].weight[:, 5] = 0.0
        net[5].weight[:, 2:] = 0.0  # four hidden units are not used
    test = Split(torch.randn(50, 1, 4, 4), torch.randint(0, 3, (50,)))
    kept = {
        name: p != 0 if p.dim() > 1 else torch.ones_like(p, dtype=torch.bool)
        for name, p in net.named_parameters()
    }
    leaves = {
        name: DiagonalGaussian(p.detach(), 0.01).pruned(kept[name])
        for name, p in net.named_parameters()
        if p.dim() > 1
    }
    found = sparse_groups.smaller(net, posterity.Factorised(leaves), test, 0.01)
    assert found["architecture"] == [3, 11, 2]
    left = 3 * 9 + 2 * 11 + 3 * 2
    assert found["by_pruning"] == pytest.approx((36 + 96 + 18) / left)
    error = float((net(test.x).argmax(-1) != test.y).double().mean())
    assert found["error_small"] == pytest.approx(error)
    bits = found["bits"].values()
    spent = sum(each * size for each, size in zip(bits, (27, 22, 6), strict=True))
    assert found["by_bits"] == pytest.approx(32 * 150 / spent)
    assert found["after"]["bytes"] < found["before"]["bytes"]
    assert found["refused"] is None


@pytest.mark.parametrize("method", METHODS)
def test_a_pruned_net_is_read_as_it_was_left(tmp_path: Path, method: str) -> None:
    """With biases, of which the posterior may say nothing."""
    asked = unit(method, epochs=3)
    found = sparse.train(asked, "cpu", tmp_path, QUIET).metrics
    again, net, posterior, test = artefact.read(tmp_path, "cpu")
    assert again == asked
    assert posterior.mean().keys() == dict(net.named_parameters()).keys()
    assert sparse.weights(posterior) == found["kept"]
    for error in (
        float((net(test.x).argmax(-1) != test.y).double().mean()),
        1.0
        - posterity.metrics.accuracy(posterity.predict(net, posterior, test.x, mode="mean").probs, test.y),
    ):
        assert error == pytest.approx(found["error"])


def test_the_error_after_rounding_is_that_of_the_rounded_net() -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 5, bias=False)
    test = Split(torch.randn(400, 8), torch.randint(0, 5, (400,)))
    rough = posterity.Factorised({"weight": DiagonalGaussian(net.weight.detach(), 0.5)})
    found = sparse_groups.smaller(
        nn.Sequential(net), posterity.Factorised({"0.weight": rough.block("weight")}), test, 0.01
    )
    rounded = 0.5 * (net.weight / 0.5).round()
    assert found["error_rounded"] == pytest.approx(
        float(((test.x @ rounded.T).argmax(-1) != test.y).double().mean())
    )
    assert found["error_rounded"] != found["error_small"]


def test_groups_go_as_far_as_training_images_allow(tmp_path: Path) -> None:
    net, train = nn.Linear(3, 3, bias=False), Split(torch.eye(3), torch.arange(3))
    means = torch.diag(torch.tensor([10.0, 10.0, 1.0]))
    posterior = posterity.Factorised({"weight": DiagonalGaussian(means, 1.0)})
    cuts = [3.0, -1.0, -4.0, -9.0]  # log α: 0 of the last, -4.6 of the others
    for rise, cut in ((0.0, 3.0), (0.4, -4.0), (0.7, -9.0)):
        found, left = sparse_groups.in_one(net, posterior, train, cuts, rise)
        assert found == cut
        assert torch.equal(left.mean()["weight"], prune(posterior, log_alpha=cut).mean()["weight"])
    asked = unit("gnj", sparse_groups.GROUPS, epochs=2)
    found = sparse_groups.train(asked, "cpu", tmp_path, QUIET).metrics
    assert found["log_alpha"] in asked.config["cuts"]


def test_every_layer_is_cut_with_its_share_of_the_error() -> None:
    """Of four images none may be lost, or one by each layer."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    train = Split(torch.eye(4), torch.arange(4))
    means = {"0.weight": torch.tensor([20.0, 20, 20, 5]), "1.weight": torch.tensor([10.0, 10, 1, 10])}
    leaves = {name: DiagonalGaussian(torch.diag(mean), 1.0) for name, mean in means.items()}
    cuts = [3.0, -1.0, -4.0, -5.5, -9.0]
    for rise, found in ((0.0, (-1.0, 3.0)), (0.52, (-5.5, -4.0))):
        chosen, left = sparse_groups.by_layer(net, posterity.Factorised(leaves), train, cuts, rise)
        assert (chosen["0.weight"], chosen["1.weight"]) == found
        for name, cut in chosen.items():
            alone = prune(posterity.Factorised(leaves), log_alpha=cut)
            assert torch.equal(left.mean()[name], alone.mean()[name])


@pytest.mark.parametrize("method", ["gnj", "ghs", "sparse-vd"])
def test_stds_stay_below_their_bound(method: str) -> None:
    """Given their scales; those of other layers grow beyond it."""
    config = {**unit("gnj", sparse_groups.GROUPS).config, "kl_rise": 0.0, "kl_factor": 10.0, "lr": 0.3}
    made = learner(method, config | {"max_stds": {"1.weight": 0.2}}, nets.mlp(4, [3], 2), num_data=9, seed=0)
    for _ in range(40):
        made.step(torch.randn(9, 4), torch.zeros(9, dtype=torch.long))
    blocks = made.model.posterior.blocks
    stds = {name: nn.functional.softplus(leaf.raw.detach()) for name, leaf in blocks.items()}
    assert float(stds["1.weight"].amax()) == pytest.approx(0.2)
    assert float(stds["3.weight"].amax()) > 0.5


def test_bounded_groups_are_learned_as_their_authors_do() -> None:
    cells = {(cell.setting, cell.method): cell.config for cell in sparse_groups.cells(False)}
    for method in ("gnj", "ghs"):
        assert cells["300-100 bounded", method]["max_stds"] == {"1.weight": 0.2}
        assert cells["lenet5 bounded", method]["max_stds"] == {"0.weight": 0.5}
    for setting, name in (("300-100", "1.weight"), ("lenet5", "0.weight")):
        net = nets.build(cells[f"{setting} bounded", "gnj"]["net"], [1, 28, 28], 10)
        assert next(iter(dict(net.named_parameters()))) == name
    asked = unit("gnj", sparse_groups.GROUPS, setting="32-24 bounded")
    x = training.prepared(asked, "cpu").train.x
    assert (float(x.min()), float(x.max())) == (-1.0, 1.0)


def test_of_a_net_with_an_empty_layer_nothing_is_left_to_measure() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    nn.init.zeros_(net[2].weight)
    found = sparse_groups.smaller(
        net, without_zeros(net), Split(torch.randn(5, 4), torch.zeros(5).long()), 0.01
    )
    assert found["architecture"] == []
    assert "nothing is left" in found["refused"]
    group = Group("300-100", "gnj", [{"metrics": found, "config": {}}], 0, "–")
    assert (_architecture(group), _ratio(group, "by_pruning")) == ("nothing stays", "–")


def test_a_sparse_vgg_begins_with_the_weights_of_the_dense_one(tmp_path: Path, monkeypatch: Any) -> None:
    seen: dict[str, Any] = {}
    make = training.learner

    def spied(method: str, config: Any, model: nn.Module, **how: Any) -> Any:
        seen[method] = model, [p.detach().clone() for p in model.state_dict().values()]
        return make(method, config, model, **how)

    monkeypatch.setattr(training, "learner", spied)
    found = sparse_vgg.train(
        unit("sparse-vd", sparse_vgg.VGG, "small", epochs=1, dense_epochs=1), "cpu", tmp_path, QUIET
    )
    dense, (sparse_net, begun_with) = seen["adam"][0], seen["sparse-vd"]
    assert any(isinstance(layer, nn.Dropout) for layer in dense)
    assert not any(isinstance(layer, nn.Dropout) for layer in sparse_net)
    for trained, value in zip(dense.state_dict().values(), begun_with, strict=True):
        assert torch.equal(trained, value)
    assert [each["fraction"] for each in found.metrics["dense"]] == list(sparse_vgg.FRACTIONS)
    assert found.metrics["curves"] is None
    first = found.metrics["dense"][0]
    assert first["weights"] == first["outputs"]
