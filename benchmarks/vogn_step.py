"""How long does a VOGN step take, compared with Adam and BackPACK's per-example squared gradients?

    posterity bench vogn_step --device cuda
    posterity bench vogn_step --nets lenet5
    posterity bench vogn_step --nets resnet18 --batches 32 128 512 2048
    posterity bench vogn_step --nets resnet18 --samples 1 2 4 8

CIFAR's shapes, [128, 3, 32, 32], and one weight sample, K = 1, by default. Ours is measured
twice: in a plain loop (`with opt.sampled_params():` around forward and backward, then `opt.step()`) and by
`compile_step`; BatchNorm's weights have no posterior. The package BackPACK only computes the squares: Adam's
step does not use them. It does not support BatchNorm, so it has no column for ResNet-18. It is in both rows,
always in a plain loop, as its users run it; the target of `compile_step` is five times its speed. Plain loops
have no target: on LeNet-5 Adam alone takes a third of BackPACK's time there, so a rule that costs as much as
Adam cannot be five times as fast.
"""

from __future__ import annotations

import importlib.util
from itertools import product

from peers import (
    ADAM,
    ADAM_GRAPH,
    BACKPACK,
    EAGER,
    OURS,
    Loss,
    adam_eager,
    adam_graph,
    arithmetic,
    backpack_adam,
    batch,
    count,
    for_device,
    fresh_row,
    maker,
    net,
    setting,
    timing,
    vogn_eager,
    vogn_ours,
)
from torch import nn

from posterity_lab.bench import Column, Ratio, Record, measure, parser, positive

SHAPE = [3, 32, 32]


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--nets",
        type=net,
        nargs="+",
        default=["resnet18", "vgg11", "lenet5"],
        help="names of nets for images",
    )
    options.add_argument(
        "--settings", type=setting, nargs="+", help="such as 'tf32 nchw' (the default on a GPU)"
    )
    options.add_argument("--batches", type=positive, nargs="+", default=[128])
    options.add_argument("--samples", type=positive, nargs="+", default=[1])
    given = options.parse_args()
    given.settings = for_device(options, given.device, given.settings, ["tf32 nchw"])
    record = Record("vogn_step", given, "ms per step", OURS)
    installed = importlib.util.find_spec("backpack") is not None
    if not installed:
        record.note(
            f"the column {BACKPACK} is left out: pip install --no-deps backpack-for-pytorch einops unfoldNd"
        )
    for name, where, size, samples in product(given.nets, given.settings, given.batches, given.samples):
        fresh_row(given.device)
        precision, layout = where.split()
        data = batch([size, *SHAPE], given.device, layout)
        loss_fn = Loss(precision, given.device)
        make = maker(name, SHAPE, given.device, layout)
        model = make()
        known = not any(isinstance(each, nn.BatchNorm2d) for each in model.modules())
        more = {"parameters": count(model)}
        del model
        aimed = given.device == "cuda" and (size, samples) == (128, 1) and precision == "tf32"
        most, least = (1.6, 5.0) if aimed else (None, None)
        case = f"VOGN K = {samples}, {name}" + (f", batch {size}" if size != 128 else "")
        with arithmetic(precision):
            # A row for each way of running: what is compared runs in turn, and holds memory together.
            plain = {
                EAGER: Column(vogn_eager(make(), loss_fn, *data, samples), where),
                ADAM: Column(adam_eager(make(), loss_fn, *data), where),
            }
            if installed and known:
                plain[BACKPACK] = Column(backpack_adam(make(), loss_fn, *data), where)
            ratios = [Ratio(EAGER, ADAM, at_most=most), Ratio(BACKPACK, EAGER)]
            record.add(f"{case}, eager", where, measure(plain, **timing(given)), ratios, **more)
            del plain
            fresh_row(given.device)
            captured = {OURS: Column(vogn_ours(make(), loss_fn, *data, samples), where)}
            if given.device == "cuda":
                captured[ADAM_GRAPH] = Column(adam_graph(make(), loss_fn, *data), where)
            if installed and known:
                captured[BACKPACK] = Column(backpack_adam(make(), loss_fn, *data), where)
            ratios = [Ratio(OURS, ADAM_GRAPH, at_most=most), Ratio(BACKPACK, OURS, at_least=least)]
            record.add(f"{case}, one graph", where, measure(captured, **timing(given)), ratios, **more)
            del captured
    record.close()


if __name__ == "__main__":
    main()
