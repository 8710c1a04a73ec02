"""How long does a step of Noisy K-FAC (K = 1) and of K-FAC take, compared with Adam?

    posterity bench kfac_step --device cuda
    posterity bench kfac_step --nets lenet5 --every 1

CIFAR's shapes, [128, 3, 32, 32]. Kronecker factors are collected and inverted in every fiftieth step, the
default; a round has whole cycles, so that a time is the mean over steps with and without factors.
Ours is measured in a plain loop (`with opt.sampled_params():` around forward and backward, then `opt.step()`)
and by `compile_step`, on a GPU a CUDA graph except in the step with factors; BatchNorm's weights have
no posterior. The target compares `compile_step` with Adam in a CUDA graph.
"""

from __future__ import annotations

from peers import (
    ADAM,
    ADAM_GRAPH,
    EAGER,
    OURS,
    Loss,
    adam_columns,
    arithmetic,
    batch,
    count,
    for_device,
    fresh_row,
    kfac_eager,
    kfac_ours,
    maker,
    net,
    setting,
    timing,
)

from posterity import KFAC, NoisyKFAC
from posterity_lab.bench import Column, Ratio, Record, measure, parser, positive

SHAPE = [3, 32, 32]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--nets", type=net, nargs="+", default=["resnet18"], help="names of nets for images")
    options.add_argument(
        "--settings", type=setting, nargs="+", help="such as 'tf32 nchw' (the default on a GPU)"
    )
    options.add_argument("--batch", type=positive, default=128)
    options.add_argument(
        "--every", type=positive, default=50, help="steps from one collection of factors to the next"
    )
    given = options.parse_args()
    given.settings = for_device(options, given.device, given.settings, ["tf32 nchw"])
    record = Record("kfac_step", given, "ms per step", OURS)
    for name in given.nets:
        for where in given.settings:
            precision, layout = where.split()
            data = batch([given.batch, *SHAPE], given.device, layout)
            loss_fn = Loss(precision, given.device)
            make = maker(name, SHAPE, given.device, layout)
            more = {"parameters": count(make()), "factors_every": given.every}
            aimed = given.device == "cuda" and (given.batch, given.every, precision) == (128, 50, "tf32")
            for case, rule, most in (("Noisy K-FAC K = 1", NoisyKFAC, 2.0), ("K-FAC", KFAC, None)):
                fresh_row(given.device)
                with arithmetic(precision):
                    columns = {
                        EAGER: Column(
                            kfac_eager(rule, given.every, make(), loss_fn, *data), where, given.every
                        ),
                        OURS: Column(
                            kfac_ours(rule, given.every, make(), loss_fn, *data), where, given.every
                        ),
                        **adam_columns(make, loss_fn, data, where),
                    }
                    ratios = [
                        Ratio(OURS, ADAM),
                        Ratio(OURS, ADAM_GRAPH, at_most=most if aimed else None),
                        Ratio(EAGER, ADAM),
                    ]
                    record.add(f"{case}, {name}", where, measure(columns, **timing(given)), ratios, **more)
                    del columns
    record.close()


if __name__ == "__main__":
    main()
