"""The command line: ``posterity train``, ``evaluate``, ``predict``, ``data``, ``demo``, ``bench``,
``reproduce`` and ``report``.

Whatever needs torch is imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from posterity_lab.config import DEFAULTS, Config

if TYPE_CHECKING:
    from torch import Tensor

    from posterity import Prediction

# Commands that torchrun may start several times; all others write or print the same thing each time.
_TOGETHER = ("train", "reproduce")
_EXPECTED = (ValueError, OSError, FloatingPointError, ImportError)


class _OneSentence(TyperGroup):
    """Says what was wrong in one red sentence and exits with 2; warns in one yellow sentence."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; POSTERITY_TRACEBACK=1 shows where an error came from."""
        try:
            with warnings.catch_warnings():  # puts back showwarning too
                warnings.showwarning = _warn
                return super().invoke(ctx)
        except Exception as error:
            if os.environ.get("POSTERITY_TRACEBACK") or not _expected(error):
                raise
            _say(_sentence(error), "red")
            raise typer.Exit(2) from error


class _Lists(TyperCommand):
    """Takes several values after one option: ``--seeds 0 1 2``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the name of an option that may be repeated before each of its values."""
        several = {name for each in self.params if getattr(each, "multiple", False) for name in each.opts}
        spread: list[str] = []
        option: str | None = None
        for word in args:
            if word.startswith("--"):
                option = word if word in several else None
            elif option is not None and spread[-1] != option:
                spread.append(option)
            spread.append(word)
        return super().parse_args(ctx, spread)


@contextmanager
def _stoppable(how: str) -> Iterator[None]:
    """Tell whoever stops a command with Ctrl-C how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        _say(f"stopped: {how}", "yellow")
        raise typer.Exit(130) from None


def _say(sentence: str, style: str) -> None:
    Console(stderr=True).print(Text(sentence, style=style), soft_wrap=True)


def _warn(message: Warning | str, *where: Any, **more: Any) -> None:
    """In place of warnings.showwarning, without the path and the line of code that it shows."""
    _say(" ".join(str(message).split()), "yellow")


def _sentence(error: Exception) -> str:
    """What to tell the user; Python's own errors about files and modules do not say what to do."""
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None:
            return f"the disk cannot be used ({error.strerror}): choose another path"
        return f"{error.filename} cannot be used ({error.strerror}): choose another path"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the command line needs {error.name}: pip install 'posterity[lab]'"
    return str(error)


def _expected(error: Exception) -> bool:
    files = sys.modules.get("posterity_lab.files")  # importing it here would import torch
    return isinstance(error, _EXPECTED if files is None else (*_EXPECTED, files.DataError))


app = typer.Typer(
    cls=_OneSentence,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets: which there are, their checksums, downloads.")
app.add_typer(data_app, name="data")

_Run = Annotated[Path, typer.Argument(help="Folder of a run, as train left it.", metavar="FOLDER")]
_Device = Annotated[str | None, typer.Option(help="Where to compute, if not where the run was trained.")]
_Samples = Annotated[int | None, typer.Option(help="Sampled networks; the run's eval_samples if not given.")]
_Name = Annotated[str | None, typer.Argument(help="Name of a data set; all of them if not given.")]


def _help(text: str, key: str) -> str:
    """The text with the key's default, or with the default of every method that has the key."""
    default = getattr(Config, key)
    if default is None:
        own = {method: values[key] for method, values in DEFAULTS.items() if key in values}
        given = [f"{method} {value:g}" for method, value in own.items() if value is not None]
        derived = [method for method, value in own.items() if value is None]
        default = ", ".join(given + ([f"derived for {', '.join(derived)}"] if derived else []))
    return f"{text}; {default} if not given."


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"posterity {installed('posterity')}")
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Learn a posterior over a network's weights, and use it."""
    command = ctx.invoked_subcommand
    if command not in _TOGETHER and "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != "1":
        raise ValueError(f"posterity {command} runs in one process: start it without torchrun")


@app.command()
def train(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    config: Annotated[Path | None, typer.Option(help="TOML file with any of the keys below.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    method: Annotated[
        str | None, typer.Option(help=_help("bgd, ivon, vogn, bbb, sgd or adam", "method"))
    ] = None,
    net: Annotated[str | None, typer.Option(help=_help("Such as mlp-400-400 or lenet5", "net"))] = None,
    data: Annotated[
        str | None, typer.Option(help=_help("Such as mnist or digits, see posterity data list", "data"))
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help=_help("Passes over the training images", "epochs"))
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help=_help("Images per step", "batch_size"))] = None,
    seed: Annotated[
        int | None, typer.Option(help=_help("Of initial weights, data order and weight noise", "seed"))
    ] = None,
    device: Annotated[str | None, typer.Option(help=_help("cpu or cuda", "device"))] = None,
    eval_samples: Annotated[
        int | None, typer.Option(help=_help("Sampled networks in evaluation", "eval_samples"))
    ] = None,
    validation: Annotated[
        int | None, typer.Option(help=_help("Training images held out for the metrics", "validation"))
    ] = None,
    samples: Annotated[int | None, typer.Option(help=_help("Weight samples per step", "samples"))] = None,
    lr: Annotated[float | None, typer.Option(help=_help("Learning rate", "lr"))] = None,
    momentum: Annotated[
        float | None, typer.Option(help=_help("Averaging of the gradient", "momentum"))
    ] = None,
    beta2: Annotated[float | None, typer.Option(help=_help("Averaging of the Hessian", "beta2"))] = None,
    std_scale: Annotated[
        float | None, typer.Option(help=_help("Std at the start times the root of the fan-in", "std_scale"))
    ] = None,
    std_init: Annotated[
        float | None, typer.Option(help=_help("Std of every weight at the start, instead", "std_init"))
    ] = None,
    max_step: Annotated[
        float | None, typer.Option(help=_help("Bound on a weight's step, in its stds", "max_step"))
    ] = None,
    hess_init: Annotated[float | None, typer.Option(help=_help("Hessian at the start", "hess_init"))] = None,
    damping: Annotated[float | None, typer.Option(help=_help("Added to the curvature", "damping"))] = None,
    prior_precision: Annotated[
        float | None, typer.Option(help=_help("Precision of the prior", "prior_precision"))
    ] = None,
    prior_std: Annotated[float | None, typer.Option(help=_help("Std of the prior", "prior_std"))] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help=_help("Divides the loss: 1 is Bayes, at 0.5 data counts twice", "temperature")),
    ] = None,
    kl_factor: Annotated[
        float | None, typer.Option(help=_help("Scale of the KL, 1 is Bayes", "kl_factor"))
    ] = None,
) -> None:
    """Train a network; every epoch is saved, and a killed run goes on with --resume."""
    from posterity_lab import runs
    from posterity_lab.run_files import stored

    keys = {field.name for field in dataclasses.fields(Config)}
    flags = {key: value for key, value in ctx.params.items() if key in keys}
    base = stored(out) if resume else None
    with _stoppable(f"go on with posterity train --out {out} --resume"):
        history = runs.train(Config.from_sources(config, flags, base), out, resume)
    if not history:  # of several processes, the first has it
        return
    last = history[-1]
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
    from posterity_lab.record import Provenance, sealed

    _check_samples(samples)
    run = runs.load_run(folder, device)
    made = Provenance(run.config.device, seeds=[run.config.seed])
    config, model, posterior = _sampled(run.config, samples), run.model, run.posterior
    dataset = load(config.data, device=config.device)
    outside = None if ood is None else load(ood, device=config.device).test.x
    if outside is not None and outside.shape[1:] != dataset.test.x.shape[1:]:
        shapes = f"{list(outside.shape[1:])} and {list(dataset.test.x.shape[1:])}"
        raise ValueError(f"{ood} and {config.data} have images of shapes {shapes}: choose one of equal shape")
    drawn = predictions(model, posterior, dataset.test.x, config, progress=not as_json)
    report: dict[str, Any] = {"run": str(folder), "data": config.data, "samples": len(drawn.samples)}
    mean = predictions(model, posterior, dataset.test.x, config, mode="mean")
    report["modes"] = _modes(drawn, mean, dataset.test.y)
    report["looks"] = runs.looked(folder, run.config)
    if outside is not None:
        strange = predictions(model, posterior, outside, config, progress=not as_json)
        report["ood"] = {"data": ood, **_detection(drawn, strange)}
    if as_json:
        typer.echo(json.dumps(sealed({**report, "environment": made.content()}), indent=2))
        return
    console = Console()
    networks = _count(len(drawn.samples), "network")
    console.print(_table(f"{config.method} on {config.data}, {networks}", report["modes"]))
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
    from posterity_lab.inputs import read_inputs
    from posterity_lab.methods import predictions

    _check_samples(samples)
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        wrong = f"{out} is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise ValueError(f"{wrong}: choose another --out")
    run = runs.load_run(folder, device)
    config = _sampled(run.config, samples)
    x = read_inputs(file, run.shape).to(config.device)
    prediction = predictions(run.model, run.posterior, x, config, progress=True)
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
    typer.echo(f"{_count(len(x), 'prediction')} in {target}")


@app.command()
def compress(
    folder: _Run,
    out: Annotated[Path, typer.Option(help="A new folder for what is left.")],
    fraction: Annotated[
        float | None, typer.Option(help="Share of the weights to prune; 0.5 if nothing is said.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Instead: lowest signal-to-noise ratio that stays.")
    ] = None,
    log_alpha: Annotated[float | None, typer.Option(help="Instead: lowest log alpha that goes.")] = None,
    groups: Annotated[
        str, typer.Option(help="What goes as one: inputs (columns), outputs (rows) or weights.")
    ] = "inputs",
    share: Annotated[float, typer.Option(help="The step of rounding, in stds.")] = 1.0,
    file: Annotated[
        str, typer.Option("--format", help="torch.export, onnx or safetensors.")
    ] = "torch.export",
    samples: Annotated[
        int | None, typer.Option(help="Networks of an ensemble in the file; the mean net if not given.")
    ] = None,
    device: _Device = None,
) -> None:
    """Make a run's net smaller for good, write it to a file, and show what it costs before and after."""
    from posterity_lab import runs
    from posterity_lab.smaller import smaller

    _check_samples(samples)
    kinds: dict[str, Any] = {"groups": None if groups == "weights" else groups, "format": file}
    run = runs.load_run(folder, device)
    cut = {"fraction": fraction, "threshold": threshold, "log_alpha": log_alpha}
    kinds |= cut if any(each is not None for each in cut.values()) else {"fraction": 0.5}
    found = smaller(run, out, folder=folder, share=share, samples=samples, **kinds)
    console = Console()
    quality = Table("", "error, %", "NLL", title="test data, at the means")
    for stage, values in found["errors"].items():
        quality.add_row(stage, f"{100 * values['error']:.2f}", f"{values['nll']:.4f}")
    console.print(quality)
    costs = Table("", "before", "after", "before / after", title="cost")
    before, after = found["before"], found["after"]
    words = {"weights": "weights", "nonzero": "weights that are not 0", "bytes": "bytes in memory"}
    rows = {shown: (before[key], after[key]) for key, shown in words.items()}
    rows["bytes of the file"] = found["file_bytes"]["before"], found["file_bytes"]["after"]
    rows["multiply-adds"] = before["multiply_adds"], after["multiply_adds"]
    for size, time in before["milliseconds"].items():
        rows[f"ms, batch {size}"] = time, after["milliseconds"][size]
        if found["csr"][str(size)] is not None:
            rows[f"ms, batch {size}, as CSR"] = time, found["csr"][str(size)]["milliseconds"]
    for name, (one, other) in rows.items():
        shown = [f"{each:,}" if isinstance(each, int) else f"{each:.4f}" for each in (one, other)]
        costs.add_row(name, *shown, f"{one / other:.2f}" if other else "–")
    console.print(costs)
    for size, sparse in found["csr"].items():
        if sparse is not None:
            layers = ", ".join(sparse["weights"])
            typer.echo(f"as CSR, batch {size}: {layers} (posterity.compress.sparse_layers)")
    if found["dense"]:
        console.print(f"stayed as they are: {', '.join(found['dense'])}", soft_wrap=True)
    if found["bits"] is not None:
        typer.echo(f"weights alone, at the bits that their stds ask for: {found['bytes_at_bits']:,} bytes")
    typer.echo(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for what the demo makes.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and rougher, in seconds.")] = False,
) -> None:
    """See what a posterior is good for, from end to end."""
    from posterity_lab.demo import run

    with _stoppable("nothing was kept, and the same command begins again"):
        run(out, quick)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="A benchmark; its options follow.")] = None,
) -> None:
    """Measure speed side by side with peers; NAME --help shows a benchmark's options, no NAME all names."""
    from posterity_lab import bench as benchmarks

    if name is None or name == "--help":
        typer.echo("posterity bench NAME [OPTIONS], with NAME one of " + ", ".join(benchmarks.names()))
        return
    how = "the record has the rows that were measured, marked as not complete; run the same command again"
    with _stoppable(how):
        benchmarks.run(name, ctx.args)


@app.command(cls=_Lists)
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Experiments, which share their jobs; all names if not given.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small nets on digits, about a minute; the numbers mean nothing.")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Run the grid on held-out data; its best is what is run later.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; results if not given, quick ones in runs.")
    ] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="Such as --seeds 0 1 2 (the default).")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="Which methods; all if not given.")] = None,
    settings: Annotated[list[str] | None, typer.Option(help="Which settings; all if not given.")] = None,
    epochs: Annotated[int | None, typer.Option(help="In place of the paper's.")] = None,
    jobs: Annotated[int, typer.Option(help="Units at a time, each in a process of its own.")] = 1,
) -> None:
    """Reproduce tables and figures of papers; what is done is skipped, what was killed goes on."""
    from posterity_lab.reproduce import EXPERIMENTS
    from posterity_lab.reproduce import reproduce as run

    if not names:
        for each in EXPERIMENTS.values():
            typer.echo(f"{each.name:22} {each.title}")
        return
    with _stoppable("the same command goes on where this one was"):
        run(
            *names,
            out=out,
            quick=quick,
            device=device,
            seeds=seeds or (),
            methods=methods or (),
            settings=settings or (),
            epochs=epochs,
            tune=tune,
            jobs=jobs,
        )


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    pictures: Annotated[Path | None, typer.Option(help="Folder for its drawings as files, too.")] = None,
) -> None:
    """Show what was reproduced, beside the paper's numbers, as one HTML page made from the records alone."""
    from posterity_lab.reproduce.page import write

    typer.echo(f"{write(results, out, pictures)} records are shown in {out}")


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

    with _stoppable("the same command goes on where this one was"):
        paths = fetch(name)
    for path in paths:
        typer.echo(str(path))
    typer.echo(f"{name} is complete")


def _check_samples(samples: int | None) -> None:
    if samples is not None and samples < 1:
        raise ValueError(f"samples must be a whole number of at least 1, not {samples}")


def _sampled(config: Config, samples: int | None) -> Config:
    return config if samples is None else dataclasses.replace(config, eval_samples=samples)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _modes(drawn: Prediction, mean: Prediction, y: Tensor) -> dict[str, dict[str, float]]:
    """Metrics by mode of inference; one network has nothing to average or to vote."""
    from posterity import metrics
    from posterity.predict import MODES

    by_mode = {mode: mean if mode == "mean" else dataclasses.replace(drawn, mode=mode) for mode in MODES}
    return {
        mode: {
            "accuracy": metrics.accuracy(prediction.probs, y),
            "nll": metrics.nll(prediction, y),
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
