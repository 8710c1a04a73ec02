"""How long does a step of every method of `posterity reproduce vogn-table` take, compared with Adam's?

    posterity bench vogn_table --device cuda
    posterity bench vogn_table --settings lenet5 --batch 8

Methods, nets, weight samples, parts of a batch and batch sizes are those of the table, and steps run in the
same way: on a GPU, Adam's is a CUDA graph too. All methods of a setting have the same number of steps in an
epoch, so ratios of steps are ratios of epochs. The batch has CIFAR's shape, [·, 3, 32, 32]; loading and
augmenting images, the same for all, are left out.
"""

from __future__ import annotations

from functools import partial

import torch
from peers import batch, count, fresh_row, timing

from posterity_lab.bench import Column, Ratio, Record, measure, parser, positive
from posterity_lab.data import Split
from posterity_lab.reproduce.calibration import ABLATED, cells
from posterity_lab.reproduce.learners import NAMES, arithmetic
from posterity_lab.reproduce.training import begun

IMAGES = 50_000  # what a training of the table has


def main() -> None:
    table = [cell for cell in cells(quick=False) if not cell.setting.endswith(ABLATED)]
    known = list(dict.fromkeys(cell.setting for cell in table))
    options = parser(__doc__)
    options.add_argument("--settings", nargs="+", choices=known, default=known)
    options.add_argument("--batch", type=positive, help="the table's own if not given")
    given = options.parse_args()
    record = Record("vogn_table", given, "ms per step", NAMES["vogn"])
    for setting in given.settings:
        fresh_row(given.device)
        own = {cell.method: cell.config for cell in table if cell.setting == setting}
        size = given.batch or own["adam"]["batch_size"]
        x, y = batch([size, 3, 32, 32], given.device)
        whole = Split(x[:1].expand(IMAGES, -1, -1, -1), y[:1].expand(IMAGES))
        with arithmetic(given.device):
            columns, more = {}, {"batch": size}
            for method, config in own.items():
                learning = begun(method, config, whole, 10, given.device, seed=0)
                learning.model.train()
                more.setdefault("parameters", count(learning.model))
                where = "bf16" if config.get("bfloat16", given.device == "cuda") else "fp32"
                # A round has whole cycles of steps with factors and without.
                steps = config.get("factors_every")
                columns[NAMES[method]] = Column(partial(learning.step, x, y), where, steps)
            ratios = [Ratio(name, NAMES["adam"]) for name in columns if name != NAMES["adam"]]
            record.add(setting, "as in the table", measure(columns, **timing(given)), ratios, **more)
        del columns
    record.close()


if __name__ == "__main__":
    torch.manual_seed(0)  # of dropout
    main()
