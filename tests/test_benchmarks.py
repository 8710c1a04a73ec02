"""Every benchmark runs, in seconds; its times are not looked at."""

import importlib.util
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import posterity
from posterity.compress import shrink
from posterity_lab import bench, nets
from posterity_lab.bench import Column, Ratio, Record, measure, parser
from posterity_lab.cli import app
from posterity_lab.reproduce import sparse
from posterity_lab.reproduce.sparse_groups import architecture
from posterity_lab.reproduce.study import Unit

QUICK = ["--rounds", "2", "--round-seconds", "1e-4"]
# Options that make a benchmark small, and the columns that it has on a CPU.
LOOP, ADAM, NOISE = "loop over samples", "Adam", "drawing the noise alone"
FLOORS = {"floor from bytes", "floor from FLOPs"}
BBB_PEERS = {"bayesian-torch": "bayesian_torch", "BLiTZ": "blitz"}
BBB = {name for name, package in BBB_PEERS.items() if importlib.util.find_spec(package)}
BACKPACK = {"BackPACK's squares, Adam"} if importlib.util.find_spec("backpack") else set()
ONNX = {"whole net, onnxruntime", "shrunk, onnxruntime"} if importlib.util.find_spec("onnxruntime") else set()
SMOKE = {
    "train_step": (["--widths", "8", "--samples", "2"], {LOOP, "compile_step", ADAM, NOISE}),
    "conv_step": (["--nets", "lenet5", "--samples", "2", "--batch", "4"], {LOOP, "compile_step", ADAM}),
    "ivon_step": (["--net", "lenet5", "--batch", "4"], {"eager step", "compile_step", ADAM, "ivon-opt"}),
    "gradient_step": (
        [
            "--nets",
            "mlp-8",
            "lenet5",
            "--variants",
            "gaussian",
            "flipout",
            "mnf",
            "--batch",
            "2",
            "--samples",
            "1",
        ],
        {"plain loop", "compile_step", ADAM, *BBB},
    ),
    "vogn_step": (
        ["--nets", "lenet5", "--batches", "4", "--samples", "1", "2"],
        {"eager step", "compile_step", ADAM, *BACKPACK},
    ),
    "kfac_step": (["--nets", "lenet5", "--batch", "4", "--every", "2"], {"eager step", "compile_step", ADAM}),
    "vogn_table": (
        ["--settings", "lenet5", "--batch", "4"],
        {"Adam", "MC dropout", "VOGN", "IVON", "BBB"},
    ),
    "step_memory": (["--nets", "lenet5", "--batch", "4"], set()),
    "predict": (["--nets", "mlp", "--images", "3", "--samples", "2"], {"loop over networks", "predict"}),
    "smaller": (
        ["--nets", "mlp-300", "lenet5-caffe", "--kept", "0.5", "--batches", "2", "--layouts", "nchw"],
        {"whole net", "shrunk", *ONNX},
    ),
    "mnist": (["--data", "digits", "--widths", "8", "--epochs", "1"], {"compile_step"}),
    "memory": (["--widths", "8", "--samples", "2"], set()),
    "step_kernels": (["--steps", "bgd-mlp-8", "vogn-lenet5", "adam-lenet5", "--batch", "4"], {"all kernels"}),
    "first_try": (
        ["--tasks", "digits-mlp", "--methods", "adamw", "ivon", "--seeds", "0", "--epochs", "1"],
        {"step", "AdamW"},
    ),
    "gradient_variance": (
        ["--nets", "mlp", "--scales", "0.1", "--batches", "4", "--draws", "3", "--epochs", "1"],
        {"weight", "local", "flipout", "random batches"},
    ),
    "second_every": (
        ["--seeds", "0", "--beta2", "0.9", "--epochs", "1"],
        {"every step", "one of 10", "one of 100", "bfloat16", "another seed"},
    ),
    "scale": (
        ["--net", "lenet5", "--worlds", "2", "--rules", "ivon", "ivon-10"],
        {"Adam, ddp", "ivon, ddp", "ivon, mesh", "ivon-10, ddp", "ivon-10, mesh"},
    ),
    "growth": (
        ["--width", "8", "--samples", "1", "3", "--widths", "8", "9", "--copy-mib", "1", "--matmul", "9"],
        {"compile_step", *FLOORS},
    ),
}
CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts can be imported as modules."""
    monkeypatch.syspath_prepend(bench.FOLDER)


def test_every_script_is_in_the_table_of_smoke_runs() -> None:
    assert set(bench.names()) == {*SMOKE, "headline"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The record of a benchmark on a device; it runs once."""

    @cache
    def path(name: str, device: str) -> Path:
        out = tmp_path_factory.mktemp(name) / "record.json"
        bench.run(name, ["--device", device, "--out", str(out), *QUICK, *SMOKE[name][0]])
        return out

    return path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own, when it is first imported
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", SMOKE)
def test_a_benchmark_writes_its_record(name: str, device: str, made: Callable[[str, str], Path]) -> None:
    if name == "ivon_step":
        pytest.importorskip("ivon", reason="needs the extra bench")
    before = list(sys.path), list(sys.argv)
    record = json.loads(made(name, device).read_text())
    assert (sys.path, sys.argv) == before
    assert (record["benchmark"], record["complete"], record["config"]["device"]) == (name, True, device)
    assert record["environment"]["command"][:3] == [f"{name}.py", "--device", device]
    row = record["rows"][-1]
    if device == "cpu":
        assert (
            set(row["columns"])
            <= SMOKE[name][1]
            <= {each for row in record["rows"] for each in row["columns"]}
        )
    for column in row["columns"].values():
        assert 0 <= column["lowest"] <= column["value"] <= column["highest"]
        assert column["value"] > 0
        assert column["setting"]
    for ratio in row["ratios"]:
        of, to = (row["columns"][ratio[key]]["value"] for key in ("of", "to"))
        assert ratio["value"] == of / to
    assert row["parameters"] > 0


def test_a_round_of_kfac_has_whole_cycles(made: Callable[[str, str], Path]) -> None:
    rows = json.loads(made("kfac_step", "cpu").read_text())["rows"]
    assert [row["case"] for row in rows] == ["Noisy K-FAC K = 1, lenet5", "K-FAC, lenet5"]
    for row in rows:
        assert row["factors_every"] == 2
        assert {row["columns"][name]["steps"] for name in ("eager step", "compile_step")} == {2}


def test_steps_without_a_hessian_estimate_send_only_the_gradient(
    made: Callable[[str, str], Path],
) -> None:
    (row,) = json.loads(made("scale", "cpu").read_text())["rows"]
    sent = {name: column["value"] for name, column in row["columns"].items()}
    gradient = sent["Adam, ddp"]
    assert sent["ivon, ddp"] == sent["ivon-10, ddp"] == gradient
    # Buffers begin at even addresses, and a few numbers say who has seen what.
    assert sent["ivon, mesh"] == pytest.approx(2 * gradient, rel=0.01)
    assert sent["ivon-10, mesh"] == pytest.approx(1.1 * gradient, rel=0.01)
    assert row["collectives"]["ivon-10, mesh"] == row["collectives"]["ivon, mesh"] == 2


def test_memory_says_that_a_cpu_has_no_counter(made: Callable[[str, str], Path]) -> None:
    record = json.loads(made("memory", "cpu").read_text())
    assert record["notes"] == ["the memory of a step is not measured on a CPU: choose --device cuda"]


def test_growth_counts_bytes_and_flops_and_draws_its_plot_again(made: Callable[[str, str], Path]) -> None:
    out = made("growth", "cpu")
    machine, *points = json.loads(out.read_text())["rows"]
    assert [(row["axis"], row["samples"], row["width"]) for row in points] == [
        ("samples", 1, 8),
        ("samples", 3, 8),
        ("parameters", 10, 8),
        ("parameters", 10, 9),
    ]
    rates, row = machine["rates"], points[1]
    weights = 784 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10
    traffic = 4 * weights * (3 * 3 + 4) / (rates["GB_per_s"] * 1e6)
    assert row["columns"]["floor from bytes"]["value"] == pytest.approx(traffic)
    flops = 6 * 128 * weights * 3 / (rates["TFLOP_per_s"] * 1e9)
    assert row["columns"]["floor from FLOPs"]["value"] == pytest.approx(flops)
    out.with_suffix(".png").unlink()
    bench.run("growth", ["--plot-only", str(out)])
    assert out.with_suffix(".png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "package", "column", "how"),
    [
        ("ivon_step", "ivon", "ivon-opt", "pip install 'posterity[bench]' brings the package"),
        (
            "vogn_step",
            "backpack",
            "BackPACK's squares, Adam",
            "pip install --no-deps backpack-for-pytorch einops unfoldNd",
        ),
    ],
)
def test_a_missing_peer_is_left_out_with_a_note(
    name: str, package: str, column: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    out = tmp_path / "record.json"
    bench.run(name, ["--out", str(out), *QUICK, *SMOKE[name][0]])
    record = json.loads(out.read_text())
    columns = {each for row in record["rows"] for each in row["columns"]}
    assert columns == SMOKE[name][1] - {column}
    assert record["notes"] == [f"the column {column} is left out: {how}"]


@pytest.mark.usefixtures("scripts")
def test_backpack_makes_the_squares_that_ours_does() -> None:
    pytest.importorskip("backpack", reason="needs BackPACK")
    import peers

    from posterity.curvature import Squares

    make, loss_fn = peers.maker("lenet5", [3, 32, 32], "cpu"), peers.Loss("fp32", "cpu")
    data = peers.batch([4, 3, 32, 32], "cpu")
    model, other = make(), make()
    peers.backpack_adam(model, loss_fn, *data)()
    with Squares(other) as squares:
        loss_fn(other, *data).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.sum_grad_squared, squares.sums[name], rtol=1e-4, atol=1e-12)
    assert not torch.equal(model[0].weight, other[0].weight)


@pytest.mark.usefixtures("scripts")
def test_the_loop_and_the_stored_step_are_bgd(monkeypatch: pytest.MonkeyPatch) -> None:
    import memory
    import peers

    from posterity.optim.bgd import bgd_mean, bgd_std

    eps = torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(1)).double()
    x, y = torch.randn(5, 4).double(), torch.tensor([0, 1, 1, 0, 1])
    start = torch.randn(2, 4).double()

    def net() -> nn.Module:
        model = nn.Linear(4, 2, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(start)
        return model

    expected, std = start, torch.full_like(start, 0.02)
    for noise in eps:  # of one step: two show what becomes of the std
        theta = [(expected + std * each).requires_grad_() for each in noise]
        grads = [
            5 * torch.autograd.grad(nn.functional.cross_entropy(x @ each.T, y), each)[0] for each in theta
        ]
        product = sum(grad * each for grad, each in zip(grads, noise, strict=True)) / 3
        expected, std = bgd_mean(expected, std, sum(grads) / 3, 1e-6), bgd_std(std, product)
    loss_fn = peers.Loss("fp32", "cpu")
    looped, stored = net(), net()
    steps = [peers.bgd_loop(looped, loss_fn, x, y, 3), memory.stored_step(stored, loss_fn, x, y, 3)]
    singly, together = iter(eps.flatten(0, 1)), iter(eps)
    monkeypatch.setattr(torch, "randn_like", lambda p: next(singly))
    monkeypatch.setattr(torch, "randn", lambda *shape, device: next(together))
    for step in steps * 2:
        step()
    for model in (looped, stored):
        torch.testing.assert_close(model.weight.detach() - start, expected - start, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("scripts")
def test_a_column_has_the_precision_and_layout_that_it_names() -> None:
    import peers

    def allowed() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before, seen = allowed(), {}
    for precision in peers.PRECISIONS:
        with peers.arithmetic(precision):
            seen[precision] = allowed()
    assert allowed() == before
    assert seen == {"fp32": ("highest", False), "tf32": ("high", True), "bf16": ("high", True)}
    for layout, form in (("nchw", torch.contiguous_format), ("channels-last", torch.channels_last)):
        model = peers.maker("lenet5", [3, 32, 32], "cpu", layout)()
        x, y = peers.batch([4, 3, 32, 32], "cpu", layout)
        assert x.is_contiguous(memory_format=form)
        assert model[0].weight.is_contiguous(memory_format=form)
    outputs: list[torch.dtype] = []
    model.register_forward_hook(lambda module, inputs, output: outputs.append(output.dtype))
    for precision in ("fp32", "bf16"):
        peers.Loss(precision, "cpu")(model, x, y)
    assert outputs == [torch.float32, torch.bfloat16]


@pytest.mark.usefixtures("scripts")
def test_targets_by_device_and_precision() -> None:
    from train_step import target

    assert [target("cuda", "tf32", width) for width in (400, 1200, 2000, 8)] == [100, 50, 30, None]
    assert target("cuda", "fp32", 400) is None
    assert [target("cpu", "fp32", width) for width in (200, 8)] == [1.3, 1.0]


@pytest.mark.usefixtures("scripts")
def test_ours_leaves_batchnorm_without_a_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    import peers

    made: list[posterity.BGD] = []
    real = posterity.BGD
    monkeypatch.setattr(posterity, "BGD", lambda *args, **more: made.append(real(*args, **more)) or made[-1])
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10))
    loss = peers.bgd_ours(model, peers.Loss("bf16", "cpu"), *peers.batch([6, 3, 8, 8], "cpu"), samples=2)()
    assert torch.isfinite(loss)
    assert sorted(made[0].posterior().blocks) == ["0.bias", "0.weight", "3.bias", "3.weight"]


def test_pruned_units_are_measured_by_their_files_and_errors(tmp_path: Path) -> None:
    cell = next(each for each in sparse.lenet_cells(quick=True) if each.method == "sparse-vd")
    config = {**cell.config, "epochs": 20}
    unit = Unit("sparse-lenet", cell.setting, cell.method, 0, config, "")
    metrics = sparse.train(unit, "cpu", tmp_path, lambda *seen: None).metrics
    out = tmp_path / "record.json"
    bench.run("smaller", ["--units", str(tmp_path), "--batches", "1", "--out", str(out), *QUICK])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["errors"]["whole net"] == pytest.approx(metrics["error"])
    assert row["errors"]["shrunk"] == pytest.approx(metrics["error"])
    assert len(row["architecture"]) == 3
    assert row["files"]["rounded"]["safetensors"] < row["files"]["shrunk"]["safetensors"]
    assert row["files"]["shrunk"]["safetensors"] <= row["files"]["whole net"]["safetensors"]
    assert row["looks"]["evaluations"] == 1


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(
    ("error", "least", "met"), [(0.009, 50.0, True), (0.0091, 50.0, False), (0.0, 51.0, False)]
)
def test_the_aim_on_disk_is_at_an_error(error: float, least: float, met: bool) -> None:
    """Of the smallest files that there are, and of the worst error of them."""
    import smaller

    files = {"whole net": {"onnx": 500}, "shrunk": {"onnx": 25}, "rounded": {"onnx": 10}}
    found = smaller.disk({"files": files, "errors": {"shrunk": 0.0, "rounded": error}}, least)
    assert (found["ratios"], found["met"]) == ({"onnx": 50.0}, met)
    assert smaller.disk({"files": files}, 1.0)["met"] is None


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("left", [[8, 13, 88, 13], [5, 10, 76, 16], [20, 50, 800, 500]])
def test_random_nets_have_the_sizes_that_are_asked_for(left: list[int]) -> None:
    import smaller

    made = smaller.untrained("lenet5-caffe", 0.2, left, 2, "cpu")
    small = shrink(made.model, made.posterior, made.inputs)
    assert architecture(small.posterior) == left
    assert small.shapes.get("0.weight", (None, (20, 1, 5, 5)))[1][0] == left[0]
    assert small.shapes.get("2.weight", (None, (50, 20, 5, 5)))[1][:2] == (left[1], left[0])


@pytest.mark.usefixtures("scripts")
def test_sizes_that_a_net_does_not_have_are_refused() -> None:
    import smaller

    for left, words in (([8, 13], "2 sizes, but the net has 4 layers"), ([21, 1, 1, 1], "21 for 0.weight")):
        with pytest.raises(ValueError, match=words):
            smaller.untrained("lenet5-caffe", 0.2, left, 2, "cpu")


@pytest.mark.usefixtures("scripts")
def test_aims_are_of_nets_devices_and_batches() -> None:
    import smaller

    asked = [("lenet5-caffe", "cpu", 1), ("vgglike-0.5", "cpu", 128), ("vgglike", "cuda", 1024)]
    assert [smaller.aim(*each) for each in asked] == [5.0, 3.0, 2.0]
    assert smaller.aim("vgglike", "cuda", 128) is smaller.aim("mlp-30", "cpu", 1) is None


@pytest.mark.usefixtures("scripts")
def test_the_loop_over_networks_draws_from_the_posterior() -> None:
    import predict

    model = nn.Linear(3, 10)
    posterior = posterity.BGD(model, std_init=0.5).posterior()
    x, means = torch.ones(4, 3), posterior.mean()
    mean = (means["weight"] @ x[0] + means["bias"]).clone()
    outputs = predict.looped(model, posterior, x, samples=400, size=3, bf16=False)
    assert outputs.shape == (400, 4, 10)
    std = 0.5 * 2  # of three weights and a bias
    assert bool(((outputs[:, 0].mean(0) - mean).abs() < 5 * std / 20).all())
    assert bool(((outputs[:, 0].std(0) - std).abs() < 5 * std / 28).all())


def test_columns_take_turns_and_long_rows_end_after_two_rounds() -> None:
    log: list[str] = []
    columns = {
        "a": Column(lambda: log.append("a"), "fp32", steps=1),
        "b": Column(lambda: log.append("b"), "bf16", steps=2, warm_up=lambda: log.append("warm")),
    }
    times = measure(columns, "cpu", rounds=3, round_seconds=1.0, row_seconds=100.0)
    assert "".join(log) == "aaa" + "warm" * 3 + "abb" * 3
    assert [times["b"][key] for key in ("rounds", "steps", "setting")] == [3, 2, "bf16"]
    assert measure(columns, "cpu", rounds=9, round_seconds=1.0, row_seconds=0.0)["a"]["rounds"] == 2


def test_the_median_of_the_rounds_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, durations = [0.0], iter([1.0] * bench._WARM_UP + [7.0, 2.0, 3.0, 9.0, 4.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def step() -> None:
        clock[0] += next(durations)

    found = measure({"a": Column(step, "fp32", steps=1)}, "cpu", rounds=5, round_seconds=1.0, row_seconds=1e9)
    assert [found["a"][key] for key in ("value", "lowest", "highest", "rounds")] == [4000, 2000, 9000, 5]


def test_a_round_has_as_many_steps_as_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def tick() -> None:
        clock[0] += 0.25

    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    found = measure({"a": Column(tick, "fp32")}, "cpu", rounds=2, round_seconds=2.0, row_seconds=100.0)["a"]
    assert (found["steps"], found["value"]) == (8, 250.0)


@pytest.mark.parametrize(
    ("bounds", "met"),
    [({}, None), ({"at_least": 2.0}, True), ({"at_least": 2.1}, False), ({"at_most": 1.9}, False)],
)
def test_a_ratio_meets_its_target_or_not(bounds: dict[str, float], met: bool | None) -> None:
    found = Ratio("a", "b", **bounds).of_columns({"a": {"value": 4.0}, "b": {"value": 2.0}})
    assert (found["value"], found["met"]) == (2.0, met)


def cell(milliseconds: float) -> dict[str, Any]:
    keys = ("value", "lowest", "highest")
    return {**dict.fromkeys(keys, milliseconds), "rounds": 2, "steps": 1, "setting": "fp32"}


def test_the_record_is_there_after_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    record = Record("some", parser("?").parse_args(["--out", str(out)]), "ms per step", "ours")
    assert not out.exists()
    ratios = [Ratio("peer", "ours", at_least=2.5), Ratio("ours", "not measured")]
    record.add("a case", "fp32", {"peer": cell(4.0), "ours": cell(2.0)}, ratios)
    found = json.loads(out.read_text())
    assert (found["complete"], len(found["rows"]), len(found["rows"][0]["ratios"])) == (False, 1, 1)
    record.close()
    assert json.loads(out.read_text())["complete"]
    plain, *_, target, _, _ = capsys.readouterr().out.splitlines()
    assert plain == "a case, fp32 [ms per step]: peer 4; ours 2; peer / ours 2 (≥ 2.5: missed)"
    assert [part.strip() for part in target.split("│")[3:6]] == ["peer / ours", "2.00", "(≥ 2.5: missed)"]


def test_unwritable_record_is_refused_before_anything_runs(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "train_step", "--out", str(tmp_path / "no" / "r.json")])
    assert result.exit_code == 2
    assert "r.json: choose a file in a folder that exists" in result.stderr.replace("\n", "")


def test_bench_command_lists_and_refuses_names() -> None:
    runner = CliRunner()
    for arguments in ([], ["--help"]):
        said = runner.invoke(app, ["bench", *arguments]).stdout
        assert "conv_step, first_try, gradient_step, gradient_variance, growth" in said
    assert "--plot-only RECORD" in runner.invoke(app, ["bench", "growth", "--help"]).stdout
    wrong = runner.invoke(app, ["bench", "train"])
    assert (wrong.exit_code, wrong.stderr.strip()) == (
        2,
        "there is no benchmark 'train', did you mean 'train_step'?",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train_step", "--samples", "0"], "must be a whole number of at least 1, not 0"),
        (["train_step", "--precision", "tf32"], "a CPU has no tf32: choose fp32"),
        (["conv_step", "--settings", "fp32 nhwc"], "is no precision (fp32, tf32, bf16) and layout (nchw"),
        (["conv_step", "--nets", "vgg12"], "there is no net 'vgg12', did you mean 'vgg11'?"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_outside_a_checkout_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="run them in a checkout of the source"):
        bench.run("train_step", [])


DOCUMENTS = [
    "README.md",
    "docs/benchmarks.md",
    "docs/distributed.md",
    "docs/first-try.md",
    "docs/results.md",
    "docs/trust.md",
]


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_are_those_of_the_records(document: str) -> None:
    import headline

    assert set(headline.TABLES) == set(DOCUMENTS)
    text = (headline.ROOT / document).read_text()
    assert headline.renewed(document) == text, "run: posterity bench headline --write"


@pytest.mark.parametrize("method", ["bgd", "ivon", "vogn", "bbb"])
def test_five_epochs_of_mnist_are_those_of_the_records(method: str) -> None:
    root = bench.FOLDER.parent
    folder, page = root / "results" / "mnist-5-epochs" / method, (root / "docs" / "results.md").read_text()
    found = json.loads((folder / "evaluation.json").read_text())
    epochs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    average, odd = found["modes"]["average"], found["ood"]["mutual_information"]
    values = [
        f"{100 * (1 - average['accuracy']):.2f} %",
        *(
            f"{value:.{digits}f}"
            for value, digits in ((average["nll"], 4), (average["ece"], 4), (odd["auroc"], 3))
        ),
        f"{sum(epoch['seconds'] for epoch in epochs) / len(epochs):.0f}",
    ]
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{method}` (K")]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == values
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("scripts")
def test_tables_of_sparse_nets_show_what_is_removed(tmp_path: Path) -> None:
    import reproduced

    def run(study: str, setting: str, method: str, seed: int, **metrics: Any) -> None:
        (tmp_path / study).mkdir(exist_ok=True)
        record = {"setting": setting, "method": method, "seed": seed, "trial": None, "config": {"epochs": 9}}
        path = tmp_path / study / f"{setting}-{method}-{seed}.json"
        path.write_text(json.dumps({**record, "metrics": metrics}))

    sizes = {"1.weight": 100, "3.weight": 50}
    for seed, kept in enumerate((4, 8)):
        left = {"1.weight": kept, "3.weight": 5}
        shared = {
            "error": 0.01,
            "compression": 150 / (kept + 5),
            "sizes": sizes,
            "kept": left,
            "weights": 150,
        }
        run("sparse-lenet", "300-100", "sparse-vd", seed, **shared)
    cells = reproduced.sparse(tmp_path).splitlines()[-1].split(" | ")
    assert cells[1:] == [
        "sparse VD",
        "1.00 ± 0.00",
        "14.1 ± 3.6×",
        "94.0 – 90.0",
        "1.92 % / 68×",
        "9 epochs, 2 seeds |",
    ]
    rounded = {"architecture": [8, 13], "by_pruning": 9.0, "error_small": 0.01}
    run("sparse-groups", "lenet5", "gnj", 0, **rounded, by_bits=30.0, error_rounded=0.02)
    run("sparse-groups", "lenet5", "l0", 0, **rounded, by_bits=None, error_rounded=None)
    rows = [line.split(" | ")[1:7] for line in reproduced.units(tmp_path).splitlines()[2:]]
    assert rows == [
        ["GNJ", "8-13", "9.0×", "30.0×", "1.00", "2.00"],
        ["L0 gates", "8-13", "9.0×", "–", "1.00", "–"],
    ]
    labels = {"train_accuracy": 0.1, "accuracy": 0.11, "weights": 150}
    run("sparse-random-labels", "300-100", "sparse-vd", 0, **labels, kept={"1.weight": 0, "3.weight": 15})
    assert " | 10.0 | 11.0 | 90.00 | " in reproduced.random_labels(tmp_path)


@pytest.mark.usefixtures("scripts")
def test_tables_of_gradient_methods_show_runs_and_trials(tmp_path: Path) -> None:
    import by_gradient

    def leave(study: str, setting: str, method: str, metrics: Any, trial: Any = None, seed: int = 0) -> None:
        (tmp_path / study).mkdir(exist_ok=True)
        record = {"setting": setting, "method": method, "seed": seed, "trial": trial, "n": 8000}
        record |= {
            "config": {"epochs": 9},
            "metrics": metrics,
            "diverged": "nan" if metrics is None else None,
        }
        tried = "" if trial is None else "trial-"
        name = f"{tried}{setting}-{method}-{seed}-{trial}".replace(" ", "-")
        (tmp_path / study / f"{name}.json").write_text(json.dumps(record))

    for seed in (0, 1):
        leave(
            "incremental-mnist",
            "mnist",
            "ffg",
            {"accuracy": 0.98 + 0.01 * seed, "nll": 0.04, "ece": 0.004},
            seed=seed,
        )
    assert "| mnist | FFG | 98.5 ± 0.7, 0.040 ± 0.000, 0.004 ± 0.000 |" in by_gradient.incremental(tmp_path)
    leave("bbb-bandit", "mushrooms", "thompson", {"regret": 3295.0, "reward_share": 0.838})
    assert by_gradient.bandit(tmp_path).splitlines()[-1] == (
        "| Thompson sampling | 3295 | 83.8 | 8,000 mushrooms, 1 seed |"
    )
    some = [{"networks": count, "accuracy": 0.99, "nll": 0.1 / count} for count in (1, 2, 5, 10, 100)]
    leave("uncertainty-samples", "mnist", "mnf", {"by_networks": some})
    leave("uncertainty-samples", "mnist", "adam", {"by_networks": some[:1]})
    mnf, adam = by_gradient.networks(tmp_path).splitlines()[2:]
    assert mnf.startswith("| MNF | 99.00, 0.1000 | 99.00, 0.0500 | 99.00, 0.0200 |")
    assert adam == "| Adam | 99.00, 0.1000 | – | – | – | – | 9 epochs, 1 seed |"
    for value, error in ((0.5, 0.0172), (2.0, 0.0247)):
        leave(
            "sparse-lenet",
            "300-100 chosen",
            "sparse-vd",
            {"error": error, "compression": 10 * value},
            {"kl_factor": value},
        )
    leave("sparse-lenet", "300-100 chosen", "sparse-vd", None, {"kl_factor": 8.0})
    assert by_gradient.trade_off(tmp_path).splitlines()[-1] == (
        "| 300-100 | sparse VD | kl factor 0.5, 2, 8 | 1.72 at 5.0×; 2.47 at 20.0×; diverged |"
    )
    for width in ("400", "800", "1200"):
        for lr in (0.1, 0.2):
            leave("bbb-mnist", width, "bbb", {"averaged_accuracy": 0.98 + lr / 100}, {"lr": lr})
    leave("bbb-mnist", "400", "sgd", {"averaged_accuracy": 0.9}, {"lr": 0.1})  # not at every width yet
    assert by_gradient.best_trials(tmp_path).splitlines()[2:] == ["| BBB | 1.80 | 1.80 | 1.80 |"]
    curve = {"fractions": [0.0, 0.5, 0.75, 0.9, 0.95, 0.98], "errors": [0.01, 0.02, 0.03, 0.9, 0.04, 0.05]}
    ran = {"errors": {"average": 0.0144, "single": 0.0189}, "pruning": {"average": curve}}
    leave("bbb-mnist", "1200", "bbb-mixture", ran)
    leave("bbb-mnist", "1200 to prune by Adam", "bbb-mixture", ran)
    assert by_gradient.blundell(tmp_path).splitlines()[2:] == [
        "| BBB (mixture prior) | – | – | 1.44 (1.89) | 1.36 / 1.34 / 1.32 | 9 epochs, 1 seed |"
    ]
    assert by_gradient.pruned_runs(tmp_path).splitlines()[3:] == [
        "| BBB (mixture prior) | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 | 9 epochs, 1 seed |",
        "| BBB (mixture prior) to prune by Adam | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 | 9 epochs, 1 seed |",
    ]
    tried = {"std_init": 0.05, "kl_factor": 0.3}
    leave("bbb-mnist", "1200 to prune by Adam", "bbb-mixture", {"pruning": {"average": curve}}, tried)
    leave("bbb-mnist", "1200 to prune by SGD", "bbb-mixture", None, tried)
    assert by_gradient.pruning_trials(tmp_path).splitlines()[2:] == [
        "| Adam | 0.05 | 0.3 | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 |",
        "| SGD | 0.05 | 0.3 | diverged | – | – | – | – |",
    ]


@pytest.mark.usefixtures("scripts")
def test_speed_table_shows_the_fastest_setting_of_complete_records(tmp_path: Path) -> None:
    import headline

    def row(setting: str, ours: float, met: bool | None) -> dict[str, Any]:
        ratio = {
            "of": "peer",
            "to": "ours",
            "value": 8.0 / ours,
            "met": met,
            "at_least": 3.0,
            "at_most": None,
        }
        untargeted = {"of": "ours", "to": "peer", "value": ours / 8.0, "met": None}
        columns = {"peer": cell(8.0), "ours": cell(ours)}
        return {"case": "a net", "setting": setting, "columns": columns, "ratios": [ratio, untargeted]}

    record = {
        "benchmark": "step",
        "unit": "ms per step",
        "ours": "ours",
        "statistic": "median",
        "complete": True,
        "config": {"device": "cuda"},
        "rows": [row("fp32", 4.0, False), row("tf32", 2.0, True), row("bf16", 1.0, None)],
        "environment": {"gpu": "NVIDIA H200", "torch": "2.11", "commit": "0123456789-dirty"},
    }
    (tmp_path / "one.json").write_text(json.dumps(record))
    (tmp_path / "two.json").write_text(json.dumps({**record, "complete": False}))
    head, _, line, without_aim, _, source = headline.speed(tmp_path).splitlines()
    assert head.startswith("| what | where |")
    assert line == "| a net | H200, tf32 | peer 8 ms | ours 2 ms | 4 | ≥ 3 |"
    assert without_aim == "| a net | H200, tf32 | ours 2 ms | peer 8 ms | 0.25 | – |"
    link = "[one.json](../benchmarks/results/one.json)"
    assert source == f"- {link}: median of 2 rounds, torch 2.11, commit 0123456789-dirty"
    missed = headline.missed(tmp_path).splitlines()[2:]
    assert missed == ["| a net | H200, fp32 | peer 8 ms | ours 4 ms | 2 | ≥ 3, missed |"]
    place = {**record["environment"], "ended": "2026-11-19T15:52:35+00:00"}
    later = {**record, "rows": [row("tf32", 1.6, True)], "environment": place}
    (tmp_path / "a-later-one.json").write_text(json.dumps(later))
    assert "| ours 1.6 ms | 5 | ≥ 3 |" in headline.speed(tmp_path)
    assert "ours 2 ms" not in headline.speed(tmp_path)
    assert headline.missed(tmp_path).splitlines()[2:] == []
    with pytest.raises(ValueError, match="there is no place for the table 'speed'"):
        headline.written("# Title\n", "speed", "table")


@pytest.mark.usefixtures("scripts")
def test_headline_rows_name_every_method_that_was_run(tmp_path: Path) -> None:
    import headline
    import reproduced

    def keep(
        study: str, setting: str, method: str, seed: int, metrics: dict[str, Any], trial: Any = None
    ) -> None:
        folder = tmp_path / study
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "setting": setting,
            "method": method,
            "seed": seed,
            "trial": trial,
            "diverged": None if metrics else "the loss is nan",
            "config": {"epochs": 7},
            "metrics": metrics,
        }
        (folder / f"{setting}-{method}-{seed}-{trial}.json").write_text(json.dumps(record))

    calibrated = {"accuracy": 0.8, "nll": 0.5, "ece": 0.02}
    better = {"accuracy": 0.9, "nll": 0.25, "ece": 0.01}
    keep("vogn-cifar10", "resnet18", "vogn", 0, calibrated)
    keep("vogn-cifar10", "resnet18", "mc-dropout", 0, better)
    keep("vogn-cifar10", "resnet18", "vogn", 1, better, trial={"lr": 0.1})  # a trial is no result
    _, ours, others, paper, runs = headline.calibration_row(tmp_path)
    assert (ours, others) == ("VOGN 80.0, 0.500, 0.020", "MC dropout 90.0, 0.250, 0.010")
    assert (paper, runs) == ("84.27, 0.477, 0.040", "7 epochs, 1 seed")

    for width in ("400", "800", "1200"):
        for seed, single in enumerate((0.017, 0.018)):
            errors = {"errors": {"single": single}}
            keep("earlier/bgd-mnist", width, "bgd", seed, errors)
            keep("bgd-mnist", width, "bgd", seed, {"errors": {"single": single - 0.001}})
        keep("bgd-mnist", width, "sgd", 0, {"errors": {"single": 0.015}})
        for number, method in enumerate(("bbb", "bbb-mixture", "sgd-dropout")):
            both = {"single": 0.01 * (number + 1), "average": 0.02 * (number + 1)}
            keep("bbb-mnist", width, method, 0, {"errors": both})
    _, ours, others, _, runs = headline.error_row(tmp_path)
    first, second = " / ".join(["1.75 ± 0.07"] * 3), " / ".join(["1.65 ± 0.07"] * 3)
    assert ours == f"BGD, paper's rule {first}; η 1.8 and a temperature {second}"
    dropout = "SGD with dropout 3.00 / 3.00 / 3.00"
    own = "BBB 1.00 / 1.00 / 1.00; BBB (mixture prior) 2.00 / 2.00 / 2.00"
    assert others == f"SGD 1.50 / 1.50 / 1.50; in the runs of the next row {own}; {dropout}"
    assert runs.endswith("7 epochs, 2 seeds; SGD: 7 epochs, 1 seed")
    _, ours, others, paper, _ = headline.averaged_row(tmp_path)
    assert ours == "BBB 2.00 / 2.00 / 2.00; BBB (mixture prior) 4.00 / 4.00 / 4.00"
    assert (others, paper) == (
        "SGD with dropout 6.00 / 6.00 / 6.00",
        "1.82 / 1.99 / 2.04; 1.36 / 1.34 / 1.32",
    )

    def pruned(before: float, after: float) -> dict[str, Any]:
        return {
            "pruning": {"single": {"fractions": [0.0, 0.95], "errors": [before, after], "unpruned": before}}
        }

    keep("earlier/bgd-mnist", "1200 to prune", "bgd", 0, pruned(0.02, 0.024))
    keep("bgd-mnist", "1200 to prune", "bgd", 0, pruned(0.025, 0.025))
    keep("bgd-mnist", "1200 to prune", "sgd", 0, pruned(0.015, 0.15))
    _, ours, others, _, _ = headline.pruning_row(tmp_path)
    assert (ours, others) == ("BGD 1.00 (2.50 → 2.50 %)", "SGD 10.00 (1.50 → 15.00 %)")

    earlier = "earlier/second-rule/bgd-permuted"
    for study, method, kept in (("bgd-permuted", "si", 0.93), (earlier, "si", 0.9), (earlier, "ewc", 0.95)):
        keep(study, "200", method, 0, {"accuracy": kept})
    keep("bgd-permuted", "200", "bgd", 0, {"accuracy": 0.94})
    keep("bgd-permuted", "200", "bgd", 1, {})
    _, ours, others, _, runs = headline.continual_row(tmp_path)
    diverged = "94.0 (1 of 2 diverged)"
    assert (ours, others) == (f"BGD (not told of switches) {diverged} / –", "SI (told) 93.0 / –")
    assert runs == "BGD: 7 epochs, 2 seeds; SI (told): 7 epochs, 1 seed"
    assert reproduced.permuted(tmp_path).splitlines()[2:] == [
        f"| 2×200 | BGD | {diverged} | 7 epochs, 2 seeds | a rule fixed beforehand |",
        "| 2×200 | SI (told) | 93.0 | 7 epochs, 1 seed | a rule fixed beforehand |",
        "| 2×200 | EWC (told) | 95.0 | 7 epochs, 1 seed | an earlier rule |",
    ]


@pytest.mark.usefixtures("scripts")
def test_a_projection_adds_what_is_sent_to_what_was_measured(tmp_path: Path) -> None:
    import sent

    def keep(name: str, rows: list[dict[str, Any]]) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"complete": True, "rows": rows}))

    for rule, ours in (("ivon", 11.0), ("vogn", 12.0)):
        columns = {"compile_step": {"value": ours}, "Adam in a CUDA graph": {"value": 10.0}}
        case = f"{rule.upper()} K = 1, resnet18, one graph"
        keep(f"{rule}_step-h200", [{"case": case, "columns": columns}])
    sends = {"Adam, ddp": 2.0, "ivon, mesh": 4.0, "ivon-10, mesh": 2.2, "vogn, mesh": 4.0}
    model = {name: {"a link": ms} for name, ms in sends.items()}
    row = {"case": "resnet18, 128 processes", "parameters": sent.RESNET50, "model_ms": model}
    keep("scale-cpu", [row])
    # (11 + 4) / (10 + 2) and (11 + 4) / 10, and so on.
    first, second, third, *others = sent.projected(tmp_path).splitlines()[2:]
    assert first == "| ResNet-18 | IVON | 1.25 to 1.50 |"
    assert second == "| ResNet-18 | IVON, `second_every=10` | 1.10 to 1.32 |"
    assert third == "| ResNet-18 | VOGN | 1.33 to 1.60 |"
    # A net of as many parameters that takes longer: nothing else is sent.
    total, adam = 12.0 * sent.OPERATIONS + 4.0, 10.0 * sent.OPERATIONS
    assert others[2] == f"| ResNet-50 | VOGN | {total / (adam + 2.0):.2f} to {total / adam:.2f} |"


def test_operations_of_resnet18_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    net = nets.build("resnet18", [3, 32, 32], 10).to("meta")
    with FlopCounterMode(display=False) as counter:
        net(torch.empty(1, 3, 32, 32, device="meta"))
    assert counter.get_total_flops() / 2e9 == pytest.approx(0.555, abs=5e-4)


def test_group_of_one_process_is_measured_against_no_group(tmp_path: Path) -> None:
    out = tmp_path / "alone.json"
    options = ["--alone", "--net", "lenet5", "--batch", "4", "--rounds", "1", "--round-seconds", "0.01"]
    bench.run("scale", [*options, "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"] for row in rows] == [f"{rule} K = 1, lenet5" for rule in ("VOGN", "IVON", "BGD")]
    for row in rows:
        (ratio,) = row["ratios"]
        of, to = (row["columns"][ratio[key]]["value"] for key in ("of", "to"))
        assert ratio["value"] == of / to
        assert (ratio["of"], ratio["to"]) == ("group of one", "no group")
