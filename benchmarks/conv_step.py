"""How long does a BGD step take on VGG11 and ResNet-18, compared with a plain loop over K and an Adam step?

    posterity bench conv_step --device cuda
    posterity bench conv_step --nets lenet5 --samples 2

CIFAR's shapes, [128, 3, 32, 32]. Every column of a row has the row's precision and layout; bf16 is autocast.
The loop gives BatchNorm's weights a posterior too, and updates the running statistics with every sample, like
the authors' code; ours gives them none (9,600 of ResNet-18's 11.17 million parameters), and updates the
statistics once.
"""

from __future__ import annotations

from peers import (
    ADAM_GRAPH,
    LOOP,
    OURS,
    Loss,
    arithmetic,
    batch,
    bgd_columns,
    count,
    for_device,
    fresh_row,
    maker,
    net,
    setting,
    timing,
)

from posterity_lab.bench import Ratio, Record, measure, parser, positive

SHAPE = [3, 32, 32]
SETTINGS = ["tf32 nchw", "tf32 channels-last", "bf16 channels-last"]
# At least so much faster than the loop, at most so many graphs of Adam; on an H200, K = 10, batch 128.
AIMS = {"vgg11": (8.0, 4.0), "resnet18": (5.0, 5.0)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--nets", type=net, nargs="+", default=list(AIMS), help="names of nets for images")
    options.add_argument(
        "--settings", type=setting, nargs="+", help="such as 'tf32 nchw' 'bf16 channels-last'"
    )
    options.add_argument("--samples", type=positive, default=10)
    options.add_argument("--batch", type=positive, default=128)
    given = options.parse_args()
    given.settings = for_device(options, given.device, given.settings, SETTINGS)
    record = Record("conv_step", given, "ms per step", OURS)
    for name in given.nets:
        for where in given.settings:
            fresh_row(given.device)
            precision, layout = where.split()
            data = batch([given.batch, *SHAPE], given.device, layout)
            make = maker(name, SHAPE, given.device, layout)
            with arithmetic(precision):
                loss_fn = Loss(precision, given.device)
                times = measure(bgd_columns(make, loss_fn, data, given.samples, where), **timing(given))
            standard = given.device == "cuda" and (given.samples, given.batch) == (10, 128)
            least, most = AIMS.get(name, (None, None)) if standard else (None, None)
            ratios = [Ratio(LOOP, OURS, at_least=least), Ratio(OURS, ADAM_GRAPH, at_most=most)]
            record.add(f"BGD K = {given.samples}, {name}", where, times, ratios, parameters=count(make()))
    record.close()


if __name__ == "__main__":
    main()
