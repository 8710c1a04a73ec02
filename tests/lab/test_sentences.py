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


def test_pruning_of_nets_chosen_by_three_criteria() -> None:
    def errors(path: str) -> list[tuple[float, float]]:
        curves = [each["metrics"]["pruning"]["single"] for each in seeds(path)]
        return [(curve["unpruned"], curve["errors"][curve["fractions"].index(0.95)]) for curve in curves]

    def means(path: str) -> tuple[float, float]:
        before, after = zip(*errors(path), strict=True)
        return mean(before), mean(after)

    def ratios(path: str) -> list[str]:
        return [f"{after / before:.2f}" for before, after in errors(path)]

    net = "bgd-mnist/1200-to-prune"
    first, second = means(f"earlier/{net}-bgd"), means(f"earlier/second-rule/{net}-bgd")
    gave = [f"{after / before:.2f}" for before, after in (first, second)]
    says("README.md", f"criterion committed beforehand; two earlier ones gave {gave[0]} and {gave[1]}")
    assert second[0] > first[0]
    assert second[1] > first[1]
    says(
        "docs/results.md",
        f"it was introduced after the first had given {gave[0]} on the test set, and its net is "
        "worse before and after pruning",
    )
    one, two, three = ratios(f"{net}-bgd")
    says("docs/results.md", f"The ratio is {one}, {two} and {three} in three runs (the paper: 1.05).")
    before = {method: means(f"{net}-{method}")[0] for method in ("bgd", "sgd", "bbb", "bbb-mixture")}
    assert before["sgd"] < before["bgd"] < min(before["bbb"], before["bbb-mixture"])
    says("docs/results.md", "Before pruning, SGD has a lower error, and BBB with either prior a higher one.")


def kept(path: str) -> float:
    """The average accuracy at the end of permuted MNIST, in %."""
    return 100 * mean(each["metrics"]["accuracy"] for each in seeds(path))


def test_figure_1_by_an_earlier_rule_and_by_the_fixed_one() -> None:
    sgd, si, ewc, bgd = (
        (kept(f"earlier/second-rule/bgd-permuted/200-{method}"), kept(f"bgd-permuted/200-{method}"))
        for method in ("sgd", "si", "ewc", "bgd")
    )
    says(
        "docs/results.md",
        f"at 2×200 it gave SI {si[0]:.1f} % in place of {si[1]:.1f}, EWC {ewc[0]:.1f} in place of "
        f"{ewc[1]:.1f} and SGD {sgd[0]:.1f} in place of {sgd[1]:.1f}, but BGD {bgd[0]:.1f} in "
        f"place of {bgd[1]:.1f}.",
    )
    assert bgd[1] > max(si[1], ewc[1])
    si_wide, ewc_wide = (f"{kept(f'bgd-permuted/2000-{method}'):.1f}" for method in ("si", "ewc"))
    assert si_wide == ewc_wide
    says("docs/results.md", f"SI and EWC keep {si_wide} %.")


def test_what_bong_keeps_of_permuted_mnist() -> None:
    narrow = {method: kept(f"bgd-permuted/200-{method}") for method in ("bong", "bgd", "sgd", "si")}
    wide = {method: kept(f"bgd-permuted/2000-{method}") for method in ("bong", "sgd")}
    page = "docs/methods/bong.md"
    says(
        page,
        f"it keeps {narrow['bong']:.1f} %, beside {narrow['bgd']:.1f} of BGD, {narrow['sgd']:.1f} of SGD and "
        f"{narrow['si']:.1f} of SI, which is told of switches; at 2×2000 it keeps {wide['bong']:.1f} %, "
        "level with SGD",
    )
    assert abs(wide["bong"] - wide["sgd"]) < 0.5
    last = [
        100 * mean(each["metrics"]["matrix"][-1][-1] for each in seeds(f"bgd-permuted/{width}-bong"))
        for width in (200, 2000)
    ]
    says(page, f"the last task is learned to {last[0]:.0f} % (2×2000: {last[1]:.0f} %).")


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
