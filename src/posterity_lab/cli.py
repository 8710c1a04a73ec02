"""The command line: ``posterity train``, ``evaluate``, ``predict``, ``data`` and ``demo``.

Whatever needs torch is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from posterity import Prediction

_EXPECTED = (ValueError, KeyError, OSError, FloatingPointError, ImportError)


class _OneSentence(TyperGroup):
    """Says what was wrong in one red sentence, and exits with 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; POSTERITY_TRACEBACK=1 shows where an error came from."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if os.environ.get("POSTERITY_TRACEBACK") or not _expected(error):
                raise
            # str() of a KeyError is the repr of its message.
            message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
            Console(stderr=True).print(Text(message, style="red"), soft_wrap=True)
            raise typer.Exit(2) from error


def _expected(error: Exception) -> bool:
    from posterity_lab.files import DataError

    return isinstance(error, (*_EXPECTED, DataError))


app = typer.Typer(
    cls=_OneSentence,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Learn a posterior over a network's weights, and use it.",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets: which there are, their checksums, downloads.")
app.add_typer(data_app, name="data")

_Run = Annotated[Path, typer.Argument(help="Folder of a run, as train left it.", metavar="FOLDER")]
_Device = Annotated[str | None, typer.Option(help="Where to compute, if not where the run was trained.")]
_Samples = Annotated[int | None, typer.Option(help="Sampled networks; the run's eval_samples if not given.")]
_Name = Annotated[str | None, typer.Argument(help="Name of a data set; all of them if not given.")]
_METHOD = "the method's own if not given"


@app.command()
def train(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    config: Annotated[Path | None, typer.Option(help="TOML file with any of the keys below.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    method: Annotated[str | None, typer.Option(help="bgd, ivon, bbb, sgd or adam.")] = None,
    net: Annotated[str | None, typer.Option(help="Such as mlp-400-400 or lenet5.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Such as mnist or digits; see posterity data list.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training images.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per step.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial weights, data order and weight noise.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    eval_samples: Annotated[int | None, typer.Option(help="Sampled networks in evaluation.")] = None,
    validation: Annotated[int | None, typer.Option(help="Training images held out for the metrics.")] = None,
    samples: Annotated[int | None, typer.Option(help=f"Weight samples per step; {_METHOD}.")] = None,
    lr: Annotated[float | None, typer.Option(help=f"Learning rate; {_METHOD}.")] = None,
    momentum: Annotated[float | None, typer.Option(help="sgd, ivon: averaging of the gradient.")] = None,
    beta2: Annotated[float | None, typer.Option(help="ivon: averaging of the Hessian.")] = None,
    std_init: Annotated[
        float | None, typer.Option(help="bgd, bbb: std of every weight at the start.")
    ] = None,
    hess_init: Annotated[float | None, typer.Option(help="ivon: Hessian at the start.")] = None,
    prior_precision: Annotated[float | None, typer.Option(help="ivon: precision of the prior.")] = None,
    prior_std: Annotated[float | None, typer.Option(help="bbb: std of the prior.")] = None,
    temperature: Annotated[float | None, typer.Option(help="ivon: 1 is Bayes, less is sharper.")] = None,
    kl_factor: Annotated[float | None, typer.Option(help="bbb: scale of the KL; 1 is Bayes.")] = None,
) -> None:
    """Train a network; every epoch is saved, and a killed run goes on with --resume."""
    from posterity_lab import runs
    from posterity_lab.config import Config

    keys = {field.name for field in dataclasses.fields(Config)}
    flags = {key: value for key, value in ctx.params.items() if key in keys}
    base = runs.stored(out) if resume else None
    last = runs.train(Config.from_sources(config, flags, base), out, resume)[-1]
    typer.echo(
        f"{out}: epoch {last['epoch']}, {last['split']} error {1 - last['accuracy']:.2%}, "
        f"NLL {last['nll']:.4f}, ECE {last['ece']:.4f}"
    )


@app.command()
def evaluate(
    folder: _Run,
    ood: Annotated[str | None, typer.Option(help="A data set of the same shape that is to look odd.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    samples: _Samples = None,
    device: _Device = None,
) -> None:
    """Test a run: accuracy, NLL, Brier score and calibration of each way of inference."""
    from posterity_lab import runs
    from posterity_lab.data import load
    from posterity_lab.methods import predictions

    config, model, posterior, dataset = runs.load_run(folder, device)
    config = config if samples is None else dataclasses.replace(config, eval_samples=samples)
    outside = None if ood is None else load(ood, device=config.device).test.x
    if outside is not None and outside.shape[1:] != dataset.test.x.shape[1:]:
        shapes = f"{list(outside.shape[1:])} and {list(dataset.test.x.shape[1:])}"
        raise ValueError(f"{ood} and {config.data} have images of shapes {shapes}: choose one of equal shape")
    drawn = predictions(model, posterior, dataset.test.x, config, progress=not as_json)
    report: dict[str, Any] = {"run": str(folder), "data": config.data, "samples": len(drawn.samples)}
    mean = predictions(model, posterior, dataset.test.x, config, mode="mean")
    report["modes"] = _modes(drawn, mean, dataset.test.y)
    if outside is not None:
        strange = predictions(model, posterior, outside, config, progress=not as_json)
        report["ood"] = {"data": ood, **_detection(drawn, strange)}
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    console = Console()
    console.print(_table(f"{config.method} on {config.data}, {len(drawn.samples)} networks", report["modes"]))
    if outside is not None:
        scores = {key: value for key, value in report["ood"].items() if key != "data"}
        console.print(_table(f"telling {ood} from {config.data}", scores))


@app.command()
def predict(
    folder: _Run,
    file: Annotated[Path, typer.Argument(help="Inputs: .pt, .safetensors or .npy.", metavar="FILE")],
    out: Annotated[Path | None, typer.Option(help="CSV to write; FILE.predictions.csv if not given.")] = None,
    samples: _Samples = None,
    device: _Device = None,
) -> None:
    """Label inputs of your own, with the uncertainty of every label, as CSV."""
    import csv

    from posterity_lab import runs
    from posterity_lab.methods import predictions

    config, model, posterior, dataset = runs.load_run(folder, device)
    config = config if samples is None else dataclasses.replace(config, eval_samples=samples)
    x = _inputs(file, list(dataset.test.x.shape[1:])).to(config.device)
    prediction = predictions(model, posterior, x, config, progress=True)
    columns = {
        "label": prediction.label,
        "confidence": prediction.probs.amax(-1),
        "entropy": prediction.entropy,
        "expected_entropy": prediction.expected_entropy,
        "mutual_information": prediction.mutual_information,
    }
    target = file.with_name(file.name + ".predictions.csv") if out is None else out
    with target.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    typer.echo(f"{len(x)} predictions in {target}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for what the demo makes.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and rougher, in seconds.")] = False,
) -> None:
    """See what a posterior is good for, from end to end."""
    from posterity_lab.demo import run

    run(out, quick)


@data_app.command("list")
def list_data() -> None:
    """Which data sets there are, and whether their files are here."""
    from posterity_lab.files import NAMES, verify

    for name in NAMES:
        states = set(verify(name).values())
        typer.echo(f"{name:10} {' and '.join(sorted(states - {'ok'})) or 'ok'}")


@data_app.command("verify")
def verify_data(name: _Name = None) -> None:
    """Compare files with their checksums; exit code 1 unless all are right."""
    from posterity_lab.files import NAMES, verify

    states = {path: state for each in ([name] if name else NAMES) for path, state in verify(each).items()}
    for path, state in states.items():
        typer.echo(f"{path}: {state}")
    if any(state != "ok" for state in states.values()):
        raise typer.Exit(1)


@data_app.command("fetch")
def fetch_data(name: Annotated[str, typer.Argument(help="Name of a data set.")]) -> None:
    """Download the files of a data set that are missing or damaged."""
    from posterity_lab.files import fetch

    for path in fetch(name):
        typer.echo(str(path))
    typer.echo(f"{name} is complete")


def main() -> None:
    """Entry point of the console script."""
    app()


def _modes(drawn: Prediction, mean: Prediction, y: Tensor) -> dict[str, dict[str, float]]:
    """Metrics by mode of inference; one network has nothing to average or to vote."""
    from posterity import metrics
    from posterity.predict import MODES

    by_mode = {mode: mean if mode == "mean" else dataclasses.replace(drawn, mode=mode) for mode in MODES}
    return {
        mode: {
            "accuracy": metrics.accuracy(prediction.probs, y),
            "nll": metrics.nll(prediction.probs, y),
            "brier": metrics.brier(prediction.probs, y),
            "ece": metrics.ece(prediction.probs, y),
        }
        for mode, prediction in by_mode.items()
        if mode == "mean" or drawn.mode != "mean"
    }


def _detection(inside: Prediction, outside: Prediction) -> dict[str, dict[str, float]]:
    from posterity import metrics

    pairs = {"entropy": (inside.entropy, outside.entropy)}
    if inside.mode != "mean":  # one network never disagrees with itself
        pairs["mutual_information"] = (inside.mutual_information, outside.mutual_information)
    return {
        name: {"auroc": metrics.auroc(*pair), "fpr95": metrics.fpr95(*pair)} for name, pair in pairs.items()
    }


def _table(title: str, rows: dict[str, dict[str, float]]) -> Table:
    table = Table("", *next(iter(rows.values())), title=title)
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.4f}" for value in values.values()))
    return table


def _inputs(file: Path, shape: list[int]) -> Tensor:
    """Inputs from a file, after refusing what the network was not trained for."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    readers: dict[str, Callable[[], object]] = {
        ".pt": lambda: torch.load(file, map_location="cpu", weights_only=True),
        ".safetensors": lambda: load_file(file),
        ".npy": lambda: torch.from_numpy(np.load(file, allow_pickle=False)),
    }
    if file.suffix not in readers:
        raise ValueError(f"{file} is none of {', '.join(readers)}: save the inputs as one of these")
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}")
    try:
        content = readers[file.suffix]()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file} cannot be read as {file.suffix}: {reason}") from error
    if isinstance(content, dict) and len(content) == 1:
        (content,) = content.values()
    if not isinstance(content, torch.Tensor):
        raise ValueError(f"{file} must hold one tensor of inputs, not {type(content).__name__}")
    if not content.is_floating_point():
        raise ValueError(
            f"{file} holds {content.dtype}: pass floats scaled as in training, pixels from 0 to 1"
        )
    if list(content.shape[1:]) != shape or len(content) == 0:
        raise ValueError(f"{file} holds inputs {list(content.shape)}: the network takes [N, {str(shape)[1:]}")
    if not bool(torch.isfinite(content).all()):
        raise ValueError(f"{file} holds inputs that are not finite: remove them first")
    return content.float()
