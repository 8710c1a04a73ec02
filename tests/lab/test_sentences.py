"""Numbers in sentences of README and docs are those of the committed records; tables have their own test."""

import json
import math
from collections.abc import Iterator
from statistics import mean
from typing import Any

import pytest

from posterity_lab import bench

ROOT = bench.FOLDER.parent
RESULTS = ROOT / "results"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="needs a checkout")


def says(page: str, sentence: str) -> None:
    assert sentence in " ".join((ROOT / page).read_text().split()), sentence


def record(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / path).read_text())
    return found


def seeds(path: str) -> list[dict[str, Any]]:
    found = [json.loads(each.read_text()) for each in sorted(RESULTS.glob(f"{path}-seed*.json"))]
    assert found
    return found


def bins(std: dict[str, Any], *names: str) -> Iterator[tuple[float, float, int]]:
    """Lower edge, upper edge and count of every bin, over some tensors."""
    counts = [sum(each) for each in zip(*(std["counts"][name] for name in names), strict=True)]
    return zip(std["edges"], std["edges"][1:], counts, strict=False)


def test_ways_of_inference_of_vgg11() -> None:
    bgd, sgd = (record(f"results/bgd-cifar10/vgg11-{method}-seed0.json") for method in ("bgd", "sgd"))
    right = {mode: f"{100 * (1 - error):.1f} %" for mode, error in bgd["metrics"]["errors"].items()}
    assert right["average"] == right["mean"]
    says(
        "docs/results.md",
        f"{bgd['config']['epochs']} of 400 epochs, default settings, no tuning for either method. Test "
        f"accuracy of BGD: {right['single']} single networks, {right['vote']} vote, {right['average']} "
        f"averaged probabilities or mean weights. SGD: {100 * sgd['metrics']['accuracy']:.1f} %.",
    )
    assert all("no trials" in each["chosen"] for each in (bgd, sgd))


def test_stds_of_vgg11_stay_near_their_start() -> None:
    found = record("results/bgd-cifar10/vgg11-bgd-seed0.json")
    std, start = found["metrics"]["std"], found["config"]["std_init"]
    spread = list(bins(std, *std["counts"]))
    total = sum(count for *_, count in spread)
    near = sum(count for low, high, count in spread if low >= 0.499 * start and high <= 2 * start)
    assert std["edges"][-1] <= 2 * start
    says(
        "docs/results.md",
        f"{100 * near / total:.2f} % of BGD's stds, {100 * near / total:.0f} % when rounded",
    )


def test_bbb_is_best_early_and_its_stds_go_to_the_prior() -> None:
    best, lowest, medians = [], [], []
    for found in (each for width in (400, 800, 1200) for each in seeds(f"bgd-mnist/{width}-bbb")):
        curve, std = found["metrics"]["curve"], found["metrics"]["std"]
        first = min(curve, key=lambda each: each["single"])
        best.append(first["epoch"])
        lowest.append(first["single"])
        assert curve[-1]["single"] > 1.1 * first["single"]
        for name in ("1.weight", "3.weight"):
            left = sum(std["counts"][name]) / 2
            for low, high, count in bins(std, name):
                left -= count
                if left <= 0:
                    medians.append((low, high))
                    break
        assert found["config"]["prior_std"] == 1.0
    low, high = min(low for low, _ in medians), max(high for _, high in medians)
    between = f"between {low:.2f} and {high:.2f}"
    says("docs/results.md", f"epoch 10 or 15 ({100 * min(lowest):.1f} to {100 * max(lowest):.1f} %)")
    says("docs/results.md", f"ends {between}")
    says("docs/reproduce.md", f"medians end {between}")
    assert set(best) == {10, 15}


def test_mean_weights_of_bbb_and_bgd() -> None:
    def errors(method: str) -> str:
        widths = (seeds(f"bgd-mnist/{width}-{method}") for width in (400, 800, 1200))
        found = [100 * mean(each["metrics"]["errors"]["mean"] for each in runs) for runs in widths]
        return " / ".join(f"{each:.2f}" for each in found) + " %"

    says(
        "docs/results.md",
        f"Its *mean weights* ({errors('bbb')}) are not far from BGD's ({errors('bgd')}).",
    )


def test_cifar_in_a_row() -> None:
    runs = {
        method: record(f"results/bgd-sequence/sequence-{method}-seed0.json")
        for method in ("bgd", "si", "sgd")
    }
    kept = {method: f"{100 * found['metrics']['accuracy']:.1f} %" for method, found in runs.items()}
    says("docs/results.md", f"BGD {kept['bgd']}, SI {kept['si']}, SGD {kept['sgd']}.")


def test_tables_2_and_3_say_that_the_second_net_is_worse() -> None:
    def errors(folder: str) -> tuple[float, float]:
        curves = [each["metrics"]["pruning"]["single"] for each in seeds(f"{folder}/1200-to-prune-bgd")]
        after = [curve["errors"][curve["fractions"].index(0.95)] for curve in curves]
        return mean(curve["unpruned"] for curve in curves), mean(after)

    first, second = errors("earlier/bgd-mnist"), errors("earlier/second-rule/bgd-mnist")
    assert second[0] > first[0]
    assert second[1] > first[1]
    says("README.md", "the second net is worse before and after pruning")
    ratios = [
        curve["errors"][curve["fractions"].index(0.95)] / curve["unpruned"]
        for each in seeds("earlier/second-rule/bgd-mnist/1200-to-prune-bgd")
        for curve in [each["metrics"]["pruning"]["single"]]
    ]
    shown = ", ".join(f"{each:.2f}" for each in sorted(ratios))
    says("docs/results.md", f"Of its three seeds one is above 1.05 ({shown})")


def test_baselines_of_figure_1_gain_by_the_fixed_rule() -> None:
    def kept(method: str) -> str:
        both = (seeds(f"{place}bgd-permuted/200-{method}") for place in ("", "earlier/second-rule/"))
        found = [100 * mean(each["metrics"]["accuracy"] for each in runs) for runs in both]
        return f"{found[0]:.1f} in place of {found[1]:.1f} %"

    says("docs/results.md", f"at 2×200 SI keeps {kept('si')}, EWC {kept('ewc')}.")


def test_what_bong_keeps_in_its_best_trial() -> None:
    def best(method: str) -> float:
        trials = sorted((ROOT / "results/bgd-permuted").glob(f"trial-200-{method}-*.json"))
        return max(100 * json.loads(each.read_text())["metrics"]["accuracy"] for each in trials)

    bong, sgd, si = (best(method) for method in ("bong", "sgd", "si"))
    says("docs/methods/bong.md", f"kept {bong:.1f} %, beside {sgd:.1f} of SGD and {si:.1f} of SI")


def test_the_demos_second_number_and_its_accuracies() -> None:
    demo = record("results/demo.json")
    says("docs/results.md", f"BGD's η, {demo['config']['fixed']['bgd']['lr']:g}, is a second number")
    says(
        "docs/results.md",
        f"[record](../results/demo.json); {len(demo['config']['seeds'])} seeds, {demo['seconds']:.0f} s)",
    )
    assert {len(grid["values"]) for grid in demo["grids"].values()} == {5}


def test_steps_are_compared_like_for_like() -> None:
    def over(name: str, case: str, of: str, to: str) -> str:
        rows = record(f"benchmarks/results/{name}-h200.json")["rows"]
        (columns,) = (
            row["columns"] for row in rows if case in row["case"] and {of, to} <= row["columns"].keys()
        )
        return f"{columns[of]['value'] / columns[to]['value']:.3g}"

    noisy = "Noisy K-FAC K = 1, resnet18"
    graph = over("kfac_step", noisy, "compile_step", "Adam in a CUDA graph")
    eager = over("kfac_step", noisy, "eager step", "Adam")
    says("docs/benchmarks.md", f"graph over Adam's graph, takes {graph} with factors every fifty steps")
    says("docs/benchmarks.md", f"eager over eager it takes {float(eager):.2f} and")
    says("docs/methods/kfac.md", f"Noisy K-FAC takes {graph} times Adam's time on ResNet-18")
    ivon = over("ivon_step", "resnet18, eager", "ivon-opt", "eager step")
    squares = [
        over("vogn_step", f"{net}, eager", "BackPACK's squares, Adam", "eager step")
        for net in ("vgg11", "lenet5")
    ]
    says(
        "docs/benchmarks.md",
        f"Like for like these are {ivon}, {squares[0]} and {squares[1]} (eager over eager)",
    )


def test_five_epochs_differ_within_noise() -> None:
    folder = RESULTS / "mnist-5-epochs"
    errors = [
        1 - json.loads(path.read_text())["modes"]["average"]["accuracy"]
        for path in folder.glob("*/evaluation.json")
    ]
    assert len(errors) == 4
    noise = math.sqrt(mean(errors) * (1 - mean(errors)) / 10_000)
    says(
        "docs/results.md",
        f"an error of {100 * mean(errors):.1f} % has a standard error of {100 * noise:.2f} points",
    )
    # The standard error of a difference of two is √2 of that.
    assert max(errors) - min(errors) < 2 * math.sqrt(2) * noise
