"""How long does a BGD step with K weight samples take, compared with a plain loop over K and an Adam step?

    posterity bench train_step --device cuda
    posterity bench train_step --widths 200 400

An MLP 784-W-W-10 and a batch of 128. On a CPU there is one more column: only drawing the noise of all
samples, a lower bound for any step with that noise.
"""

from __future__ import annotations

from functools import partial

import torch
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
    timing,
)

from posterity_lab.bench import Column, Ratio, Record, measure, parser, positive

NOISE = "drawing the noise alone"
# What compile_step is to gain over the loop: on an H200 in tf32, and on two CPU cores.
AIMS = {"cuda": {400: 100.0, 1200: 50.0, 2000: 30.0}, "cpu": {200: 1.3, 400: 1.3, 1200: 1.3}}


def target(device: str, precision: str, width: int) -> float | None:
    """The least ratio of loop to ours; on a CPU ours is never to be the slower."""
    if device == "cuda" and precision != "tf32":
        return None
    return AIMS[device].get(width, 1.0 if device == "cpu" else None)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--widths", type=positive, nargs="+", help="400 1200 2000, on a CPU 200 400 1200")
    options.add_argument(
        "--precision", nargs="+", choices=["fp32", "tf32"], help="on a GPU both if not given"
    )
    options.add_argument("--samples", type=positive, default=10)
    options.add_argument("--batch", type=positive, default=128)
    given = options.parse_args()
    given.widths = given.widths or list(AIMS[given.device])
    given.precision = for_device(options, given.device, given.precision, ["tf32", "fp32"])
    record = Record("train_step", given, "ms per step", OURS)
    data = batch([given.batch, 784], given.device)
    for precision in given.precision:
        for width in given.widths:
            fresh_row(given.device)
            make = maker(f"mlp-{width}-{width}", [784], given.device)
            weights = count(make())
            with arithmetic(precision):
                loss_fn = Loss(precision, given.device)
                floor = Column(partial(torch.randn, given.samples, weights), precision)
                times = measure(
                    {
                        **bgd_columns(make, loss_fn, data, given.samples, precision),
                        **({NOISE: floor} if given.device == "cpu" else {}),
                    },
                    **timing(given),
                )
            standard = (given.samples, given.batch) == (10, 128)
            ratios = [
                Ratio(LOOP, OURS, at_least=target(given.device, precision, width) if standard else None),
                Ratio(OURS, ADAM_GRAPH),
                Ratio(OURS, NOISE),
            ]
            case = f"BGD K = {given.samples}, MLP 2x{width}"
            record.add(case, precision, times, ratios, width=width, parameters=weights)
    record.close()


if __name__ == "__main__":
    main()
