"""A run made smaller: pruned in groups, without dead units, rounded, written to files, and measured."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from posterity import Factorised, metrics
from posterity import predict as predicted
from posterity.compress import (
    Format,
    Groups,
    Quantised,
    export,
    measure,
    point_mass,
    prune,
    quantise,
    shrink,
    sparse_layers,
)
from posterity_lab import record
from posterity_lab.data import load
from posterity_lab.runs import Run, looked

# Sizes of batches that are timed.
BATCHES = (1, 128)
SUFFIXES: dict[Format, str] = {"torch.export": "pt2", "onnx": "onnx", "safetensors": "safetensors"}


def smaller(
    run: Run,
    out: Path,
    *,
    folder: Path | None = None,
    fraction: float | None = None,
    threshold: float | None = None,
    log_alpha: float | None = None,
    groups: Groups | None = "inputs",
    share: float = 1.0,
    format: Format = "torch.export",
    samples: int | None = None,
    seconds: float = 0.5,
) -> dict[str, Any]:
    """Compress a run, write what is left of it to a folder, and say what that costs.

    The folder gets the net as ``net.*``, the posterior of what is left, and ``compress.json``: the sealed
    record, with test errors and costs of the whole net and of the smaller one. A net that has stds is rounded
    by them, and its file has whole numbers. Where layers are faster as sparse matrices here, the record says
    how fast.

    Args:
        run: From `posterity_lab.runs.load_run`.
        out: A new folder.
        folder: Of the run, where looks at test data are counted.
        fraction: Of the weights to prune.
        threshold: Instead: of the signal-to-noise ratios of what stays.
        log_alpha: Instead of either: of what goes, as `posterity.prune` has it.
        groups: What is pruned as one: columns, rows, or single weights.
        share: The step of rounding in stds; a net without stds is not rounded.
        format: Of the file.
        samples: Networks of an ensemble in the file; without it the net at the means.
        seconds: How long to time a batch.

    Example:
        >>> import tempfile
        >>> from posterity_lab.config import Config
        >>> from posterity_lab.runs import load_run, train
        >>> with tempfile.TemporaryDirectory() as name:
        ...     folder = Path(name)
        ...     _ = train(Config(net="mlp-16", data="digits", epochs=1), folder / "run")
        ...     found = smaller(load_run(folder / "run"), folder / "small", fraction=0.5, seconds=0.01)
        >>> found["after"]["weights"] < found["before"]["weights"]
        True
    """
    if format not in SUFFIXES:
        raise ValueError(f"format must be one of {', '.join(SUFFIXES)}, not {format!r}")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not an empty folder: name a new one")
    test, config = load(run.config.data, device=run.config.device).test, run.config
    made = record.Provenance(config.device, seeds=[config.seed])
    posterior = point_mass(run.model) if run.posterior is None else run.posterior.frozen()
    example = test.x[: max(BATCHES)]
    pruned = prune(posterior, fraction, threshold=threshold, log_alpha=log_alpha, groups=groups)
    small = shrink(run.model, pruned, example)
    rounded = None if run.posterior is None else quantise(small.posterior, share)
    left = small.posterior if rounded is None else rounded.posterior
    stages = {
        "whole": (run.model, posterior),
        "pruned": (run.model, pruned),
        "shrunk": (small.module, small.posterior),
        **({} if rounded is None else {"rounded": (small.module, left)}),
    }
    out.mkdir(parents=True, exist_ok=True)  # when nothing is left that could be refused
    path = out / f"net.{SUFFIXES[format]}"
    file: Factorised | Quantised = left if rounded is None or samples is not None else rounded
    export(path, small.module, file, example[:2], format=format, samples=samples)
    left.save(out / "posterior.safetensors")
    found = {
        "config": asdict(config),
        "options": {
            "fraction": fraction,
            "threshold": threshold,
            "log_alpha": log_alpha,
            "groups": groups,
            "share": share,
            "format": format,
            "samples": samples,
        },
        "looks": None if folder is None else looked(folder, config),
        "errors": {stage: errors(*each, test.x, test.y) for stage, each in stages.items()},
        "before": asdict(measure(run.model, example, BATCHES, seconds)),
        "after": asdict(measure(small.module, example, BATCHES, seconds)),
        "csr": {str(size): _sparse(small.module, example[:size], seconds) for size in BATCHES},
        "shapes": small.shapes,
        "dense": small.dense,
        "bits": None if rounded is None else rounded.bits,
        "bytes_at_bits": None if rounded is None else rounded.bytes,
        "file_bytes": {
            "before": _whole_bytes(run, posterior, example[:2], format, samples),
            "after": path.stat().st_size,
        },
        "environment": made.content(),
    }
    return record.write(out / "compress.json", found)


def _sparse(net: nn.Module, x: Tensor, seconds: float) -> dict[str, Any] | None:
    """Layers that are faster as sparse matrices for this batch, and the net's time with them, if any are."""
    found = sparse_layers(net, x, seconds=seconds / 10)
    if not found.weights:
        return None
    times = measure(found.module, x, (len(x),), seconds).milliseconds
    return {"weights": found.weights, "milliseconds": times[len(x)]}


def _whole_bytes(run: Run, posterior: Factorised, x: Tensor, format: Format, samples: int | None) -> int:
    """Of the same file of the whole net."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"net.{SUFFIXES[format]}"
        export(path, run.model, posterior, x, format=format, samples=samples)
        return path.stat().st_size


def errors(model: nn.Module, posterior: Factorised, x: Tensor, y: Tensor) -> dict[str, float]:
    """Test error and NLL at the means.

    Example:
        >>> import torch
        >>> net = nn.Linear(4, 3)
        >>> sorted(errors(net, point_mass(net), torch.randn(5, 4), torch.zeros(5, dtype=torch.long)))
        ['error', 'nll']
    """
    found = predicted(model, posterior, x, mode="mean")
    return {"error": 1.0 - metrics.accuracy(found.probs, y), "nll": metrics.nll(found, y)}


def show(found: Mapping[str, Any]) -> None:
    """Print what a run has lost and gained, from the record of :func:`smaller`.

    Example:
        >>> show({})  # doctest: +SKIP
    """
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
            print(f"as CSR, batch {size}: {layers} (posterity.compress.sparse_layers)")
    if found["dense"]:
        console.print(f"stayed as they are: {', '.join(found['dense'])}", soft_wrap=True)
    if found["bits"] is not None:
        print(f"weights alone, at the bits that their stds ask for: {found['bytes_at_bits']:,} bytes")
