"""How much memory does training by VOGN or Bayes by Backprop (K = 1) need, compared with Adam?

    posterity bench step_memory --device cuda

CIFAR's shapes, [128, 3, 32, 32]. A number is the peak of allocated memory over the first four steps,
including the net, its state and the captured graph if there is one, minus that before the net was made. A CPU
has no such counter: there the steps run, and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gradient_step import VARIANTS, ours
from memory import MIB, cell
from peers import (
    ADAM,
    ADAM_GRAPH,
    EAGER,
    OURS,
    Loss,
    adam_eager,
    adam_graph,
    arithmetic,
    batch,
    count,
    for_device,
    fresh_row,
    maker,
    net,
    setting,
    vogn_eager,
    vogn_ours,
)
from torch import Tensor, nn

from posterity_lab.bench import Ratio, Record, parser, positive

SHAPE = [3, 32, 32]
STEPS = 4


def backprop(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, compiled: bool) -> Callable[[], object]:
    """Bayes by Backprop, with a posterior of every parameter and a Gaussian prior."""
    return ours(model, loss_fn, x, y, VARIANTS["gaussian"], 1, compiled)


# By method: how it steps, and what is aimed at beside Adam.
METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "VOGN": ({EAGER: vogn_eager, OURS: vogn_ours}, 1.8),
    "BBB": ({EAGER: partial(backprop, compiled=False), OURS: partial(backprop, compiled=True)}, 2.0),
}


def peak(
    ready: Callable[..., Callable[[], object]], make: Callable[[], nn.Module], loss_fn: Loss, *data: Tensor
) -> float | None:
    """MiB at the height of some steps, and of making them ready; None on a CPU."""
    device = data[0].device.type
    fresh_row(device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    step = ready(make(), loss_fn, *data)
    for _ in range(STEPS):
        step()
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--nets", type=net, nargs="+", default=["resnet18"], help="names of nets for images")
    options.add_argument(
        "--settings", type=setting, nargs="+", help="such as 'tf32 nchw' (the default on a GPU)"
    )
    options.add_argument("--batch", type=positive, default=128)
    given = options.parse_args()
    given.settings = for_device(options, given.device, given.settings, ["tf32 nchw"])
    record = Record("step_memory", given, "MiB at the peak", OURS, statistic="highest")
    adams = {ADAM: adam_eager, **({ADAM_GRAPH: adam_graph} if given.device == "cuda" else {})}
    for name in given.nets:
        for where in given.settings:
            precision, layout = where.split()
            data = batch([given.batch, *SHAPE], given.device, layout)
            loss_fn = Loss(precision, given.device)
            make = maker(name, SHAPE, given.device, layout)
            aimed = (name, given.batch, where) == ("resnet18", 128, "tf32 nchw")
            for method, (makers, most) in METHODS.items():
                columns = {}
                with arithmetic(precision):
                    for column, ready in {**makers, **adams}.items():
                        found = peak(ready, make, loss_fn, *data)
                        if found is not None:
                            columns[column] = cell([found], where)
                if not columns:
                    record.note("memory is not measured on a CPU: choose --device cuda")
                bound = most if aimed else None
                ratios = [Ratio(EAGER, ADAM, at_most=bound), Ratio(OURS, ADAM_GRAPH, at_most=bound)]
                record.add(f"{method} K = 1, {name}", where, columns, ratios, parameters=count(make()))
    record.close()


if __name__ == "__main__":
    main()
