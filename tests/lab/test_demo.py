"""The demo at its smallest: its files, its numbers, and what the full one relies on."""

import json
import re
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from posterity import Factorised, predict
from posterity_lab import demo, nets
from posterity_lab.data import Dataset, Split
from posterity_lab.demo import runs
from posterity_lab.demo.runs import FRACTIONS, GRIDS, QUICK, Sizes
from posterity_lab.streams import Tasks, permuted


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    demo.run(out, quick=True)
    return out, json.loads((out / "results.json").read_text())


def test_it_leaves_its_files(quick: tuple[Path, dict[str, Any]]) -> None:
    out, _ = quick
    names = {"demo.png", "posterior.safetensors", "report.html", "results.json"}
    assert {path.name for path in out.iterdir()} == names
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_nothing_else(quick: tuple[Path, dict[str, Any]]) -> None:
    page = (quick[0] / "report.html").read_text()
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\(", page)
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert len(sources) == 6
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)


def test_the_page_says_what_the_results_say(quick: tuple[Path, dict[str, Any]]) -> None:
    page, results = (quick[0] / "report.html").read_text(), quick[1]
    for method in GRIDS:
        average = results["stream"][method]["average"]
        assert f"<td>{100 * average['mean']:.1f} ± {100 * average['sd']:.1f}</td>" in page


def test_summaries_follow_from_the_runs(quick: tuple[Path, dict[str, Any]]) -> None:
    results = quick[1]
    for method in GRIDS:
        stream = results["stream"][method]
        final = [curve[-1] for curve in stream["accuracy"]]
        averages = [fmean(row) for row in final]
        assert len(final) == len(QUICK.seeds)
        assert all(len(curve) == QUICK.tasks for curve in stream["accuracy"])
        assert stream["average"]["mean"] == pytest.approx(fmean(averages))
        assert stream["average"]["sd"] == pytest.approx(stdev(averages))
        assert [task["mean"] for task in stream["final"]] == pytest.approx(
            [fmean(column) for column in zip(*final, strict=True)]
        )
        assert stream["seen"][-1] == pytest.approx(stream["average"])


def test_every_grid_was_run_and_its_best_value_chosen(quick: tuple[Path, dict[str, Any]]) -> None:
    assert len({len(values) for _, values in GRIDS.values()}) == 1
    for method, (parameter, values) in GRIDS.items():
        grid = quick[1]["grids"][method]
        assert (grid["parameter"], tuple(grid["values"])) == (parameter, values)
        alive = {
            value: accuracy
            for value, accuracy, diverged in zip(values, grid["accuracy"], grid["diverged"], strict=True)
            if not diverged
        }
        assert alive[grid["chosen"]] == max(alive.values())


def test_histograms_count_every_input(quick: tuple[Path, dict[str, Any]]) -> None:
    results = quick[1]
    for method in ("bgd", "adam"):
        kinds = results["entropy"][method]
        assert set(kinds) == {"digits", "inverted", "shuffled", "noise"}
        assert {sum(counts) for counts in kinds.values()} == {360 * len(QUICK.seeds)}
        assert len(results["pruning"][method]) == len(FRACTIONS)
    weights = 64 * 16 + 16 + 16 * 10 + 10
    assert sum(results["std"]["counts"]) == weights * len(QUICK.seeds)


def test_the_saved_posterior_predicts_as_the_run_did(quick: tuple[Path, dict[str, Any]]) -> None:
    out, results = quick
    model = nets.mlp(64, QUICK.hidden, 10)
    posterior = Factorised.load(out / "posterior.safetensors", model)
    data = runs.standardised(runs.digits(QUICK)).test
    prediction = predict(model, posterior, data.x, samples=QUICK.eval_samples)
    assert results["reloaded"] is True
    assert float((prediction.label == data.y).float().mean()) == pytest.approx(
        results["reloaded_accuracy"], abs=1e-6
    )


def test_tuning_never_sees_test_images() -> None:
    sizes = Sizes()
    tuned, whole = runs.held_out(sizes), runs.digits(sizes)

    def images(x: torch.Tensor) -> set[tuple[float, ...]]:
        return {tuple(image) for image in x.flatten(1).tolist()}

    assert len(tuned.test) == sizes.validation
    assert len(tuned.train) + len(tuned.test) == len(whole.train)
    assert images(tuned.train.x) | images(tuned.test.x) == images(whole.train.x)
    assert not images(tuned.test.x) & images(whole.test.x)
    assert not images(tuned.test.x) & images(tuned.train.x)
    assert sizes.tuning_seed not in sizes.seeds


def test_tuning_uses_held_out_images_and_final_runs_test_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, made = replace(QUICK, train_images=128), []

    def kept(dataset: Dataset, count: int, seed: int) -> Tasks:
        made.append(dataset)
        return permuted(dataset, count, seed)

    monkeypatch.setattr(runs, "permuted", kept)
    for validation, dataset in ((True, runs.held_out(sizes)), (False, runs.digits(sizes))):
        runs.stream_run(sizes, "sgd", 0.1, seed=0, validation=validation)
        expected = runs.standardised(dataset)
        for mine, wanted in ((made[-1].train, expected.train), (made[-1].test, expected.test)):
            assert torch.equal(mine.x, wanted.x)
            assert torch.equal(mine.y, wanted.y)


def test_pixels_are_standardised_by_the_training_images() -> None:
    train, test = (
        Split(torch.tensor([1.0, 3.0]), torch.zeros(2)),
        Split(torch.tensor([2.0, 8.0]), torch.zeros(2)),
    )
    found = runs.standardised(Dataset("two", train, test, 10))
    std = 2**0.5
    assert found.train.x.tolist() == pytest.approx([-1 / std, 1 / std])
    assert found.test.x.tolist() == pytest.approx([0.0, 6 / std])


def test_only_the_grid_is_run_on_held_out_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick: tuple[Path, dict[str, Any]]
) -> None:
    asked: list[tuple[str, float, int, bool]] = []

    def note(sizes: Sizes, method: str, value: float, seed: int, validation: bool = False) -> dict[str, Any]:
        asked.append((method, value, seed, validation))
        return {"accuracy": [[0.5, 0.5]] * 2, "diverged": False, "ms_per_step": 1.0}

    monkeypatch.setattr(demo, "stream_run", note)
    monkeypatch.setattr(demo, "plain_run", lambda *_: {})
    monkeypatch.setattr(demo, "_plain", lambda _: {})
    demo._compute(QUICK, tmp_path, demo.Console(quiet=True))
    grid = {(method, value) for method, (_, values) in GRIDS.items() for value in values}
    assert {each[:2] for each in asked if each[3]} == grid
    assert {each[2] for each in asked if each[3]} == {QUICK.tuning_seed}
    assert sorted(each[2] for each in asked if not each[3]) == sorted([*QUICK.seeds] * len(GRIDS))


def test_diverged_run_is_recorded_and_not_chosen() -> None:
    outcome = runs.stream_run(QUICK, "bgd", 1e25, seed=0)  # so wide that outputs overflow
    assert outcome["diverged"] is True
    assert len(outcome["accuracy"]) == QUICK.tasks
    good = {"accuracy": [[0.2]], "diverged": False}
    bad = {"accuracy": [[0.9]], "diverged": True}
    assert demo.choose("bgd", {0.1: good, 0.2: bad})["chosen"] == 0.1


def test_a_run_depends_on_its_arguments_alone() -> None:
    small = replace(QUICK, train_images=128, samples=1)
    first, second = (runs.stream_run(small, "bgd", 0.1, seed=3)["accuracy"] for _ in range(2))
    assert first == second


class _Broken:
    """A pool whose second process died: one result, then nothing."""

    def __init__(self) -> None:
        self.used = 0

    def submit(self, job: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.used += 1
        if self.used == 1:
            future.set_result(job())
        else:
            future.set_exception(BrokenProcessPool("killed"))
        return future


def test_jobs_are_finished_here_when_processes_die() -> None:
    threads, seen = torch.get_num_threads(), []
    jobs = {key: lambda key=key: {"key": key} for key in "abc"}
    with pytest.warns(UserWarning, match="worker processes"):
        done = demo.run_all(jobs, _Broken(), lambda: seen.append(1))  # type: ignore[arg-type]
    assert done == {key: {"key": key} for key in "abc"}
    assert len(seen) == 3
    assert torch.get_num_threads() == threads


def test_jobs_run_in_spawned_processes() -> None:
    with demo._pool(2) as pool:
        assert demo.run_all({"a": dict}, pool, lambda: None) == {"a": {}}


def test_strange_inputs_are_what_they_say() -> None:
    x = torch.rand(5, 1, 8, 8)
    made = runs.strange(x, seed=1)
    assert torch.equal(made["inverted"], 1 - x)
    assert torch.equal(made["shuffled"].flatten(1).sort(1)[0], x.flatten(1).sort(1)[0])
    assert not torch.equal(made["shuffled"], x)
    assert all(value.min() >= 0 and value.max() <= 1 for value in made.values())
