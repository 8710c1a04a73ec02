"""How much smaller and faster is a pruned net once its dead units are removed, on disk and in use?

    posterity bench smaller --units results/cache/sparse-groups/lenet5-*
    posterity bench smaller --units results/cache/sparse-vgg/k-1-* --device cuda --batches 1 128 1024
    posterity bench smaller --nets lenet5-caffe --kept 0.2     # no training: random weights
    posterity bench smaller --nets lenet5-caffe --left 8 13 88 13     # the sizes that a paper reports

A unit is the cache folder of one of ``posterity reproduce sparse-lenet``, ``sparse-groups``, ``sparse-vgg``.
The whole net and the smaller one run the same images alternately, in fp32 and in the same layout. These are
test images, since a CPU predicts the branches of few or repeated ones. Files are those of
``posterity.compress.export``, with weights as floats, and as integers if the posterior has stds for rounding.
If onnxruntime is installed, it runs both ONNX files on a CPU, with as many threads as torch, and with inputs
bound once, which makes calls of small nets faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peers import LAYOUTS, arithmetic, batch, fresh_row, net, timing
from torch import Tensor, nn

from posterity import Factorised
from posterity.compress import (
    Format,
    Quantised,
    Shrunk,
    export,
    measure,
    point_mass,
    prune,
    quantise,
    shrink,
    sparse_layers,
)
from posterity_lab.bench import Column, Ratio, Record, parser, positive
from posterity_lab.bench import measure as timed
from posterity_lab.data import Split
from posterity_lab.nets import build, initialise
from posterity_lab.reproduce import artefact
from posterity_lab.reproduce.sparse_groups import architecture
from posterity_lab.smaller import errors

WHOLE, OURS, CSR = "whole net", "shrunk", "shrunk, CSR"
WHOLE_ONNX, OURS_ONNX = "whole net, onnxruntime", "shrunk, onnxruntime"
# How much faster: by net, the device, and the batches that it is said of.
AIMS = {
    ("lenet5-caffe", "cpu"): (5.0, (1, 128)),
    ("vgglike", "cpu"): (3.0, (1, 128)),
    ("vgglike", "cuda"): (2.0, (1024,)),
}
# How much smaller on disk, at which error at most.
DISK, ERROR = {"lenet5-caffe": 50.0}, 0.009
ONNX = all(map(importlib.util.find_spec, ("onnxscript", "onnxruntime")))
FORMATS: tuple[Format, ...] = ("safetensors", "torch.export", "onnx")


class Pruned(NamedTuple):
    """A net to be measured."""

    name: str
    net: str
    model: nn.Module
    posterior: Factorised
    test: Split | None
    inputs: Tensor


def untrained(name: str, kept: float, left: Sequence[int] | None, size: int, device: str) -> Pruned:
    """A net of random weights with a share of every hidden layer's outputs kept, or with these sizes."""
    shape = [3, 32, 32] if name.startswith(("vgg", "resnet")) else [1, 28, 28]
    model = initialise(build(name, shape, 10), seed=0).to(device)
    q = point_mass(model)
    if left is not None:
        inputs, _ = batch([size, *shape], device)
        return Pruned(
            f"{name}, {'-'.join(map(str, left))} left", name, model, of_sizes(q, left), None, inputs
        )
    last = [each for each, mean in q.mean().items() if mean.dim() > 1][-1]
    pruned = prune(q, 1 - kept, groups="outputs", scope="layer", spare=[last, "*bias"])
    masks = pruned.kept()
    for each, p in model.named_parameters():  # a constant that is not zero stays where a convolution pads
        if p.dim() == 1 and not each.startswith(last.rpartition(".")[0] + "."):
            layer = each.rpartition(".")[0] + ".weight"
            if layer in masks and masks[layer].dim() > 1:
                alive = masks[layer].flatten(1).any(1)
                pruned = _without(pruned, each, alive)
    inputs, _ = batch([size, *shape], device)
    return Pruned(f"{name}, {kept:g} kept", name, model, pruned, None, inputs)


def of_sizes(posterior: Factorised, left: Sequence[int]) -> Factorised:
    """With so many output maps of every convolution and inputs of every matrix, as papers count them."""
    weights = {name: mean for name, mean in posterior.mean().items() if mean.dim() > 1}
    if len(left) != len(weights):
        raise ValueError(f"--left has {len(left)} sizes, but the net has {len(weights)} layers: one for each")
    units, stay = 0, 0  # of the layer before: all, and those that stay
    for (name, mean), count in zip(weights.items(), left, strict=True):
        axis = 1 if mean.dim() == 2 else 0
        if not 0 < count <= mean.shape[axis]:
            raise ValueError(f"--left has {count} for {name}, which has {mean.shape[axis]}")
        keep = torch.zeros(mean.shape[axis], dtype=torch.bool, device=mean.device)
        if axis == 0:
            keep[:count] = True
            posterior = _without(posterior, name.replace("weight", "bias"), keep)
            units, stay = len(mean), count
        else:  # of every unit before that stays, one position after another
            each = mean.shape[1] // (units or mean.shape[1])
            places = torch.arange(stay * each or count).view(-1, each).t().flatten()[:count]
            keep[places] = True
            units, stay = 0, 0
        posterior = _without(
            posterior, name, keep.view(-1, *[1] * (mean.dim() - 1 - axis)).expand(mean.shape)
        )
    return posterior


def _without(posterior: Factorised, name: str, keep: Tensor) -> Factorised:
    return posterior.rebuilt({**posterior.blocks, name: posterior.blocks[name].pruned(keep)})


def trained(folder: Path, size: int, device: str) -> Pruned:
    """What a unit learned."""
    unit, model, posterior, test = artefact.read(folder, device)
    name = f"{unit.study}, {unit.setting}, {unit.method}, seed {unit.seed}"
    return Pruned(name, unit.config["net"], model, posterior, test, test.x[:size])


def nets(given: argparse.Namespace) -> Iterator[Pruned]:
    """All that was asked for, one after another."""
    size = max(given.batches)
    for folder in given.units:
        yield trained(Path(folder), size, given.device)
    for name in given.nets:
        yield untrained(name, given.kept, given.left, size, given.device)


def files(model: nn.Module, posterior: Factorised | Quantised, x: Tensor) -> dict[str, int]:
    """Bytes of a net's file in every format."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for format in FORMATS:
            if format == "onnx" and not ONNX:
                continue
            path = Path(folder) / "net"
            export(path, model, posterior, x[:2], format=format)
            found[format] = path.stat().st_size
    return found


def onnx(model: nn.Module, posterior: Factorised, x: Tensor) -> Callable[[], object]:
    """The net's ONNX file, run by onnxruntime."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        export(path, model, posterior, x[:2], format="onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    images = x.contiguous().numpy()
    bound = session.io_binding()  # else a call of a small net has a third of its time between Python and it
    bound.bind_cpu_input(session.get_inputs()[0].name, images)
    bound.bind_output(session.get_outputs()[0].name)
    return partial(_run, session, bound, images)


def _run(session: Any, bound: Any, images: object) -> None:
    """One call; the images are here so that they last as long as what is bound to their memory."""
    session.run_with_iobinding(bound)


def described(pruned: Pruned, small: Shrunk) -> dict[str, Any]:
    """What does not depend on layout or batch: weights, files, and test errors at the means."""
    counts = {
        name: measure(model, pruned.inputs[:1], (1,), 1e-3)
        for name, model in ((WHOLE, pruned.model), (OURS, small.module))
    }
    stds = small.posterior.std()
    sure = any(
        bool((stds[name][kept] == 0).any()) for name, kept in small.posterior.kept().items() if kept.dim() > 1
    )
    rounded = None if sure else quantise(small.posterior)
    found: dict[str, Any] = {
        "parameters": counts[WHOLE].weights,
        "shrunk_parameters": counts[OURS].weights,
        "nonzero": counts[OURS].nonzero,
        "multiply_adds": {name: each.multiply_adds for name, each in counts.items()},
        "architecture": architecture(small.posterior),
        "files": {
            WHOLE: files(pruned.model, pruned.posterior, pruned.inputs),
            OURS: files(small.module, small.posterior, pruned.inputs),
        },
    }
    if rounded is not None:
        found["files"]["rounded"] = files(small.module, rounded, pruned.inputs)
        found["bits"] = rounded.bits
    if pruned.test is not None:
        x, y = pruned.test.x, pruned.test.y
        found["errors"] = {
            WHOLE: errors(pruned.model, pruned.posterior, x, y)["error"],
            OURS: errors(small.module, small.posterior, x, y)["error"],
        }
        if rounded is not None:
            found["errors"]["rounded"] = errors(small.module, rounded.posterior, x, y)["error"]
    least = DISK.get(pruned.net)
    if least is not None:
        found["disk"] = disk(found, least)
    return found


def disk(found: dict[str, Any], least: float) -> dict[str, Any]:
    """By format the whole net's file over the smaller one, and whether that is enough at a small error."""
    best = found["files"].get("rounded", found["files"][OURS])
    ratios = {format: size / best[format] for format, size in found["files"][WHOLE].items()}
    error = max(found["errors"].values()) if "errors" in found else None
    met = None if error is None else error <= ERROR and max(ratios.values()) >= least
    return {"ratios": ratios, "at_least": least, "error_at_most": ERROR, "met": met}


def aim(name: str, device: str, size: int) -> float | None:
    """How much faster the smaller net is to be."""
    for (start, where), (least, sizes) in AIMS.items():
        if name.startswith(start) and device == where and size in sizes:
            return least
    return None


def columns(
    pruned: Pruned, small: Shrunk, size: int, layout: str, given: argparse.Namespace
) -> tuple[dict[str, Column], tuple[str, ...]]:
    """What is timed on a batch, and which layers are CSR where any are faster so."""
    form = torch.channels_last if layout == "channels-last" else torch.contiguous_format
    x = pruned.inputs[torch.arange(size) % len(pruned.inputs)].to(memory_format=form)
    models = {WHOLE: pruned.model.to(memory_format=form), OURS: small.module.to(memory_format=form)}
    sparse = sparse_layers(small.module, x, seconds=given.round_seconds / 4)
    if sparse.weights:
        models[CSR] = sparse.module
    found: dict[str, Callable[[], object]] = {name: partial(model, x) for name, model in models.items()}
    if layout == "nchw" and given.device == "cpu" and ONNX:
        found[WHOLE_ONNX] = onnx(pruned.model, pruned.posterior, x)
        found[OURS_ONNX] = onnx(small.module, small.posterior, x)
    return {name: Column(step, f"fp32 {layout}") for name, step in found.items()}, sparse.weights


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--units", nargs="+", default=[], help="cache folders of pruned nets")
    options.add_argument("--nets", nargs="+", type=net, default=[], help="nets of random weights")
    options.add_argument("--kept", type=float, default=0.2, help="of the outputs of each layer of such nets")
    options.add_argument(
        "--left", nargs="+", type=positive, help="output maps of convolutions, inputs of matrices"
    )
    options.add_argument("--batches", nargs="+", type=positive, default=[1, 128])
    options.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="not of MLPs")
    given = options.parse_args()
    if not given.units and not given.nets:
        options.error("name the cache folders of pruned nets, --units, or nets of random weights, --nets")
    if not 0.0 < given.kept <= 1.0:
        options.error(f"--kept must be above 0, and at most 1, not {given.kept:g}")
    record = Record("smaller", given, "ms per forward pass", OURS)
    for pruned in nets(given):
        try:
            small = shrink(pruned.model, pruned.posterior, pruned.inputs[:2])
        except ValueError as error:  # a layer of which nothing is left
            record.note(f"{pruned.name} is left out: {error}")
            continue
        more = described(pruned, small)
        if pruned.test is not None:
            more["looks"] = record.look(pruned.name, 0, {"net": pruned.net})
        pruned.model.eval().load_state_dict(pruned.posterior.mean(), strict=False)
        layouts = ["nchw"] if pruned.net.startswith("mlp") else given.layouts
        for layout, size in product(layouts, given.batches):
            fresh_row(given.device)
            with arithmetic("fp32"), torch.no_grad():
                timings, csr = columns(pruned, small, size, layout, given)
                times = timed(timings, **timing(given))
            least = aim(pruned.net, given.device, size)
            ratios = [
                Ratio(WHOLE, OURS, at_least=least),
                Ratio(WHOLE, CSR),
                Ratio(WHOLE_ONNX, OURS_ONNX, at_least=least),
            ]
            case = f"{pruned.name}, batch {size}"
            record.add(case, f"fp32 {layout}", times, ratios, batch=size, csr=csr, **more)
        for name, sizes in more["files"].items():
            print(f"  {name}: " + ", ".join(f"{format} {size:,} bytes" for format, size in sizes.items()))
        for key in ("architecture", "errors", "disk"):
            print(f"  {key}: {more.get(key, 'not known')}")
    record.close()


if __name__ == "__main__":
    main()
