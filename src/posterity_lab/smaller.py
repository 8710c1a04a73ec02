"""A run made smaller: pruned in groups, without dead units, rounded, written to files, and measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from posterity import Factorised, metrics
from posterity import predict as predicted
from posterity.compress import (
    Format,
    Groups,
    export,
    measure,
    point_mass,
    prune,
    quantise,
    shrink,
)
from posterity_lab import record
from posterity_lab.data import load
from posterity_lab.runs import Run

SUFFIXES: dict[Format, str] = {"torch.export": "pt2", "onnx": "onnx", "safetensors": "safetensors"}


def smaller(
    run: Run,
    out: Path,
    *,
    fraction: float,
    groups: Groups | None = "inputs",
    share: float = 1.0,
    format: Format = "torch.export",
    samples: int | None = None,
    seconds: float = 0.5,
) -> dict[str, Any]:
    """Compress a run, write what is left of it to a folder, and say what that costs.

    The folder gets the net as ``net.*``, the posterior of what is left, and ``compress.json``: the sealed
    record, with test errors and costs of the whole net and of the smaller one.

    Args:
        run: From `posterity_lab.runs.load_run`.
        out: A new folder.
        fraction: Of the weights to prune.
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
    example = test.x[:2]
    pruned = prune(posterior, fraction, groups=groups)
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
    export(path, small.module, left, example, format=format, samples=samples)
    left.save(out / "posterior.safetensors")
    found = {
        "config": asdict(config),
        "options": {
            "fraction": fraction,
            "groups": groups,
            "share": share,
            "format": format,
            "samples": samples,
        },
        "errors": {stage: errors(*each, test.x, test.y) for stage, each in stages.items()},
        "before": asdict(measure(run.model, example, seconds=seconds)),
        "after": asdict(measure(small.module, example, seconds=seconds)),
        "shapes": small.shapes,
        "dense": small.dense,
        "bits": None if rounded is None else rounded.bits,
        "bytes_at_bits": None if rounded is None else rounded.bytes,
        "file_bytes": path.stat().st_size,
        "environment": made.content(),
    }
    return record.write(out / "compress.json", found)


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
