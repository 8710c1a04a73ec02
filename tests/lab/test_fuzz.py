"""Random arguments and damaged files: every command ends with an answer or one sentence, never a traceback.

``POSTERITY_SLOW=1 pytest tests/lab/test_fuzz.py -s`` tries many more, and prints how many.
"""

import json
import os
import random
import shutil
import string
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from typer.testing import CliRunner

from posterity_lab import cli, demo, reproduce, runs
from posterity_lab.config import Config
from posterity_lab.record import sealed
from posterity_lab.reproduce import driver

TIMES = 5 if os.environ.get("POSTERITY_SLOW") else 1
# Warnings are for the user, who sees them as sentences; here nobody does.
pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = (
    *("", " ", "0", "-1", "1", "2", "1.5", "nan", "inf", "-inf", "1e999", "9" * 400, "0x10", "1_000", "true"),
    *(
        "None",
        "[]",
        "{}",
        "[red]x[/red]",
        "%s",
        "{0}",
        "\\",
        "'",
        '"',
        "ä",
        "☃",
        "\ud800",
        "a\nb",
        "a\0b",
        "\x1b[2J",
    ),
    *("/", "/nowhere/at/all", "/dev/null", "..", "x" * 5000, "mlp-", "mlp-0", "mlp-1e9", "mlp-99999999999-8"),
    *("bgd", "digits", "cuda:99", "mps", "meta", "lenet5", "vgg11", "--help", "--", "-"),
)
NODES: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**30, 1e308, float("nan"), float("inf"), "", "text", "\ud800", [], {}, [[[]]]),
    *({"a": {"b": 1}}, [None] * 3, {"": None}, "x" * 10_000),
)


def call(*words: object) -> Any:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


ENDED = Counter[str]()


@pytest.fixture(scope="module", autouse=True)
def told() -> Iterator[None]:
    yield
    print(f"\n{ENDED.total()} commands: {dict(ENDED)}")


def answered(result: Any, what: object) -> None:
    """It ended well, or with words for people."""
    ENDED["done" if result.exit_code == 0 else "refused"] += 1
    known = result.exception is None or isinstance(result.exception, SystemExit)
    assert known, (what, repr(result.exception))
    assert result.exit_code in (0, 1, 2), what
    assert "Traceback" not in result.output, what
    if result.exit_code == 2 and not result.output.startswith("Usage"):
        assert result.stderr.strip(), what


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    runs.train(Config(net="mlp-8", data="digits", epochs=1, batch_size=300, eval_samples=2), folder)
    return folder


class Enough(ValueError):
    """In place of work that was not refused."""


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is trained or fetched."""

    def enough(*values: object, **more: object) -> None:
        raise Enough("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POSTERITY_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(runs, "_epoch", enough)
    monkeypatch.setattr(driver, "_records", enough)
    monkeypatch.setattr(demo, "run", enough)


def options(command: str) -> list[str]:
    found = next(each for each in cli.app.registered_commands if each.callback.__name__ == command)
    import typer.main

    return [
        option
        for each in typer.main.get_command_from_info(
            found, pretty_exceptions_short=True, rich_markup_mode=None
        ).params
        for option in each.opts
        if option.startswith("--")
    ]


@pytest.mark.usefixtures("brief")
def test_random_arguments(trained: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    file = tmp_path / "x.npy"
    np.save(file, np.zeros((2, 1, 8, 8), np.float32))
    base: dict[str, list[object]] = {
        "train": ["--out", tmp_path / "new", "--net", "mlp-8", "--data", "digits"],
        "evaluate": [trained],
        "predict": [trained, file, "--out", tmp_path / "out.csv"],
        "demo": [],
        "reproduce": ["bgd-theory", "--quick", "--out", tmp_path / "results"],
        "report": ["--results", tmp_path / "results", "--out", tmp_path / "page.html"],
    }
    for _ in range(150 * TIMES):
        command = chance.choice(list(base))
        words = list(base[command])
        for _ in range(chance.randint(1, 3)):
            if chance.random() < 0.7:
                words += [chance.choice(options(command)), chance.choice(WORDS)]
            else:
                words.insert(chance.randint(0, len(words)), chance.choice(WORDS))
        answered(call(command, *words), (command, words))
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
    for command in ("bench", "data list", "data verify", "data fetch", "nonsense", ""):
        for _ in range(6 * TIMES):
            words = [chance.choice(WORDS) for _ in range(chance.randint(1, 3))]
            answered(call(*command.split(), *words), (command, words))


def damaged(chance: random.Random, content: bytes) -> bytes:
    """The content cut short, with bits flipped, a part repeated, or replaced."""
    place = chance.randrange(len(content) + 1)
    match chance.randrange(5):
        case 0:
            return content[:place]
        case 1:
            flipped = bytearray(content)
            for _ in range(chance.randint(1, 8)):
                flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
            return bytes(flipped)
        case 2:
            return content[:place] + content[place // 2 :]
        case 3:
            return chance.randbytes(chance.randint(0, 300))
        case _:
            return "".join(chance.choices(string.printable, k=50)).encode()


def changed(chance: random.Random, value: Any) -> Any:
    """The value with one node, anywhere in it, replaced, taken away or added."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        rest = {each: part for each, part in value.items() if each != key}
        match chance.randrange(8):
            case 0:
                return rest
            case 1:
                return {**value, "more": chance.choice(NODES)}
            case _:
                return {**rest, key: changed(chance, value[key])}
    if isinstance(value, list) and value and chance.random() < 0.7:
        place = chance.randrange(len(value))
        return [*value[:place], changed(chance, value[place]), *value[place + 1 :]]
    if isinstance(value, torch.Tensor) and chance.random() < 0.5:
        return chance.choice(
            [value[:0] if value.dim() else value, value.double(), value * float("nan"), value[None]]
        )
    return chance.choice(NODES)


def read(chance: random.Random, folder: Path, tmp_path: Path, what: object) -> None:
    """Every command that reads a run."""
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "x.npy"
    np.save(file, np.zeros((2, 1, 8, 8), np.float32))
    commands: list[tuple[object, ...]] = [
        ("evaluate", folder, "--json"),
        ("predict", folder, file, "--out", tmp_path / "out.csv"),
        ("train", "--out", tmp_path / "copy", "--resume"),
    ]
    for command in chance.sample(commands, 3 if TIMES > 1 else 1):
        answered(call(*command), (command[0], what))


FILES = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "looks.jsonl",
    "checkpoint.pt",
    "posterior.safetensors",
)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_of_a_run(trained: Path, tmp_path: Path, name: str) -> None:
    chance = random.Random(name)
    for number in range(10 * TIMES):
        folder = tmp_path / f"run{number}"
        shutil.copytree(trained, folder)
        (folder / name).write_bytes(damaged(chance, (folder / name).read_bytes()))
        read(chance, folder, tmp_path, (name, number))
        shutil.rmtree(folder)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("name", FILES[:5])
def test_changed_values_in_files_of_a_run(trained: Path, tmp_path: Path, name: str) -> None:
    """With the right digest, so that it is the content that must be refused."""
    chance = random.Random(name)
    for number in range(15 * TIMES):
        folder = tmp_path / f"run{number}"
        shutil.copytree(trained, folder)
        path = folder / name
        if name == "checkpoint.pt":
            content = changed(chance, torch.load(path, weights_only=True))
            if isinstance(content, dict):
                runs.save(path, content)
            else:
                torch.save(content, path)
        elif name.endswith("l"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            content = changed(chance, lines)
            lines = content if isinstance(content, list) else [content]
            path.write_bytes(b"\n".join(as_json(line) for line in lines))
        else:
            content = changed(chance, json.loads(path.read_text()))
            path.write_bytes(
                as_json(sealed(content) if isinstance(content, dict) and "digest" in content else content)
            )
        read(chance, folder, tmp_path, (name, number, str(content)[:500]))
        shutil.rmtree(folder)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
def test_damaged_inputs(trained: Path, tmp_path: Path, suffix: str) -> None:
    chance, file, whole = random.Random(suffix), tmp_path / f"x{suffix}", torch.zeros(2, 1, 8, 8)
    makers: dict[str, Callable[[torch.Tensor], object]] = {
        ".npy": lambda x: np.save(file, x.numpy()),
        ".pt": lambda x: torch.save(x, file),
        ".safetensors": lambda x: file.write_bytes(save({"x": x.contiguous()})),
    }
    others: list[Any] = [
        whole,
        whole.half(),
        whole.to(torch.complex64),
        whole.int(),
        whole[:0],
        whole[0],
        whole[0, 0, 0, 0],
    ]
    for number in range(20 * TIMES):
        makers[suffix](chance.choice(others))
        if chance.random() < 0.7:
            file.write_bytes(damaged(chance, file.read_bytes()))
        answered(call("predict", trained, file, "--out", tmp_path / "out.csv"), (suffix, number))


@pytest.mark.parametrize(
    "shape", ["(2**60,)", "(10**30, 8, 8)", "(-1, 1, 8, 8)", "(1,) * 70", "'text'", "None", "(1e3,)"]
)
def test_npy_files_with_absurd_headers(trained: Path, tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {eval(shape)!r}}}".ljust(117) + "\n"
    file = tmp_path / "x.npy"
    file.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64))
    answered(call("predict", trained, file, "--out", tmp_path / "out.csv"), shape)


@pytest.mark.usefixtures("brief")
def test_changed_configs(tmp_path: Path) -> None:
    chance, file = random.Random(0), tmp_path / "config.toml"
    good = {
        "method": "bgd",
        "net": "mlp-8",
        "data": "digits",
        "epochs": 1,
        "lr": 1.0,
        "std_init": 0.1,
        "seed": 0,
    }

    def as_toml(value: Any) -> str:
        if isinstance(value, dict):
            return (
                "{" + ", ".join(f"{json.dumps(key)} = {as_toml(each)}" for key, each in value.items()) + "}"
            )
        if isinstance(value, float):
            return str(value)
        return json.dumps(value)

    for number in range(40 * TIMES):
        content = changed(chance, good)
        content = content if isinstance(content, dict) else {"lr": content}
        text = "".join(f"{json.dumps(key)} = {as_toml(value)}\n" for key, value in content.items())
        raw = text.encode(errors="replace")
        file.write_bytes(damaged(chance, raw) if chance.random() < 0.3 else raw)
        answered(call("train", "--config", file, "--out", tmp_path / f"new{number}"), (number, text))


def test_damaged_records_of_reproductions(tmp_path: Path) -> None:
    chance, out = random.Random(0), tmp_path / "results"
    reproduce.reproduce("bgd-theory", out=out, quick=True)
    (path,) = (out / "bgd-theory").glob("*.json")
    whole = path.read_bytes()
    for number in range(30 * TIMES):
        if number % 2:
            path.write_bytes(damaged(chance, whole))
        else:
            content = changed(chance, json.loads(whole))
            path.write_bytes(as_json(sealed(content) if isinstance(content, dict) else content))
        for command in (
            ("report", "--results", out, "--out", tmp_path / "page.html"),
            ("reproduce", "bgd-theory", "--quick", "--out", out),
        ):
            answered(call(*command), (number, command[0], path.read_text(errors="replace")[:1500]))
        path.write_bytes(whole)
