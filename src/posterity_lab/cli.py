"""The command line: ``posterity train``, ``evaluate``, ``predict``, ``data``, ``demo``, ``bench``,
``reproduce`` and ``report``.

Modules that need torch are imported inside the commands, so that ``--help`` is fast.
"""

from __future__ import annotations

import dataclasses
import json
import os
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from posterity_lab.config import DEFAULTS, Config
from posterity_lab.console import Lists, OneSentence, counted, stoppable, table

# Commands that torchrun may start as several processes; in the others, each process would do the same.
_TOGETHER = ("train", "reproduce")

app = typer.Typer(
    cls=OneSentence,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets: list, verify, download.")
app.add_typer(data_app, name="data")

_Run = Annotated[Path, typer.Argument(help="Folder of a trained run.", metavar="FOLDER")]
_Device = Annotated[str | None, typer.Option(help="cpu or cuda; the run's own device if not given.")]
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
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in the folder.")] = False,
    method: Annotated[
        str | None, typer.Option(help=_help("bgd, ivon, vogn, bbb, sgd or adam", "method"))
    ] = None,
    net: Annotated[str | None, typer.Option(help=_help("Such as mlp-400-400 or lenet5", "net"))] = None,
    data: Annotated[
        str | None, typer.Option(help=_help("Such as mnist or digits; see posterity data list", "data"))
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help=_help("Passes over the training images", "epochs"))
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help=_help("Images per step", "batch_size"))] = None,
    seed: Annotated[
        int | None, typer.Option(help=_help("Seed of initial weights, data order and weight noise", "seed"))
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
        float | None,
        typer.Option(help=_help("Initial std, times the square root of the fan-in", "std_scale")),
    ] = None,
    std_init: Annotated[
        float | None,
        typer.Option(help=_help("Initial std of every weight, in place of std_scale", "std_init")),
    ] = None,
    max_step: Annotated[
        float | None, typer.Option(help=_help("Bound on a weight's step, in its stds", "max_step"))
    ] = None,
    hess_init: Annotated[float | None, typer.Option(help=_help("Initial Hessian", "hess_init"))] = None,
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
    """Train a network; every epoch is saved, and --resume continues an interrupted run."""
    from posterity_lab import runs
    from posterity_lab.run_files import stored

    keys = {field.name for field in dataclasses.fields(Config)}
    flags = {key: value for key, value in ctx.params.items() if key in keys}
    base = stored(out) if resume else None
    with stoppable(f"resume with posterity train --out {out} --resume"):
        history = runs.train(Config.from_sources(config, flags, base), out, resume)
    if not history:  # only the first of several processes has it
        return
    last = history[-1]
    typer.echo(
        f"{out}: epoch {last['epoch']}, {last['split']} error {1 - last['accuracy']:.2%}, "
        f"NLL {last['nll']:.4f}, ECE {last['ece']:.4f}"
    )


@app.command()
def evaluate(
    folder: _Run,
    ood: Annotated[str | None, typer.Option(help="Out-of-distribution data set of the same shape.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    samples: _Samples = None,
    device: _Device = None,
) -> None:
    """Test a run: accuracy, NLL, Brier score and calibration of each way of inference."""
    from posterity_lab import runs
    from posterity_lab.data import load
    from posterity_lab.errors import detection, scores
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
        raise ValueError(
            f"{ood} and {config.data} have images of shapes {shapes}: choose one of the same shape"
        )
    drawn = predictions(model, posterior, dataset.test.x, config, progress=not as_json)
    report: dict[str, Any] = {"run": str(folder), "data": config.data, "samples": len(drawn.samples)}
    mean = predictions(model, posterior, dataset.test.x, config, mode="mean")
    report["modes"] = scores(drawn, mean, dataset.test.y)
    report["looks"] = runs.looked(folder, run.config)
    if outside is not None:
        strange = predictions(model, posterior, outside, config, progress=not as_json)
        report["ood"] = {"data": ood, **detection(drawn, strange)}
    if as_json:
        typer.echo(json.dumps(sealed({**report, "environment": made.content()}), indent=2))
        return
    console = Console()
    networks = counted(len(drawn.samples), "network")
    console.print(table(f"{config.method} on {config.data}, {networks}", report["modes"]))
    if outside is not None:
        odd = {key: value for key, value in report["ood"].items() if key != "data"}
        console.print(table(f"telling {ood} from {config.data}", odd))


@app.command()
def predict(
    folder: _Run,
    file: Annotated[Path, typer.Argument(help="Inputs: .pt, .safetensors or .npy.", metavar="FILE")],
    out: Annotated[Path | None, typer.Option(help="CSV to write; FILE.predictions.csv if not given.")] = None,
    samples: _Samples = None,
    device: _Device = None,
) -> None:
    """Label your own inputs, with the uncertainty of every label, as CSV."""
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
    typer.echo(f"{counted(len(x), 'prediction')} in {target}")


@app.command()
def compress(
    folder: _Run,
    out: Annotated[Path, typer.Option(help="A new folder for the smaller net.")],
    fraction: Annotated[
        float | None, typer.Option(help="Share of the weights to prune; 0.5 if no limit is given.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Instead: prune weights with a lower signal-to-noise ratio.")
    ] = None,
    log_alpha: Annotated[
        float | None, typer.Option(help="Instead: prune weights with at least this log alpha.")
    ] = None,
    groups: Annotated[
        str, typer.Option(help="Unit of pruning: inputs (columns), outputs (rows) or weights.")
    ] = "inputs",
    share: Annotated[float, typer.Option(help="Rounding step, in stds.")] = 1.0,
    file: Annotated[
        str, typer.Option("--format", help="torch.export, onnx or safetensors.")
    ] = "torch.export",
    samples: Annotated[
        int | None,
        typer.Option(help="Networks of an ensemble in the file; the net at the means if not given."),
    ] = None,
    device: _Device = None,
) -> None:
    """Make a run's net smaller, write it to a file, and show its cost before and after."""
    from posterity_lab import runs
    from posterity_lab.smaller import show, smaller

    _check_samples(samples)
    kinds: dict[str, Any] = {"groups": None if groups == "weights" else groups, "format": file}
    run = runs.load_run(folder, device)
    cut = {"fraction": fraction, "threshold": threshold, "log_alpha": log_alpha}
    kinds |= cut if any(each is not None for each in cut.values()) else {"fraction": 0.5}
    found = smaller(run, out, folder=folder, share=share, samples=samples, **kinds)
    show(found)
    typer.echo(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the demo's files.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A small, rough version, in seconds.")] = False,
) -> None:
    """Show what a posterior is good for, from training to prediction."""
    from posterity_lab.demo import run

    with stoppable("nothing was kept; the same command starts again from the beginning"):
        run(out, quick)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="A benchmark; its options follow.")] = None,
) -> None:
    """Measure speed next to other packages; NAME --help shows a benchmark's options, no NAME lists all."""
    from posterity_lab import bench as benchmarks

    if name is None or name == "--help":
        typer.echo("posterity bench NAME [OPTIONS], with NAME one of " + ", ".join(benchmarks.names()))
        return
    how = "the record has the rows measured so far, marked as incomplete; run the same command again"
    with stoppable(how):
        benchmarks.run(name, ctx.args)


@app.command(cls=Lists)
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Experiments to run together; lists all names if not given.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small nets on digits, about a minute; the numbers mean nothing.")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Run the grid on held-out data; later runs use its best.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; results if not given, quick ones in runs.")
    ] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="Such as --seeds 0 1 2 (the default).")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="Which methods; all if not given.")] = None,
    settings: Annotated[list[str] | None, typer.Option(help="Which settings; all if not given.")] = None,
    epochs: Annotated[int | None, typer.Option(help="In place of the paper's.")] = None,
    jobs: Annotated[int, typer.Option(help="Units at a time, each in its own process.")] = 1,
) -> None:
    """Reproduce tables and figures of papers; finished units are skipped, interrupted ones resume."""
    from posterity_lab.reproduce import EXPERIMENTS
    from posterity_lab.reproduce import reproduce as run

    if not names:
        for each in EXPERIMENTS.values():
            typer.echo(f"{each.name:22} {each.title}")
        return
    with stoppable("the same command resumes from here"):
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
    pictures: Annotated[Path | None, typer.Option(help="Folder for its drawings as separate files.")] = None,
) -> None:
    """Show reproduced results next to the paper's, as one HTML page made only from the records."""
    from posterity_lab.reproduce.page import write

    typer.echo(f"{write(results, out, pictures)} records are shown in {out}")


@data_app.command("list")
def list_data() -> None:
    """List data sets, and whether their files are here."""
    from posterity_lab.files import NAMES, verify

    for name in NAMES:
        states = set(verify(name).values())
        typer.echo(f"{name:10} {' and '.join(sorted(states - {'ok'})) or 'ok'}")


@data_app.command("verify")
def verify_data(name: _Name = None) -> None:
    """Compare files with their checksums; exit code 1 unless all match."""
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

    with stoppable("the same command resumes from here"):
        paths = fetch(name)
    for path in paths:
        typer.echo(str(path))
    typer.echo(f"{name} is complete")


def _check_samples(samples: int | None) -> None:
    if samples is not None and samples < 1:
        raise ValueError(f"samples must be a whole number of at least 1, not {samples}")


def _sampled(config: Config, samples: int | None) -> Config:
    return config if samples is None else dataclasses.replace(config, eval_samples=samples)
