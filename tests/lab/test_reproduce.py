"""Quick versions of all experiments, runs that are cut short, and how settings are chosen."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from posterity_lab import baselines, cli, data
from posterity_lab.data import Split
from posterity_lab.reproduce import (
    EXPERIMENTS,
    blundell,
    doubt,
    images,
    incremental,
    records,
    reproduce,
    sparse,
    tasks,
    training,
)
from posterity_lab.reproduce import driver as driving
from posterity_lab.reproduce.calibration import CALIBRATION
from posterity_lab.reproduce.learners import NAMES, learner, scale_lr
from posterity_lab.reproduce.page import write
from posterity_lab.reproduce.study import TRIAL_SEED, Cell, Outcome, Study, Unit

STUDIES = {each.study.name: each.study for each in EXPERIMENTS.values()}
CELLS = [
    (study, cell) for study in STUDIES.values() for quick in (False, True) for cell in study.cells(quick)
]
QUIET = lambda done, total, what: None  # noqa: E731


def few(name: str) -> list[Cell]:
    """Quick cells of an experiment, not of all settings: what a method does once, it does in every one."""
    return [cell for cell in EXPERIMENTS[name].cells(quick=True) if cell.setting != "16"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    for name in EXPERIMENTS:
        epochs = None if name == "bgd-theory" else 1
        reproduce(name, out=folder, quick=True, epochs=epochs, settings=[cell.setting for cell in few(name)])
    return folder


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.rglob("*.json")}


def quick_unit(study: Study, setting: str, method: str, **config: Any) -> Unit:
    cell = next(each for each in study.cells(True) if (each.setting, each.method) == (setting, method))
    return Unit(study.name, setting, method, 0, {**cell.config, **config}, "as it is")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_leaves_a_record_of_every_unit(out: Path, name: str) -> None:
    experiment, cells = EXPERIMENTS[name], few(name)
    for cell in cells:
        unit = Unit(experiment.study.name, cell.setting, cell.method, 0, cell.config, "")
        record = records.read(records.path_of(unit, out))
        assert record["config"].keys() == cell.config.keys()
        assert (record["seed"], record["device"], record["diverged"]) == (0, "cpu", None)
        assert record["n"] > 0
        assert record["seconds"] > 0
        assert len(record["environment"]["source"]) == 64
        assert "default" in record["chosen"]
        assert not (unit.cache(out) / "checkpoint.pt").exists()


def test_the_page_shows_every_experiment_that_was_run(out: Path, tmp_path: Path) -> None:
    write(out, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "It was not run yet." not in text
    for name in EXPERIMENTS:
        assert f"posterity reproduce {name} --out" in text


def test_rerun_skips_existing_records(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(out)
    for name in ("bgd-table2", "bgd-figure1", "bgd-figure4"):
        reproduce(name, out=out, quick=True, epochs=1)
    assert content(out) == before
    assert capsys.readouterr().err.count("done before") == 21


def test_units_run_at_the_same_time_find_the_same(out: Path, tmp_path: Path) -> None:
    records = reproduce("bgd-figure4", out=tmp_path, quick=True, epochs=1, jobs=2)
    alone = reproduce("bgd-figure4", out=out, quick=True, epochs=1)
    assert [record["metrics"] for record in records] == [record["metrics"] for record in alone]
    assert [record["environment"]["jobs"] for record in (*records, *alone)] == [2, 2, 2, 1, 1, 1]
    assert sorted(path.name for path in (tmp_path / "bgd-sequence").iterdir()) == sorted(
        path.name for path in (out / "bgd-sequence").iterdir()
    )


def test_experiments_share_their_trainings(out: Path) -> None:
    assert {path.name for path in (out / "bgd-cifar10").iterdir()} == {
        "lenet5-bgd-seed0.json",
        "lenet5-sgd-seed0.json",
        "lenet5-to-prune-bgd-seed0.json",
        "lenet5-to-prune-sgd-seed0.json",
    }
    assert len(list((out / "cache" / "bgd-cifar10").rglob("posterior.safetensors"))) == 4


def test_another_config_is_refused_before_anything_runs(out: Path) -> None:
    before = content(out)
    with pytest.raises(ValueError, match=r"was run with epochs = 1, not 2: move it away, or name another"):
        reproduce("bgd-figure4", out=out, quick=True, epochs=2)
    assert content(out) == before


@pytest.mark.parametrize("method", ["bgd", "bbb", "sgd"])
def test_resumed_training_has_the_same_results(tmp_path: Path, method: str) -> None:
    more = {"sgd": {"milestones": [0.5]}, "bgd": {"passes": 8}}.get(method, {})
    unit = quick_unit(images.MNIST, "16", method, epochs=4, **more)

    def kill(done: int, total: int, what: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    whole = images.train(unit, "cpu", tmp_path / "whole", QUIET)
    with pytest.raises(KeyboardInterrupt):
        images.train(unit, "cpu", tmp_path / "killed", kill)
    seen: list[int] = []
    again = images.train(unit, "cpu", tmp_path / "killed", lambda done, *rest: seen.append(done))
    assert seen == [4]
    assert again.metrics == whole.metrics


def test_few_epochs_count_as_often_as_many_at_the_same_pace(tmp_path: Path, monkeypatch) -> None:
    seen: list[tuple[float, float]] = []
    make = training.learner

    def spied(*args: Any, **kwargs: Any) -> Any:
        method = make(*args, **kwargs)
        step, groups = method.step, method.optimizer.param_groups

        def told(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen.extend((group["lr"], group["temperature"]) for group in groups)
            return step(x, y)

        method.step = told
        return method

    monkeypatch.setattr(training, "learner", spied)
    unit = quick_unit(images.MNIST, "16", "bgd", epochs=3, passes=9, lr=0.5)
    training.fit(unit, "cpu", tmp_path, QUIET, lambda _: {})
    counts = [1.0 / temperature for _, temperature in seen]
    steps = len(seen) // 3
    assert sum(counts) / steps == pytest.approx(9)
    assert counts[0] < counts[steps] < counts[-1]
    assert {lr / temperature for lr, temperature in seen} == {0.5}


def test_a_unit_killed_in_the_middle_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = {"out": tmp_path, "quick": True, "methods": ["sgd"], "settings": ["24"]}
    make = tasks.learner
    steps = 0

    def mortal(*args: Any, **kwargs: Any) -> Any:
        method = make(*args, **kwargs)
        step = method.step

        def counted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            nonlocal steps
            steps += 1
            if steps == 100:
                raise KeyboardInterrupt
            return step(x, y)

        method.step = counted
        return method

    monkeypatch.setattr(tasks, "learner", mortal)
    with pytest.raises(KeyboardInterrupt):
        reproduce("bgd-figure1", **ask)
    assert not content(tmp_path)
    (killed,) = reproduce("bgd-figure1", **ask)
    assert killed["resumed"]
    monkeypatch.undo()
    (whole,) = reproduce("bgd-figure1", **{**ask, "out": tmp_path / "whole"})
    assert not whole["resumed"]
    assert killed["metrics"] == whole["metrics"]


def test_a_run_that_diverges_is_recorded_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("16", "sgd", {**quick_unit(images.MNIST, "16", "sgd").config, "lr": 1e12})
    study = Study("bgd-mnist", lambda quick: [cell], images.train)
    told = driving._Told(driving.Console(quiet=True))
    unit = Unit(study.name, "16", "sgd", 0, cell.config, "")
    record = driving._run(study, unit, tmp_path, "cpu", told, jobs=1)
    assert "not finite" in record["diverged"]
    assert record["metrics"] == {}
    assert records.found(unit, tmp_path) == record


def test_tuning_runs_the_grid_and_the_experiment_takes_its_best(tmp_path: Path) -> None:
    ask = {"out": tmp_path, "quick": True, "methods": ["sgd"], "settings": ["16"]}
    tried = reproduce("bgd-table1", tune=True, **ask)
    assert [record["trial"] for record in tried] == [{"lr": lr} for lr in (0.01, 0.03, 0.1, 0.3)]
    assert {record["n"] for record in tried} == {287}
    best = max(tried, key=lambda record: record["metrics"]["accuracy"])
    (run,) = reproduce("bgd-table1", epochs=1, **ask)
    assert run["config"]["lr"] == best["trial"]["lr"]
    assert run["chosen"].endswith("the best by accuracy of 4 trials on held-out data")
    assert run["n"] == 360


def trial(lr: float, accuracy: float, diverged: str | None = None) -> dict[str, Any]:
    return {
        "setting": "400",
        "method": "sgd",
        "trial": {"lr": lr},
        "diverged": diverged,
        "metrics": {} if diverged else {"accuracy": accuracy},
    }


def test_the_choice_is_the_best_trial_that_came_to_its_end() -> None:
    cell = Cell("400", "sgd", {"lr": 1.0}, [{"lr": lr} for lr in (0.01, 0.1, 1.0, 10.0)])
    done = [trial(0.01, 0.7), trial(0.1, 0.9), trial(10.0, 0.0, "the loss is not finite")]
    values, how = records.choice(cell, done)
    assert values == {"lr": 0.1}
    assert how == "lr 0.1: the best by accuracy of 3 trials on held-out data (4 are in the grid)"
    assert records.choice(Cell("800", "sgd", {"lr": 1.0}), done) == ({}, "the default; no trials were run")
    fading = Cell("400 fading", "sgd", {"lr": 1.0}, cell.grid, tuned_as="400")
    assert records.choice(fading, done)[0] == {"lr": 0.1}
    assert records.choice(cell, done[2:])[0] == {}
    final = {**trial(1.0, 0.99), "trial": None}  # on the test set, which chooses nothing
    assert records.choice(cell, [final, *done])[0] == {"lr": 0.1}
    values, how = records.choice(cell, [trial(0.01, 0.9), *done])
    assert values == {"lr": 0.01}
    assert how == "lr 0.01: the first of 2 that are best by accuracy of 4 trials on held-out data"


def test_a_net_to_be_pruned_is_judged_after_pruning(tmp_path: Path) -> None:
    unit = quick_unit(images.MNIST, "24 to prune", "bgd", epochs=2, std_init=0.02, to_prune=0.75)
    metrics = images.train(unit, "cpu", tmp_path, QUIET).metrics
    curve = metrics["pruning"]["single"]
    pruned = curve["errors"][curve["fractions"].index(0.75)]
    assert curve["unpruned"] < pruned < curve["errors"][-1]
    assert metrics["pruned_accuracy"] == 1.0 - pruned


def test_methods_that_are_compared_have_as_many_trials_each() -> None:
    prune = [cell for _, cell in CELLS if cell.setting.endswith("to prune")]
    streams = [cell for study, cell in CELLS if study.name in ("bgd-permuted", "vogn-permuted")]
    assert {len(cell.grid) for cell in prune + streams} == {4}
    assert {cell.score for cell in prune} == {"pruned_accuracy"}
    assert {cell.score for cell in streams} == {"accuracy"}


def test_no_trial_sees_the_test_set() -> None:
    for study, cell in CELLS:
        for unit in records.trials(study, cell):
            assert unit.config["held_out"] > 0
            assert unit.config.get("tested_on", "held-out images") == "held-out images"
            assert unit.seed not in study.seeds
    digits = data.load("digits")
    config = {"held_out": 287, "tested_on": "held-out images"}
    kept, held_out = training.splits(digits, config)
    assert (len(kept), len(held_out)) == (1150, 287)
    both = torch.cat([kept.x, held_out.x]).flatten(1)
    assert torch.equal(both.sort(0).values, digits.train.x.flatten(1).sort(0).values)
    again, test = training.splits(digits, {**config, "tested_on": "test"})
    assert torch.equal(again.x, kept.x)
    assert test is digits.test


def trial_unit(study: Study, setting: str, method: str, **config: Any) -> Unit:
    cell = next(each for each in study.cells(True) if (each.setting, each.method) == (setting, method))
    first = records.trials(study, cell)[0]
    return replace(first, config={**first.config, "epochs": 1, **config})


TRIALS = [
    (images.MNIST, "16", "sgd"),
    (tasks.PERMUTED, "24", "sgd"),
    (tasks.SEQUENCE, "sequence", "sgd"),
    (CALIBRATION, "digits", "adam"),
    (blundell.BLUNDELL, "24", "bbb-mixture"),
    (incremental.MNIST, "digits", "fine-tuning"),
    (incremental.PRETRAINED, "pretrained", "ffg-laplace"),
    (doubt.DOUBT, "digits", "ffg"),
    (sparse.LENET, "32-24 chosen", "magnitude"),
]


class Untouchable:
    """In place of a test set: whatever asks anything of it raises."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the test set was touched: {name}")

    def __len__(self) -> int:
        raise AssertionError("the test set was counted")


@pytest.mark.parametrize(("study", "setting", "method"), TRIALS)
def test_trials_are_given_no_test_set(
    study: Study, setting: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits, unit = data.load("digits"), trial_unit(study, setting, method)
    sealed = replace(digits, test=cast(Split, Untouchable()))
    monkeypatch.setattr(training.data, "load", lambda name, device: sealed)
    found = study.run(unit, "cpu", tmp_path / "trial", QUIET)
    assert found.metrics["accuracy"] > 0
    assert found.n > 0
    config = {**unit.config, **({"tested_on": "test"} if "tested_on" in unit.config else {"held_out": 0.0})}
    run = replace(unit, trial=None, config=config)
    with pytest.raises(AssertionError, match="the test set was"):
        study.run(run, "cpu", tmp_path / "run", QUIET)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tuning_never_touches_the_test_set(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits, tried = data.load("digits"), list[Unit]()
    sealed = replace(digits, test=cast(Split, Untouchable()))
    monkeypatch.setattr(training.data, "load", lambda name, device: sealed)

    def plan(study: Study, cells: list[Cell], *rest: Any) -> list[Unit]:
        tried.extend(found := planned(study, cells, *rest))
        one_each = {(unit.setting, unit.method): unit for unit in found}
        return list(one_each.values())

    planned = driving.plan
    monkeypatch.setattr(driving, "plan", plan)
    done = reproduce(name, out=tmp_path, quick=True, tune=True, epochs=1, settings=[few(name)[0].setting])
    assert all(unit.trial is not None and unit.seed == TRIAL_SEED for unit in tried)
    assert len(done) == len({(unit.setting, unit.method) for unit in tried})
    assert not (tmp_path / "looks.jsonl").exists()


@pytest.mark.parametrize(("study", "setting", "method"), TRIALS)
def test_a_trial_that_asks_for_the_test_set_is_refused(
    study: Study, setting: str, method: str, tmp_path: Path
) -> None:
    for wrong in ({"held_out": 0}, {"tested_on": "test"}):
        unit = trial_unit(study, setting, method, **wrong)
        with pytest.raises(ValueError, match="is a trial, which is given no test set: hold out training im"):
            study.run(unit, "cpu", tmp_path, QUIET)


def test_data_of_reproductions_comes_from_one_place() -> None:
    folder = Path(training.__file__).parent
    loading = {path.name for path in folder.glob("*.py") if "data.load(" in path.read_text()}
    assert loading == {"training.py"}


def test_cells_and_their_grids_fit_together() -> None:
    for study in STUDIES.values():
        for quick in (False, True):
            cells = study.cells(quick)
            names = [Unit(study.name, cell.setting, cell.method, 0, {}, "").name for cell in cells]
            trials = [unit.name for cell in cells for unit in records.trials(study, cell)]
            assert len(set(names)) == len(names)
            assert len(set(trials)) == len(trials)
    for _, cell in CELLS:
        assert cell.method in NAMES
        if cell.grid:  # else the default could not be chosen
            default = {key: cell.config[key] for key in cell.grid[0]}
            assert default in [dict(values) for values in cell.grid]


@pytest.mark.parametrize(
    ("name", "epochs", "batch_size", "settings"),
    [
        ("bgd-table1", 600, 128, {"400", "800", "1200"}),
        ("bbb-table1", 600, 128, {"400", "800", "1200"}),
        ("bgd-figure1", 10, 128, {"200", "400", "1000", "2000"}),
        ("bgd-figure3", 400, 128, {"vgg11", "vgg11-bn"}),
        ("bgd-figure4", 150, 256, {"sequence"}),
    ],
)
def test_at_full_size_the_settings_are_the_papers(
    name: str, epochs: int, batch_size: int, settings: set[str]
) -> None:
    cells = EXPERIMENTS[name].cells(quick=False)
    assert {cell.setting for cell in cells if "fading" not in cell.setting} == settings
    assert {(cell.config["epochs"], cell.config["batch_size"]) for cell in cells} == {(epochs, batch_size)}
    assert {cell.config["mc_samples"] for cell in cells if cell.method == "bgd"} <= {10}
    papers = {(cell.setting, cell.method) for cell in cells}
    assert EXPERIMENTS[name].paper.keys() <= papers


def test_crops_are_windows_of_the_image_and_half_are_mirrored() -> None:
    x = torch.rand(40, 1, 8, 8) + 0.1
    split = Split(x, torch.arange(40))
    config = {"augment": True, "batch_size": 16}
    seen = list(training.batches(split, config, seed=0, epoch=0))
    assert [len(y) for _, y in seen] == [16, 16, 8]
    larger = nn.functional.pad(x, [4, 4, 4, 4])
    mirrored = 0
    for image, label in ((each, int(y)) for batch, ys in seen for each, y in zip(batch, ys, strict=True)):
        windows = larger[label].unfold(1, 8, 1).unfold(2, 8, 1).flatten(1, 2)[0]
        straight = bool((windows == image).flatten(1).all(1).any())
        assert straight or bool((windows == image.flip(-1)).flatten(1).all(1).any())
        mirrored += not straight
    assert 8 < mirrored < 32
    again, other = (next(training.batches(split, config, seed=0, epoch=epoch))[0] for epoch in (0, 1))
    assert torch.equal(again, seen[0][0])
    assert not torch.equal(other, again)


def test_without_augmentation_batches_are_the_datas_own() -> None:
    digits = data.load("digits").test
    ours = training.batches(digits, {"batch_size": 100}, seed=1, epoch=2)
    for (x, y), (x_data, y_data) in zip(ours, data.batches(digits, 100, seed=1, epoch=2), strict=True):
        assert torch.equal(x, x_data)
        assert torch.equal(y, y_data)


def test_the_learning_rate_of_a_captured_step_can_be_changed() -> None:
    net = nn.Linear(4, 2)
    method = baselines.sgd(net, lr=0.5)
    scale_lr(method, 0.01)
    scale_lr(method, 0.1)  # of the learning rate at the start, not of the last one
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    nn.functional.cross_entropy(net(x), y).backward()
    expected = net.weight.detach() - 0.05 * net.weight.grad
    method.step(x, y)
    assert torch.allclose(net.weight, expected)


@pytest.mark.parametrize(
    ("method", "prior"),
    [("bbb", {"prior_std": 0.3}), ("bbb-mixture", {"weight": 0.5, "std_wide": 1.0, "std_narrow": 0.01})],
)
def test_bayes_by_backprop_learns_digits(method: str, prior: dict[str, float]) -> None:
    torch.manual_seed(0)
    digits = data.load("digits")
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    config = {"std_init": 0.02, "lr": 1e-2, **prior}
    learned = learner(method, config, net, num_data=len(digits.train), seed=0)
    before = learned.posterior().std()["1.weight"]
    losses = [
        learned.step(x, y)
        for epoch in range(6)
        for x, y in data.batches(digits.train, 64, seed=0, epoch=epoch)
    ]
    assert all(math.isfinite(loss) for loss in losses)
    assert bool((learned.posterior().std()["1.weight"] != before).all())
    assert (net(digits.test.x).argmax(-1) == digits.test.y).float().mean() > 0.9


def test_bgd_may_begin_with_another_std_in_the_output_layer() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    config = {"std_init": 0.5, "std_last": 0.1, "lr": 1.0, "mc_samples": 2}
    stds = learner("bgd", config, net, num_data=8, seed=0).posterior().std()
    assert {name: round(float(std.mean()), 6) for name, std in stds.items()} == {
        "0.weight": 0.5,
        "0.bias": 0.5,
        "2.weight": 0.1,
        "2.bias": 0.1,
    }


def test_bayes_by_backprop_draws_in_every_step() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    config = {"std_init": 0.5, "lr": 1e-30, "prior_std": 1.0}
    method = learner("bbb", config, nn.Linear(4, 2), num_data=8, seed=0)
    assert float(method.step(x, y)) != float(method.step(x, y))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"names": ["bgd-tabel1"]}, "there is no experiment 'bgd-tabel1', did you mean 'bgd-table1'?"),
        ({"methods": ["bdg"]}, "bgd-table1 has no method 'bdg', did you mean 'bgd'?"),
        (
            {"names": ["bgd-table1", "bgd-figure1"], "methods": ["bdg"]},
            "bgd-table1 and bgd-figure1 have no method 'bdg', did you mean 'bgd'?",
        ),
        ({"names": []}, "name an experiment, such as 'bgd-table1'"),
        ({"settings": ["4000"]}, "bgd-table1 has no setting '4000'"),
        ({"seeds": [0, -1]}, "seeds must be whole numbers of at least 0, not -1"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
        ({"jobs": 0}, "jobs must be a whole number of at least 1, not 0"),
        ({"device": "tpu"}, "device must be cpu or cuda, not 'tpu'"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, ask: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (its start is compared)
        reproduce(*ask.pop("names", ["bgd-table1"]), **{"out": tmp_path, "device": "cpu", **ask})
    assert str(error.value).startswith(message)
    assert not list(tmp_path.iterdir())


def test_settings_without_one_of_the_methods_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of these methods in these settings"):
        reproduce("bgd-figure1", out=tmp_path, methods=["ewc"], settings=["200 fading"])


def test_experiments_share_what_they_have_in_common(tmp_path: Path) -> None:
    ask: dict[str, Any] = {"out": tmp_path, "quick": True, "epochs": 1, "methods": ["sgd"], "seeds": [1, 0]}
    together = reproduce("bgd-table1", "bgd-table2", "vogn-toy", "bgd-figure1", **ask)
    names = [(each["study"], each["setting"], each["seed"]) for each in together]
    assert len(set(names)) == len(names)
    assert [seed for *_, seed in names] == sorted(seed for *_, seed in names)  # seeds are the outer loop
    assert {study for study, *_ in names} == {"bgd-mnist", "bgd-permuted"}
    alone = reproduce("bgd-table2", **ask)
    assert [each["digest"] for each in alone] == [
        each["digest"] for each in together if each in alone
    ]  # found, not run again


def test_time_left_is_told_from_what_was_measured() -> None:
    same = {"setting": "400", "method": "bgd", "seed": 0, "metrics": {}}
    done = [{**same, "seconds": seconds} for seconds in (100, 300)]
    console = driving.Console(record=True, quiet=False, file=open("/dev/null", "w"), width=200)  # noqa: SIM115
    told = driving._Told(console, done)
    units = [Unit("mnist", "400", method, 1, {}, "") for method in ("bgd", "sgd")]
    told.begin(units[0], 1, 2, "the default")
    told.end({**done[0], "seconds": 200, "diverged": None}, [units[0], units[0]])
    console.file.close()
    assert "about 7 min left for 2 units" in console.export_text()


def test_the_command_takes_several_values_after_one_option(tmp_path: Path) -> None:
    runner = CliRunner()
    line = [
        "reproduce",
        "bgd-theory",
        "--quick",
        "--seeds",
        "3",
        "5",
        "--methods",
        "bgd",
        "--out",
        str(tmp_path),
    ]
    result = runner.invoke(cli.app, line)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "bgd-theory").iterdir()) == [
        "exact-bgd-seed3.json",
        "exact-bgd-seed5.json",
    ]
    metrics = json.loads((tmp_path / "bgd-theory" / "exact-bgd-seed5.json").read_text())["metrics"]
    assert metrics["convex_falls"]
    assert metrics["concave_grows"]
    assert metrics["smallest_bound_ratio"] >= 1
    assert metrics["curvature_within_3_errors"] > 0.9


def test_the_command_lists_the_experiments() -> None:
    result = CliRunner().invoke(cli.app, ["reproduce"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(EXPERIMENTS)


def test_runs_need_no_matplotlib() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import posterity_lab.reproduce"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_outcome_is_written_whole(tmp_path: Path) -> None:
    unit = Unit("mnist", "400 to prune", "bgd", 2, {"lr": 1.0}, "the default")
    known = {"seconds": 1.234, "resumed": False, "device": "cpu", "place": {"commit": "abc"}}
    written = records.write(unit, tmp_path, Outcome({"accuracy": 0.5}, 7), **known)
    path = tmp_path / "mnist" / "400-to-prune-bgd-seed2.json"
    assert records.read(path) == written == records.found(unit, tmp_path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
