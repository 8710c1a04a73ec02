"""The page of reproductions, drawn from made-up records: nothing here trains anything."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from posterity_lab import bench, cli, report, source
from posterity_lab.record import write as write_record
from posterity_lab.reproduce import EXPERIMENTS, images, records, reproduce, tasks, toy
from posterity_lab.reproduce.calibration import CALIBRATION
from posterity_lab.reproduce.page import write
from posterity_lab.reproduce.proofs import THEORY
from posterity_lab.reproduce.study import Outcome, Study, Unit

MODES = ("single", "average", "mean", "vote")


def image_metrics(error: float, pruned: float = 0.03, bayesian: bool = True) -> dict[str, Any]:
    errors = dict.fromkeys(MODES, error)
    curve = [{"epoch": epoch, **errors} for epoch in (1, 2)]
    fractions = images.FRACTIONS
    pruning = {
        "fractions": list(fractions),
        "weights": [round(1000 * (1 - each)) for each in fractions],
        "errors": [error + (pruned - error) * (each >= 0.9) for each in fractions],
        "unpruned": error,
    }
    std = {"edges": [0.01, 0.02, 0.04, 0.08], "counts": {"0.weight": [1, 8, 1]}}
    return {
        "accuracy": 1 - error,
        "pruned_accuracy": 1 - pruned,
        "errors": errors,
        "pruning": {"single": pruning, "average": pruning},
        "curve": curve,
        "std": std if bayesian else None,
    }


def stream_metrics(first: float, second: float) -> dict[str, Any]:
    summary = {"average_accuracy": (first + second) / 2, "forgetting": 1 - first, "nll": 0.5, "ece": 0.1}
    summary |= {"backward_transfer": first - 1, "forward_transfer": 0.02}
    return {
        "accuracy": summary["average_accuracy"],
        "lasting_accuracy": 0.9,
        "matrix": [[1.0, 0.1], [first, second]],
        "summary": summary,
    }


def calibration_metrics(accuracy: float, seconds: float, svhn: float | None = 0.9) -> dict[str, Any]:
    scores = {"accuracy": accuracy, "nll": 0.5, "ece": 0.02, "auroc": 0.85}
    return {
        **scores,
        "train_accuracy": 0.97,
        "epoch_seconds": seconds,
        "curve": [{"epoch": 1, **scores}, {"epoch": 2, **scores}],
        "outside": "svhn is not here" if svhn is None else "svhn",
        "outside_auroc": svhn,
    }


def toy_metrics(networks: int) -> dict[str, Any]:
    at = torch.linspace(0.0, 1.0, 41)
    grid = toy.packed((at[:, None] + at) / 2)
    return {"accuracy": 0.99, "nll": 0.1, "mean": grid, "average": grid, "samples": [grid] * networks}


def made(
    folder: Path,
    study: Study,
    setting: str,
    method: str,
    seed: int,
    metrics: dict[str, Any],
    *,
    trial: dict[str, float] | None = None,
    diverged: str | None = None,
    resumed: bool = False,
    jobs: int = 1,
    **config: Any,
) -> Path:
    unit = Unit(
        study.name, setting, method, seed, {"epochs": 2, "std_init": 0.02, **config}, "by hand", trial
    )
    place = {"gpu": "A fast one", "processor": "x", "torch": "2.13", "commit": "abcdef0123456789"}
    place |= {"jobs": jobs}
    known: dict[str, Any] = {"seconds": 90.0, "resumed": resumed, "device": "cuda", "place": place}
    records.write(unit, folder, Outcome(metrics, 10_000), diverged=diverged, **known)
    return records.path_of(unit, folder)


def fill(tmp_path: Path) -> Path:
    for seed, error in enumerate((0.015, 0.016, 0.017)):
        made(tmp_path, images.MNIST, "400", "bgd", seed, image_metrics(error))
        made(tmp_path, images.MNIST, "1200 to prune", "bgd", seed, image_metrics(0.016, 0.0168))
        made(tmp_path, images.CIFAR10, "vgg11", "bgd", seed, image_metrics(0.1))
        made(tmp_path, tasks.PERMUTED, "400", "bgd", seed, stream_metrics(0.94 + seed / 100, 0.96))
    longer = image_metrics(0.09, bayesian=False)
    longer["curve"] += [{**longer["curve"][0], "epoch": 3}]
    made(tmp_path, images.CIFAR10, "vgg11", "sgd", 0, longer, resumed=True, epochs=3)
    made(tmp_path, tasks.PERMUTED, "400", "sgd", 0, stream_metrics(0.5, 0.9))
    made(tmp_path, tasks.SEQUENCE, "sequence", "si", 0, stream_metrics(0.7, 0.8))
    return tmp_path


def prove(tmp_path: Path) -> Path:
    proof = {
        "smallest_bound_ratio": 1.5,
        "convex_falls": True,
        "concave_grows": False,
        "curvature_within_3_errors": 1.0,
        "curvature_correlation": 0.999,
    }
    made(tmp_path, THEORY, "exact", "bgd", 0, proof)
    return compare(tmp_path)


def compare(tmp_path: Path) -> Path:
    """What the VOGN paper is drawn from."""
    for seed, seconds in enumerate((10.0, 14.0)):
        metrics = calibration_metrics(0.84 + seed / 100, seconds)
        made(tmp_path, CALIBRATION, "resnet18", "vogn", seed, metrics)
    made(tmp_path, CALIBRATION, "resnet18", "adam", 0, calibration_metrics(0.86, 3.0))
    made(tmp_path, CALIBRATION, "resnet18", "ivon", 0, calibration_metrics(0.86, 3.0, svhn=None))
    made(tmp_path, CALIBRATION, "resnet18 neither", "vogn", 0, calibration_metrics(0.6, 9.0))
    made(tmp_path, tasks.SMALL_PERMUTED, "100", "vogn", 0, stream_metrics(0.5, 0.9))
    for method, networks in (("adam", 1), ("vogn", 10)):
        made(tmp_path, toy.TOY, "moons", method, 0, toy_metrics(networks), points=40)
    return tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page(prove(fill(tmp_path_factory.mktemp("results"))))


def page(folder: Path) -> str:
    write(folder, folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    return text.partition(f"<h2>{title}")[2].partition("</section>")[0]


def rows(text: str) -> dict[str, list[str]]:
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", text, re.S)]
    return {row[0]: row[1:] for row in cells if row}


def test_the_paper_and_ours_are_side_by_side(shown: str) -> None:
    text = shown
    row = rows(section(text, "Table 1"))["400 BGD"]
    assert row == ["1.74", *["1.60 ± 0.10"] * 4, "2", "3", "90 s"]
    row = rows(section(text, "Table 2"))["1200 to prune BGD"]
    assert row == ["1.05", "1.05 ± 0.00", "1.60 ± 0.00", "1.68 ± 0.00", "50", "2", "3", "90 s"]
    row = rows(section(text, "Table 3"))["vgg11 BGD"]
    assert row[:2] == ["1.04", "0.30 ± 0.00"]
    row = rows(section(text, "Figure 1"))["400 BGD"]
    assert row[:3] == ["95.50 ± 0.50", "5.00 ± 1.00", "2.00 ± 0.00"]
    assert row[3:] == ["0.500 ± 0.000", "0.100 ± 0.000", "2", "3", "90 s"]
    figure3 = rows(section(text, "Figure 3"))
    assert figure3["vgg11 BGD"] == [*["90.00 ± 0.00"] * 4, "2", "3", "90 s"]
    assert figure3["vgg11 SGD"] == [*["91.00"] * 4, "3", "1", "≥ 90 s"]
    assert rows(section(text, "Figure 2"))["vgg11 BGD, seed 0"] == ["0.02", "0.0", "90.0", "10.0", "2"]
    assert rows(section(text, "Figure 4"))["sequence SI"][0] == "75.00"
    theory = rows(section(text, "Theorem 1"))
    assert theory["σ falls at every step where convex"] == ["yes"]
    assert theory["σ grows at every step where concave"] == ["no"]
    assert "A fast one, torch 2.13, commit abcdef012345. n of a run: 10000." in text
    assert rows(section(text, "Overview"))["Table 1: classification error on MNIST"][:3] == ["3", "0", "4.5"]


def test_the_table_on_cifar10_has_scores_times_and_what_is_missing(shown: str) -> None:
    text = section(shown, "VOGN, table")
    scores, times = (rows(part) for part in text.split("Time of an epoch"))
    assert scores["resnet18 VOGN"] == [
        *("91.62", "97.00 ± 0.00", "84.27", "84.50 ± 0.71", "0.477", "0.500 ± 0.000"),
        *("0.040", "0.020 ± 0.000", "0.876", "0.850 ± 0.000", "0.900 ± 0.000"),
    ]
    assert scores["resnet18 IVON"] == [
        "–",
        "97.00",
        "–",
        "86.00",
        "–",
        "0.500",
        "–",
        "0.020",
        "–",
        "0.850",
        "–",
    ]
    assert times["resnet18 VOGN"] == ["12.000 ± 2.828", "4.4", "4.0", "2", "2", "90 s"]
    assert times["resnet18 IVON"][1:3] == ["–", "1.0"]
    assert "resnet18 neither VOGN" not in scores
    assert "Without another data set to tell apart: svhn is not here." in text


def test_the_ablation_and_the_plane_are_shown(shown: str) -> None:
    ablated = rows(section(shown, "VOGN, figure: momentum"))
    assert ablated["resnet18 neither VOGN"][0] == "60.00"
    assert "resnet18 Adam" not in ablated
    toys = section(shown, "VOGN, figure: two classes")
    assert rows(toys)["moons VOGN"] == ["99.0", "0.100"]
    assert toys.count("<img") == 1
    assert rows(section(shown, "VOGN: permuted"))["100 VOGN"][0] == "70.00"


def test_times_of_runs_that_shared_a_machine_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "none")
    compare(tmp_path)
    made(tmp_path, CALIBRATION, "resnet18", "vogn", 2, calibration_metrics(0.84, 99.0), jobs=4)
    made(tmp_path, CALIBRATION, "alexnet", "vogn", 0, calibration_metrics(0.84, 99.0), jobs=4)
    text = section(page(tmp_path), "VOGN, table")
    times = rows(text[text.index("Time of an epoch") :])
    assert times["resnet18 VOGN"][:3] == ["12.000 ± 2.828", "4.4", "4.0"]
    assert times["alexnet VOGN"][::2] == ["–", "–", "1"]
    assert ", 4 runs at a time" in text
    ratios = {"lenet5": 4.0, "alexnet": 3.0}
    rows_of_steps = [
        {"case": case, "ratios": [{"of": "VOGN", "to": "Adam", "value": value}]}
        for case, value in ratios.items()
    ]
    record = {"rows": rows_of_steps, "environment": {"gpu": "Another one", "processor": "x"}}
    bench.RESULTS.mkdir()
    (bench.RESULTS / "vogn_table-a.json").write_text(json.dumps(record))
    text = section(page(tmp_path), "VOGN, table")
    times = rows(text[text.index("Time of an epoch") :])
    assert times["resnet18 VOGN"][:3] == ["12.000 ± 2.828", "4.4", "4.0"]
    assert times["alexnet VOGN"][:3] == ["–", "–", "3.0"]
    assert "posterity bench vogn_table, Another one" in text


def test_the_committed_page_is_that_of_the_committed_records(tmp_path: Path) -> None:
    root = bench.FOLDER.parent
    if not (root / "results").is_dir():
        pytest.skip("needs a checkout")
    write(root / "results", tmp_path / "page.html")
    pages = (each.read_text(encoding="utf-8") for each in (tmp_path / "page.html", root / "docs/report.html"))
    # Pictures differ from place to place, and a copy may have no history to find commits in.
    new, old = (re.sub(r'src="data:[^"]*"|commit [0-9a-f]{12}|uncommitted', "", text) for text in pages)
    assert new == old, "run posterity report --out docs/report.html"


def test_every_section_says_how_to_run_it_again(folder: Path, shown: str) -> None:
    assert re.findall(r"To run it anew: posterity reproduce (\S+) --out", shown) == list(EXPERIMENTS)
    for name, experiment in EXPERIMENTS.items():
        missing = "It was not run yet." in section(shown, experiment.title)
        assert missing == (not name.startswith(("bgd", "vogn"))), name
    assert "It was not run yet." in section(page(folder), "Theorem 1")


def test_the_page_needs_nothing_else(shown: str) -> None:
    text = shown
    assert not re.search(r"https?:|//[a-z]|<script|<link|@import|url\(", text)
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', text)
    assert len(sources) >= 8
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)


def test_the_page_is_well_formed_and_fits_a_phone(shown: str) -> None:
    text = shown
    checker = Balanced()
    checker.feed(text)
    assert checker.open == []
    assert checker.wrong == []
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert text.count("<table>") == text.count('<div class="scroll"><table>') > 8
    assert text.count('<div class="scroll wide"><img') == 2  # the theory, the plane


class Balanced(HTMLParser):
    """Every element is closed, in the order of opening; every image has a text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img" and not dict(attrs).get("alt"):
            self.wrong.append("img without alt")
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_equal_records_give_equal_pages(folder: Path, shown: str) -> None:
    assert page(prove(folder)) == shown


def test_trials_are_shown_and_do_not_count_as_runs(folder: Path) -> None:
    for std, pruned in ((0.02, 0.02), (0.05, 0.03)):
        metrics = image_metrics(0.02, pruned)
        made(
            folder,
            images.MNIST,
            "400",
            "bgd",
            100,
            {**metrics, "accuracy": 1 - pruned},
            trial={"std_init": std},
        )
    made(folder, images.MNIST, "400", "bgd", 100, {}, trial={"std_init": 9.0}, diverged="the loss is nan")
    text = section(page(folder), "Table 1")
    assert rows(text)["400 BGD"][-2] == "3"
    assert rows(text)["400 BGD: std_init 0.02 *"] == ["accuracy", "98.00"]
    assert rows(text)["400 BGD: std_init 0.05"] == ["accuracy", "97.00"]
    assert rows(text)["400 BGD: std_init 9"] == ["accuracy", "diverged"]
    assert "400 BGD: by hand." in text


def test_runs_that_diverged_are_counted(folder: Path) -> None:
    made(folder, images.MNIST, "400", "bgd", 3, {}, diverged="the loss is not finite")
    text = page(folder)
    assert rows(section(text, "Table 1"))["400 BGD"][-2] == "3 and 1 diverged"
    assert rows(section(text, "Overview"))["Table 1: classification error on MNIST"][:2] == ["3", "1"]
    only = folder / "only"
    made(only, images.MNIST, "400", "bgd", 0, {}, diverged="the loss is not finite")
    assert "It was not run yet." in section(page(only), "Table 1")


def test_quick_runs_are_marked(folder: Path, shown: str) -> None:
    assert "mean nothing" not in shown
    made(folder, images.MNIST, "16", "bgd", 0, image_metrics(0.0), data="digits")
    assert "their numbers mean nothing" in page(folder)


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _without(key: str) -> Callable[[str], str]:
    return lambda text: json.dumps({name: value for name, value in json.loads(text).items() if name != key})


def _with(key: str, value: Any) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), key: value})


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_cut, "it is not JSON"),
        (lambda text: "[]", "it holds a list, not an object"),
        (_without("metrics"), "it has no 'metrics'"),
        (_with("seconds", "long"), "its 'seconds' is 'long'"),
        (_with("seed", 7), "it is the record of 400-bgd-seed7"),
    ],
)
def test_a_damaged_record_is_refused_by_name(folder: Path, damage: Callable[[str], str], why: str) -> None:
    path = folder / "bgd-mnist" / "400-bgd-seed1.json"
    path.write_text(damage(path.read_text()))
    out = folder / "page.html"
    result = CliRunner().invoke(cli.app, ["report", "--results", str(folder), "--out", str(out)])
    assert result.exit_code == 2
    assert result.stderr == f"{path} is damaged ({why}): delete it and run its unit again\n"
    assert not out.exists()


def test_an_edited_record_is_refused(folder: Path) -> None:
    path = folder / "bgd-mnist" / "400-bgd-seed1.json"
    record = json.loads(path.read_text())
    record["metrics"]["errors"]["single"] -= 0.001
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"seed1.json is damaged \(its content was changed: it does not fit"):
        page(folder)


def test_values_that_no_run_writes_are_refused_by_their_study(tmp_path: Path) -> None:
    reproduce("bgd-theory", out=tmp_path, quick=True)
    (path,) = (tmp_path / "bgd-theory").glob("*.json")
    content = json.loads(path.read_text())
    content["metrics"]["curvature_correlation"] = {}
    write_record(path, content)
    with pytest.raises(ValueError, match=r"the records of bgd-theory have values that no run writes .*: run"):
        write(tmp_path, tmp_path / "page.html")


def test_sources_are_shown_as_commits_or_as_uncommitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "commits", lambda: {"known": "0123456789abcdef"})
    for seed, place in enumerate(
        ({"source": "known"}, {"source": "edited"}, {"commit": "fedcba9876543210-dirty"})
    ):
        path = made(tmp_path, images.MNIST, "400", "bgd", seed, image_metrics(0.01))
        record = json.loads(path.read_text())
        write_record(path, {**record, "environment": {"gpu": "One", "torch": "2", **place}})
    text = page(tmp_path)
    for name in ("commit 0123456789ab", "uncommitted", "commit fedcba987654-dirty"):
        assert f"One, torch 2, {name}" in text


def test_metrics_that_lack_a_number_are_refused_by_name(folder: Path) -> None:
    path = folder / "bgd-mnist" / "400-bgd-seed1.json"
    record = json.loads(path.read_text())
    del record["metrics"]["errors"]["single"]
    write_record(path, record)
    with pytest.raises(
        ValueError, match=r"400-bgd-seed1.json is damaged \(its metrics have no 'errors.single'\)"
    ):
        page(folder)


def test_runs_that_were_not_run_alike_are_refused(folder: Path) -> None:
    made(folder, images.MNIST, "400", "bgd", 2, image_metrics(0.01), epochs=5)
    with pytest.raises(ValueError, match="seeds 0 and 2 of 400 bgd were run with different settings"):
        page(folder)


def test_drawings_are_written_as_files_where_they_are_wanted(folder: Path) -> None:
    out, pictures = folder / "page.html", folder / "pictures"
    write(folder, out, pictures)
    files = sorted(pictures.iterdir())
    assert len(files) == out.read_text(encoding="utf-8").count("<img")
    assert {path.name.rpartition("-")[0] for path in files} <= set(EXPERIMENTS)
    assert all(path.read_bytes().startswith(b"<?xml") for path in files)


def test_the_command_writes_the_page(folder: Path) -> None:
    runner, out = CliRunner(), folder / "page.html"
    result = runner.invoke(cli.app, ["report", "--results", str(folder), "--out", str(out)])
    assert result.exit_code == 0
    assert result.stdout == f"15 records are shown in {out}\n"
    assert out.read_text().startswith("<!doctype html>")
    for wrong in (folder, folder / "no" / "page.html"):
        result = runner.invoke(cli.app, ["report", "--results", str(folder), "--out", str(wrong)])
        assert result.exit_code == 2
        assert result.stderr.endswith("choose another --out\n")


def test_a_figure_of_several_panels_is_wide() -> None:
    assert report.picture(report.figure(panels=2)[0], "two").wide
    assert not report.picture(report.figure()[0], "one").wide
