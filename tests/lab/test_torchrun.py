"""``posterity train`` and ``posterity reproduce`` in several processes, started as torchrun starts them."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from lab.processes import forked, launched
from posterity_lab import cli, runs
from posterity_lab.config import Config

NET = {"net": "mlp-16", "data": "digits", "epochs": 3, "batch_size": 64, "eval_samples": 3}


class Ended(NamedTuple):
    """What became of the processes of a command."""

    codes: list[int]
    said: list[str]


def together(folder: Path, words: list[str], world: int = 2, **more: str) -> Ended:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    context, said = forked(), [folder / f"said {rank}" for rank in range(world)]
    started = [
        context.Process(target=launched, args=(rank, world, port, words, said[rank]), kwargs=more)
        for rank in range(world)
    ]
    for each in started:
        each.start()
    for each in started:
        each.join(100)
    for each in started:
        if each.is_alive():
            each.kill()
    return Ended([each.exitcode for each in started], [path.read_text() for path in said])


def train(folder: Path, out: Path, **more: str) -> Ended:
    """A run of two processes, or the rest of one."""
    return together(folder, words(out, "ivon"), **more)


def words(out: Path, method: str, **keys: object) -> list[str]:
    flags = {"out": out, "method": method, **NET, **keys}
    return ["train", *(str(word) for key, value in flags.items() for word in (_flag(key), value))]


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def history(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "ivon"
    runs.train(Config(method="ivon", **NET), folder)
    return folder


def assert_near(one: Path, two: Path) -> None:
    """Two runs are the same to rounding."""
    for first, second in zip(history(one), history(two), strict=True):
        assert first["train_loss"] == pytest.approx(second["train_loss"], rel=1e-5)
        assert first["nll"] == pytest.approx(second["nll"], rel=1e-4)
    files = [folder / "checkpoint.pt" for folder in (one, two)]
    models = [torch.load(file, weights_only=True)["method"]["model"] for file in files]
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-3, atol=1e-5, msg=name)
    stored = [folder / "posterior.safetensors" for folder in (one, two)]
    assert len({file.exists() for file in stored}) == 1
    if stored[0].exists():
        first, second = map(load_file, stored)
        for name, value in first.items():
            torch.testing.assert_close(second[name], value, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("method", ["ivon", "vogn", "bbb", "sgd"])
def test_two_processes_train_what_one_trains(tmp_path: Path, alone: Path, method: str) -> None:
    one, two = alone if method == "ivon" else tmp_path / "one", tmp_path / "two"
    if method != "ivon":
        runs.train(Config(method=method, **NET), one)
    ended = together(tmp_path, words(two, method))
    assert ended.codes == [0, 0], ended.said
    assert "epoch 3" in ended.said[0]
    assert ended.said[1] == ""
    assert_near(one, two)
    assert not (two / "lock").exists()
    assert json.loads((two / "environment.json").read_text())["processes"] == 2


def test_processes_that_are_started_anew_go_on(tmp_path: Path, alone: Path) -> None:
    out = tmp_path / "run"
    first = train(tmp_path, out, DIES_IN_EPOCH="2")
    assert first.codes[1] == -signal.SIGKILL
    assert first.codes[0] != 0
    assert len(history(out)) == 2
    again = train(tmp_path, out, TORCHELASTIC_RESTART_COUNT="1")
    assert again.codes == [0, 0], again.said
    assert_near(alone, out)
    other = train(tmp_path, tmp_path / "undisturbed")
    assert other.codes == [0, 0], other.said
    one, two = (load_file(each / "posterior.safetensors") for each in (out, tmp_path / "undisturbed"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_what_the_first_process_refuses_ends_all(tmp_path: Path, alone: Path) -> None:
    ended = train(tmp_path, alone)
    assert ended.codes == [2, 2]
    assert "holds a run already" in ended.said[0]
    assert ended.said[1] == ""


def test_what_all_refuse_is_said_once(tmp_path: Path) -> None:
    ended = together(tmp_path, words(tmp_path / "run", "ivon", batch_size=4))
    assert ended.codes == [2, 2]
    assert "leave 1 for the last, and there are 2 processes: choose another batch_size" in ended.said[0]
    assert ended.said[1] == ""
    assert not (tmp_path / "run").exists()


def test_non_finite_loss_is_reported_by_one_process(tmp_path: Path) -> None:
    ended = together(tmp_path, words(tmp_path / "run", "sgd", lr=1e30))
    assert ended.codes == [2, 2]
    assert "the weights were not touched" in ended.said[0]
    assert ended.said[1] == ""


def test_processes_share_the_units_of_an_experiment(tmp_path: Path) -> None:
    out = tmp_path / "results"
    ended = together(tmp_path, ["reproduce", "bgd-figure4", "--quick", "--epochs", "1", "--out", str(out)])
    assert ended.codes == [0, 0], ended.said
    begun = [[line for line in said.splitlines() if line.startswith("[")] for said in ended.said]
    assert all(begun)
    numbers = sorted(line.partition("/")[0] for lines in begun for line in lines)
    assert len(set(numbers)) == len(numbers)
    assert len(list(out.rglob("*.json"))) == len(numbers)


@pytest.mark.parametrize("command", ["evaluate", "predict", "compress", "demo", "bench", "report", "data"])
def test_commands_of_one_process_refuse_several(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = {"evaluate": ["runs/x"], "predict": ["runs/x", "x.pt"], "compress": ["runs/x", "--out", "y"]}
    result = CliRunner().invoke(
        cli.app, [command, *words.get(command, []), *(["list"] * (command == "data"))]
    )
    assert result.exit_code == 2
    assert (
        result.stderr.split() == f"posterity {command} runs in one process: start it without torchrun".split()
    )
