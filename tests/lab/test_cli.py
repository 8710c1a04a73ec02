import csv
import dataclasses
import inspect
import json
import os
import shutil
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import posterity
from posterity import DivergenceWarning, Prediction
from posterity.compress import csr
from posterity.optim.presets import TABLE
from posterity_lab import bench, cli, console, data, demo, errors, files, record, reproduce, runs
from posterity_lab.config import Config

TINY = ("--net", "mlp-16", "--data", "digits", "--epochs", "2", "--batch-size", "64", "--eval-samples", "3")
COLUMNS = ["label", "confidence", "entropy", "expected_entropy", "mutual_information"]


def call(*args: object):
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def refused(*args: object) -> str:
    """The one sentence that a command refuses its arguments with."""
    result = call(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    return result.stderr.strip()


def table(file: Path) -> list[dict[str, str]]:
    with file.open() as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "bgd"
    result = call("train", "--method", "bgd", *TINY, "--samples", 4, "--out", folder)
    assert result.exit_code == 0, result.output
    assert "epoch 2, test error" in result.stdout
    return folder


@pytest.fixture(scope="module")
def point(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "adam"
    assert call("train", "--method", "adam", *TINY, "--out", folder).exit_code == 0
    return folder


def test_train_has_a_flag_for_every_key_of_the_config():
    flags = set(inspect.signature(cli.train).parameters) - {"ctx", "out", "config", "resume"}
    assert flags == {field.name for field in dataclasses.fields(Config)}


def test_train_takes_a_file_and_flags_win(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('method = "adam"\nnet = "mlp-4"\ndata = "digits"\nepochs = 3\nlr = 0.01\n')
    assert call("train", "--config", file, "--epochs", 1, "--out", tmp_path / "run").exit_code == 0
    config = runs.stored(tmp_path / "run")
    assert (config.method, config.net, config.epochs, config.lr) == ("adam", "mlp-4", 1, 0.01)


def test_resume_needs_no_flags_and_refuses_others(run):
    result = call("train", "--out", run, "--resume")
    assert result.exit_code == 0, result.output
    assert call("train", *TINY, "--out", run, "--resume").exit_code == 0
    assert "has std_init = None, not 0.1" in refused("train", "--out", run, "--resume", "--std-init", 0.1)
    lr = TABLE["BGD"]["default"]["lr"]
    assert f"has lr = {lr}, not 77.0" in refused("train", "--out", run, "--resume", "--lr", 77)
    assert "has method = bgd, not ivon" in refused("train", "--out", run, "--resume", "--method", "ivon")


def test_mistakes_are_one_sentence(run, tmp_path):
    new = tmp_path / "new"
    assert (
        refused("train", "--out", run)
        == f"{run} holds a run already: continue it with --resume or name another folder"
    )
    assert (
        refused("train", "--out", new, "--method", "bdg") == "there is no method 'bdg', did you mean 'bgd'?"
    )
    assert refused("train", "--out", new, "--lr", -1) == "lr must be a finite number greater than 0, not -1.0"
    assert (
        refused("train", "--out", new, "--data", "minst")
        == "there is no data set 'minst', did you mean 'mnist'?"
    )
    assert refused("evaluate", new) == f"there is no run in {new}: train one there first"
    assert refused("train", "--out", new, "--resume") == f"there is no run in {new}: train one there first"
    assert not new.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("lr = " + "[" * 50_000, "is nested too deeply: write keys at its top level"),
        ("[train]\nlr = 0.1", "there is no key 'train'"),
        ("[lr]\nvalue = 0.1", "lr must be a finite number greater than 0, not {'value': 0.1}"),
        ("method = ['bgd']", "method must be a text, not ['bgd']"),
    ],
)
def test_a_nested_config_is_refused_in_one_sentence(tmp_path, content, message):
    file = tmp_path / "run.toml"
    file.write_text(content)
    assert message in refused("train", "--config", file, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["epoch", "num_data", "classes", "shape"])
def test_text_for_a_number_in_a_checkpoint_is_one_error(run, tmp_path, key):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.pt"
    runs.save(path, torch.load(path, weights_only=True) | {key: "text"})
    assert refused("evaluate", tmp_path / "run").endswith("damaged: train again in another folder")
    assert refused("train", "--out", tmp_path / "run", "--resume").endswith("train again in another folder")


def test_a_stopped_command_says_how_to_resume(monkeypatch, tmp_path):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "train", stop)
    result = call("train", "--out", tmp_path / "run", *TINY)
    assert result.exit_code == 130
    assert result.stderr == f"stopped: resume with posterity train --out {tmp_path / 'run'} --resume\n"
    monkeypatch.setattr(reproduce, "reproduce", stop)
    result = call("reproduce", "bgd-theory", "--out", tmp_path)
    assert result.exit_code == 130
    assert result.stderr == "stopped: the same command resumes from here\n"
    monkeypatch.setattr(files, "fetch", stop)
    assert call("data", "fetch", "mnist").stderr == "stopped: the same command resumes from here\n"
    monkeypatch.setattr(demo, "run", stop)
    assert (
        call("demo").stderr == "stopped: nothing was kept; the same command starts again from the beginning\n"
    )
    monkeypatch.setattr(bench, "run", stop)
    expected = "stopped: the record has the rows measured so far, marked as incomplete; run the same "
    assert call("bench", "memory").stderr == f"{expected}command again\n"


def test_evaluations_are_counted_and_sealed(point, tmp_path):
    shutil.copytree(point, tmp_path / "run")
    first, second = (json.loads(call("evaluate", tmp_path / "run", "--json").stdout) for _ in range(2))
    assert [each["looks"]["evaluations"] for each in (first, second)] == [2, 3]
    assert record.fits(first)
    assert len(first["environment"]["source"]) == 64


def test_unexpected_error_keeps_its_traceback(monkeypatch, run):
    def broken(folder, device):
        raise ZeroDivisionError

    monkeypatch.setattr(runs, "load_run", broken)
    assert isinstance(call("evaluate", run).exception, ZeroDivisionError)


def test_a_traceback_can_be_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("POSTERITY_TRACEBACK", "1")
    assert isinstance(call("evaluate", tmp_path).exception, FileNotFoundError)


def test_evaluate_prints_four_modes_of_inference(run):
    result = call("evaluate", run)
    assert result.exit_code == 0, result.output
    for word in (
        "average",
        "mean",
        "single",
        "vote",
        "accuracy",
        "nll",
        "brier",
        "ece",
        "bgd on digits, 3 networks",
    ):
        assert word in result.stdout


def test_evaluate_as_json_agrees_with_training(run):
    result = call("evaluate", run, "--json")
    report = json.loads(result.stdout)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert set(report["modes"]) == {"average", "mean", "single", "vote"}
    for key in ("accuracy", "nll", "ece"):
        assert report["modes"]["average"][key] == pytest.approx(last[key], rel=1e-5)
    assert report["modes"]["mean"] != report["modes"]["single"]
    assert json.loads(call("evaluate", run, "--json", "--samples", 5).stdout)["samples"] == 5


def test_evaluate_detects_other_data(run, point):
    ood = json.loads(call("evaluate", run, "--json", "--ood", "digits").stdout)["ood"]
    # A set is not odd to itself: the score cannot tell it apart.
    assert ood["data"] == "digits"
    assert ood["entropy"]["auroc"] == ood["mutual_information"]["auroc"] == pytest.approx(0.5)
    assert ood["entropy"]["fpr95"] == pytest.approx(0.95, abs=0.01)
    assert "mutual_information" in call("evaluate", run, "--ood", "digits").stdout
    assert set(json.loads(call("evaluate", point, "--json", "--ood", "digits").stdout)["ood"]) == {
        "data",
        "entropy",
    }


def test_evaluate_scores_uncertain_inputs_as_odd():
    sure = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0]])
    unsure = torch.zeros(3, 3)
    at_odds = 9.0 * torch.eye(3)[[0, 1, 2]]  # two networks that are sure of different classes
    inside = Prediction(torch.stack([sure, sure]))
    outside = Prediction(torch.stack([at_odds, at_odds.roll(1, 0)]))
    found = errors.detection(inside, outside)
    assert found == {name: {"auroc": 1.0, "fpr95": 0.0} for name in ("entropy", "mutual_information")}
    assert errors.detection(outside, inside)["entropy"]["auroc"] == 0.0
    # Networks that agree on not knowing: only the whole entropy tells them from sure ones.
    found = errors.detection(inside, Prediction(torch.stack([unsure, unsure])))
    assert found["entropy"] == {"auroc": 1.0, "fpr95": 0.0}
    assert found["mutual_information"]["auroc"] < 1.0


def test_evaluate_refuses_other_data_of_another_shape(run, monkeypatch):
    load = data.load

    def wide(name, device="cpu"):
        digits = load("digits", device=device)
        x = digits.test.x if name == "digits" else digits.test.x.repeat(1, 3, 1, 1)
        return dataclasses.replace(digits, test=data.Split(x, digits.test.y))

    monkeypatch.setattr(data, "load", wide)
    assert refused("evaluate", run, "--ood", "svhn").startswith(
        "svhn and digits have images of shapes [3, 8, 8] and [1, 8, 8]"
    )


def test_evaluate_of_one_network_has_one_mode(point):
    report = json.loads(call("evaluate", point, "--json").stdout)
    assert set(report["modes"]) == {"mean"}
    assert report["samples"] == 1
    assert call("evaluate", point).stdout.splitlines()[0].strip() == "adam on digits, 1 network"


@pytest.mark.parametrize("kind", [".pt", ".safetensors", ".npy"])
def test_predict_writes_a_row_for_every_input(run, tmp_path, kind):
    x = runs.data.load("digits").test.x[:7]
    file = tmp_path / f"x{kind}"
    if kind == ".pt":
        torch.save(x, file)
    elif kind == ".safetensors":
        save_file({"x": x}, file)
    else:
        np.save(file, x.numpy())
    result = call("predict", run, file)
    assert result.exit_code == 0, result.output
    rows = table(tmp_path / f"x{kind}.predictions.csv")
    assert list(rows[0]) == COLUMNS
    read = runs.load_run(run)
    wanted = runs.methods.predictions(read.model, read.posterior, x, read.config)
    assert [int(row["label"]) for row in rows] == wanted.label.tolist()
    for key in ("entropy", "expected_entropy", "mutual_information"):
        assert [float(row[key]) for row in rows] == pytest.approx(getattr(wanted, key).tolist())
    assert [float(row["confidence"]) for row in rows] == pytest.approx(wanted.probs.amax(-1).tolist())


def test_predict_of_one_network(point, tmp_path):
    torch.save(torch.zeros(2, 1, 8, 8), tmp_path / "x.pt")
    assert call("predict", point, tmp_path / "x.pt", "--out", tmp_path / "y.csv").exit_code == 0
    assert [row["mutual_information"] for row in table(tmp_path / "y.csv")] == ["0.0", "0.0"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", None, "is none of .pt, .safetensors, .npy: save the inputs as one of these"),
        ("none.pt", None, "there is no file"),
        ("x.pt", {"a": torch.zeros(1), "b": torch.zeros(1)}, "must hold one tensor of inputs, not dict"),
        ("x.pt", torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "holds torch.uint8: pass floats"),
        ("x.pt", torch.zeros(2, 64), "holds inputs [2, 64]: the network takes [N, 1, 8, 8]"),
        ("x.pt", torch.zeros(0, 1, 8, 8), "holds inputs [0, 1, 8, 8]: the network takes [N, 1, 8, 8]"),
        ("x.pt", torch.full((2, 1, 8, 8), torch.nan), "holds inputs that are not finite"),
        ("x.pt", torch.full((2, 1, 8, 8), 255.0), "x.pt holds values up to 255: scale pixels to 0 … 1"),
        ("x.pt", torch.full((2, 1, 8, 8), -1.0), "x.pt holds values down to -1: scale pixels to 0 … 1"),
    ],
)
def test_predict_refuses_inputs_that_do_not_fit(run, tmp_path, name, content, message):
    if content is not None:
        torch.save(content, tmp_path / name)
    assert message in refused("predict", run, tmp_path / name)


class Trap:
    """Unpickling this makes a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_an_evil_file_is_refused_without_advice_to_trust_it(run, tmp_path):
    torch.save(Trap(tmp_path / "sprung"), tmp_path / "x.pt")
    message = refused("predict", run, tmp_path / "x.pt")
    reason = "save the tensor alone, or as .safetensors"
    assert (
        message
        == f"{tmp_path / 'x.pt'} is damaged or holds more than tensors, which might run code: {reason}"
    )
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "x.pt").replace(tmp_path / "run" / "checkpoint.pt")
    message = refused("evaluate", tmp_path / "run")
    assert message.endswith("checkpoint.pt is of another run or damaged: train again in another folder")
    assert not (tmp_path / "sprung").exists()


def test_predict_refuses_a_damaged_file(run, tmp_path):
    (tmp_path / "x.npy").write_bytes(b"no array")
    message = refused("predict", run, tmp_path / "x.npy")
    assert message.endswith("x.npy cannot be read as .npy: it holds no plain array")  # no advice on pickle


class Evil:
    """Would make a folder where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_predict_does_not_run_code_of_a_file_nor_advise_to(run, tmp_path):
    torch.save(Evil(tmp_path / "made"), tmp_path / "x.pt")
    told = refused("predict", run, tmp_path / "x.pt")
    assert "holds more than tensors, which might run code" in told
    assert "weights_only" not in told
    assert not (tmp_path / "made").exists()


def test_data_lists_and_verifies(tmp_path, monkeypatch):
    monkeypatch.setenv("POSTERITY_DATA", str(tmp_path))
    listed = dict(line.split(maxsplit=1) for line in call("data", "list").stdout.splitlines())
    assert listed["digits"] == "ok"
    assert listed["mnist"] == "missing"
    assert call("data", "verify", "digits").exit_code == 0
    result = call("data", "verify", "svhn")
    assert (result.exit_code, result.stdout) == (1, "svhn/test.npz: missing\n")
    assert "did you mean 'mnist'" in refused("data", "verify", "minst")
    assert call("data", "fetch", "digits").stdout == "digits is complete\n"
    assert "has no public download" in refused("data", "fetch", "svhn")


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from posterity_lab import cli\n"
        "assert CliRunner().invoke(cli.app, ['train', '--help']).exit_code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_demo_is_handed_its_folder(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setitem(
        sys.modules, "posterity_lab.demo", type("Demo", (), {"run": lambda *args: calls.append(args)})
    )
    assert call("demo", "--out", tmp_path, "--quick").exit_code == 0
    assert calls == [(tmp_path, True)]


def test_predict_needs_no_data(run, tmp_path, monkeypatch):
    torch.save(torch.zeros(1, 1, 8, 8), tmp_path / "x.pt")
    monkeypatch.setattr(data, "load", None)
    result = call("predict", run, tmp_path / "x.pt")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"1 prediction in {tmp_path / 'x.pt.predictions.csv'}\n"


def test_predict_looks_for_the_folder_of_its_csv_first(run, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "load_run", None)
    there = tmp_path / "none" / "o.csv"
    assert (
        refused("predict", run, tmp_path / "x.pt", "--out", there)
        == f"there is no folder {there.parent}: choose another --out"
    )
    assert (
        refused("predict", run, tmp_path / "x.pt", "--out", tmp_path)
        == f"{tmp_path} is a folder: choose another --out"
    )


def test_samples_are_refused_by_their_name(run, tmp_path):
    message = "samples must be a whole number of at least 1, not 0"
    assert refused("evaluate", run, "--samples", 0) == message
    assert refused("predict", run, tmp_path / "x.pt", "--samples", 0) == message


def test_paths_that_cannot_be_used_are_one_sentence(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    tiny = ("--net", "mlp-4", "--data", "digits", "--epochs", 1)
    assert (
        refused("train", *tiny, "--out", file / "foo")
        == f"{file / 'foo'} cannot be used (Not a directory): choose another path"
    )
    assert refused("train", *tiny, "--out", "/proc/foo").endswith("): choose another path")
    assert (
        refused("train", "--config", tmp_path, "--out", tmp_path / "new")
        == f"{tmp_path} cannot be read (Is a directory): choose another --config"
    )
    assert refused("demo", "--out", file) == f"{file} cannot be used (File exists): choose another path"
    assert refused("evaluate", file) == f"there is no run in {file}: train one there first"
    assert file.read_text() == "mine"


def test_a_missing_module_and_a_full_disk_are_one_sentence():
    missing = ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    assert console.sentence(missing) == "the command line needs sklearn: pip install 'posterity[lab]'"
    assert "(No space left on device): choose another path" in console.sentence(
        OSError(28, "No space left on device")
    )


def test_a_key_error_is_nothing_to_show_as_a_sentence(monkeypatch, run):
    def broken(folder, device):
        raise KeyError("shape")

    monkeypatch.setattr(runs, "load_run", broken)
    assert isinstance(call("evaluate", run).exception, KeyError)


def test_warning_is_one_sentence_without_source_line(monkeypatch, run):
    def warns(folder, device):
        warnings.warn("BGD seems to diverge: lower the learning rate", DivergenceWarning, stacklevel=1)
        raise ValueError("enough")

    monkeypatch.setattr(runs, "load_run", warns)
    shown = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = call("evaluate", run)
    assert result.stderr == "BGD seems to diverge: lower the learning rate\nenough\n"
    assert warnings.showwarning is shown


def test_version():
    assert call("--version").stdout == f"posterity {version('posterity')}\n"


def test_help_of_train_shows_the_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = " ".join(call("train", "--help").stdout.replace("│", " ").split())
    bgd, ivon, vogn = (TABLE[rule]["default"] for rule in ("BGD", "IVON", "VOGN"))
    for default in (
        "; bgd if not given",
        "; mlp-400-400 if not given",
        "; mnist if not given",
        "; 5 if not given",
        "; 128 if not given",
        f"; bgd {bgd['lr']:g}, ivon {ivon['lr']:g}, vogn {vogn['lr']:g}, bbb 0.001, sgd 0.1, adam 0.001 if",
        f"; bgd {bgd['std_scale']:g}, ivon {ivon['std_scale']:g}, vogn {vogn['std_scale']:g}, "
        f"bbb {TABLE['variational']['default']['std_scale']:g} if not given",
        f"; bgd {bgd['max_step']:g}, ivon {ivon['max_step']:g}, vogn {vogn['max_step']:g} if not given",
        "; derived for bgd, ivon, vogn, bbb if not given",
        f"; vogn {vogn['hess_init']:g}, derived for ivon if not given",
        "; derived for vogn if not given",
        "at 0.5 data counts twice; bgd 1, ivon 1, vogn 1 if not given",
    ):
        assert default in shown


def test_without_the_extra_the_script_says_what_to_install():
    script = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    assert script == {"posterity": "posterity_lab.command:main"}
    code = "import sys; sys.modules['typer'] = None; from posterity_lab.command import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "the command line needs the extra lab: pip install 'posterity[lab]'\n"


def test_compress_writes_a_smaller_net_and_what_it_costs(run, tmp_path):
    result = call("compress", run, "--out", tmp_path / "small", "--fraction", 0.6, "--format", "safetensors")
    assert result.exit_code == 0, result.output
    for words in ("multiply-adds", "bytes of the file", "ms, batch 128", "net.safetensors"):
        assert words in result.stdout
    found = json.loads((tmp_path / "small" / "compress.json").read_text())
    assert record.fits(found)
    assert found["after"]["weights"] < found["before"]["weights"]
    assert found["errors"]["pruned"]["error"] == pytest.approx(found["errors"]["shrunk"]["error"], abs=1e-9)
    assert set(found["errors"]) == {"whole", "pruned", "shrunk", "rounded"}
    assert found["file_bytes"]["after"] == (tmp_path / "small" / "net.safetensors").stat().st_size
    assert found["file_bytes"]["before"] > 2 * found["file_bytes"]["after"]
    assert found["looks"]["evaluations"] > 0
    stored = load_file(tmp_path / "small" / "net.safetensors")
    assert any(each.dtype is torch.int8 for each in stored.values())
    assert "is not an empty folder" in refused("compress", run, "--out", tmp_path / "small")
    for word in ("--groups", "--format"):
        assert "must be" in refused("compress", run, "--out", tmp_path / "other", word, "strange")
    assert not (tmp_path / "other").exists()


def test_compress_cuts_at_a_ratio_or_at_log_alpha(run, tmp_path):
    whole = runs.load_run(run)
    for number, (option, cut) in enumerate({"threshold": 1.0, "log_alpha": 0.0}.items()):
        out = tmp_path / str(number)
        words = ("--groups", "weights", f"--{option.replace('_', '-')}", cut)
        assert call("compress", run, "--out", out, *words).exit_code == 0
        left = posterity.prune(whole.posterior, **{option: cut}).kept()
        found = json.loads((out / "compress.json").read_text())
        assert found["options"][option] == cut
        assert found["options"]["fraction"] is None
        kept = posterity.Factorised.load(out / "posterior.safetensors").kept()
        last = next(name for name in reversed(left) if left[name].dim() > 1)
        assert int(kept[last].sum()) == int(left[last].sum()) > 0
    both = ("--fraction", 0.5, "--log-alpha", 1.0)
    assert "takes one of these" in refused("compress", run, "--out", tmp_path / "both", *both)
    assert not (tmp_path / "both").exists()


def test_a_net_without_posterior_is_compressed_by_magnitude(point, tmp_path):
    result = call("compress", point, "--out", tmp_path / "small", "--groups", "outputs", "--fraction", 0.3)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "small" / "compress.json").read_text())
    assert found["bits"] is None
    assert found["file_bytes"]["after"] > 0


def test_sparse_layers_are_reported_where_they_are_faster(run, tmp_path, monkeypatch):
    monkeypatch.setattr(csr, "_time", lambda function, *arguments: 0.1 if function is csr.product else 1.0)
    options = ("--groups", "weights", "--fraction", 0.9, "--format", "onnx")
    pytest.importorskip("onnxscript")
    result = call("compress", run, "--out", tmp_path / "small", *options)
    assert result.exit_code == 0, result.output
    assert "ms, batch 1, as CSR" in result.stdout
    found = json.loads((tmp_path / "small" / "compress.json").read_text())
    assert found["csr"]["128"]["weights"]
    assert found["csr"]["128"]["milliseconds"] > 0
