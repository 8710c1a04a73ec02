"""How long does the BGD paper's training on MNIST take, 600 epochs with K = 10, and how good is the result?

    POSTERITY_DATA=... posterity bench mnist --device cuda
    posterity bench mnist --data digits --widths 20 --epochs 2

MLPs 784-W-W-10 on 50,000 images, batches of 128, pixels in [0, 1]; the other 10,000 training images are not
used. A number is the time in seconds from before the data is read until the last test error is known:
reading, compilation, capture, 600 epochs, evaluation. The widths run one after another in one process, so
kernels compile with the first. Errors are on the test set, for 10 networks drawn once.
"""

from __future__ import annotations

import time

import torch
from peers import Loss, arithmetic, count, for_device, setting
from torch import nn

import posterity
from posterity_lab import data
from posterity_lab.bench import Record, parser, positive
from posterity_lab.errors import mode_errors
from posterity_lab.nets import initialise, mlp

OURS = "compile_step"
# What the authors' code starts from.
STD_INIT = {400: 0.05, 800: 0.05, 1200: 0.04}
HELD_OUT = 10_000


def train(name: str, width: int, epochs: int, where: str, device: str, seed: int) -> dict[str, float]:
    """Seconds and test errors of one training."""
    start = time.perf_counter()
    dataset = data.load(name, device=device)
    order = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(0))
    training = dataset.train.subset(order[min(HELD_OUT, len(order) // 6) :])
    model: nn.Module = mlp(training.x[0].numel(), [width, width], dataset.classes)
    model = initialise(model, seed).to(device)
    optimizer = posterity.BGD(model, std_init=STD_INIT.get(width, 0.04), mc_samples=10, seed=seed)
    loss_fn = Loss(where.split()[0], device)
    # The graph itself picks the batch, so that only its indices are copied.
    step = posterity.compile_step(
        model, lambda net, at: loss_fn(net, training.x[at], training.y[at]), optimizer
    )
    steps = 0
    orders = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for at in torch.randperm(len(training), generator=orders).to(device).split(128):
            step(at)
            steps += 1
    trained = time.perf_counter() - start
    errors = mode_errors(model, optimizer.posterior(), dataset.test.x, dataset.test.y)
    seconds = time.perf_counter() - start
    more = {"training": trained, "steps": steps, "parameters": count(model)}
    return {"seconds": seconds, **more, **errors}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", default="mnist")
    options.add_argument("--widths", type=positive, nargs="+", default=[400, 1200])
    options.add_argument("--epochs", type=positive, default=600)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--settings", type=setting, nargs="+", help="such as 'tf32 nchw' (the default on a GPU)"
    )
    given = options.parse_args()
    given.settings = for_device(options, given.device, given.settings, ["tf32 nchw"])
    record = Record("mnist", given, "s", OURS)
    for where in given.settings:
        for width in given.widths:
            with arithmetic(where.split()[0]):
                found = train(given.data, width, given.epochs, where, given.device, given.seed)
            seconds = found.pop("seconds")
            cell = {"value": seconds, "lowest": seconds, "highest": seconds, "rounds": 1, "steps": 1}
            case = f"BGD K = 10, {given.data}, 2x{width}, {given.epochs} epochs"
            looks = record.look(case, given.seed, {"setting": where, "std_init": STD_INIT.get(width, 0.04)})
            record.add(case, where, {OURS: {**cell, "setting": where}}, looks=looks, **found)
            print("  " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
    record.close()


if __name__ == "__main__":
    main()
