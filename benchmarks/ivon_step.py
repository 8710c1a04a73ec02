"""How long does an IVON step (K = 1) take on ResNet-18, compared with the authors' ivon-opt and Adam?

    posterity bench ivon_step --device cuda
    posterity bench ivon_step --net lenet5

CIFAR's shapes, [128, 3, 32, 32]. Ours is measured twice: in a plain loop (`with opt.sampled_params():` around
forward and backward, then `opt.step()`) and by `compile_step`. The authors' package comes with the extra
`bench`; a folder that holds it may be on PYTHONPATH instead. Both give every parameter a posterior. The
package is in both rows, always in a plain loop, as its users run it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from peers import (
    ADAM,
    ADAM_GRAPH,
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
    timing,
)
from torch import Tensor, nn

import posterity
from posterity_lab.bench import Column, Ratio, Record, measure, parser, positive

EAGER, AUTHORS = "eager step", "ivon-opt"
SHAPE = [3, 32, 32]
NUM_DATA = 50_000


def ours_eager(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> Callable[[], None]:
    opt = posterity.IVON(model, num_data=NUM_DATA)

    def step() -> None:
        opt.zero_grad()
        with opt.sampled_params():
            loss_fn(model, x, y).backward()
        opt.step()

    return step


def ours_compiled(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    train_step = posterity.compile_step(model, loss_fn, posterity.IVON(model, num_data=NUM_DATA))
    return lambda: train_step(x, y)


def authors(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> Callable[[], None]:
    """As the package's own instructions have it, with the hyper-parameters of ours."""
    import ivon

    opt = ivon.IVON(
        model.parameters(),
        lr=0.1,
        ess=NUM_DATA,
        hess_init=1.0,
        beta1=0.9,
        beta2=0.99999,
        weight_decay=1.0 / NUM_DATA,
    )

    def step() -> None:
        with opt.sampled_params(train=True):
            opt.zero_grad()
            loss_fn(model, x, y).backward()
        opt.step()

    return step


def version() -> str | None:
    """Of the authors' package; None where only its module is there, or nothing."""
    try:
        return metadata.version("ivon-opt")
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--net", type=net, default="resnet18", help="name of a net for images")
    options.add_argument(
        "--settings", type=setting, nargs="+", help="such as 'tf32 nchw' (the default on a GPU)"
    )
    options.add_argument("--batch", type=positive, default=128)
    given = options.parse_args()
    given.settings = for_device(options, given.device, given.settings, ["tf32 nchw"])
    record = Record("ivon_step", given, "ms per step", OURS)
    installed = True
    try:
        import ivon  # noqa: F401
    except ModuleNotFoundError:
        installed = False
        record.note("the column ivon-opt is left out: pip install 'posterity[bench]' brings the package")
    for where in given.settings:
        fresh_row(given.device)
        precision, layout = where.split()
        data = batch([given.batch, *SHAPE], given.device, layout)
        loss_fn = Loss(precision, given.device)
        make = maker(given.net, SHAPE, given.device, layout)
        aimed = given.device == "cuda" and (given.net, given.batch) == ("resnet18", 128)
        more = {"parameters": count(make()), AUTHORS: version()}
        case = f"IVON K = 1, {given.net}"
        with arithmetic(precision):
            # A row for each way of running: what is compared runs in turn, and holds memory together.
            plain = {
                EAGER: Column(ours_eager(make(), loss_fn, *data), where),
                ADAM: Column(adam_eager(make(), loss_fn, *data), where),
            }
            if installed:
                plain[AUTHORS] = Column(authors(make(), loss_fn, *data), where)
            most, least = (1.05, 1.25) if aimed else (None, None)
            ratios = [Ratio(EAGER, ADAM, at_most=most), Ratio(AUTHORS, EAGER, at_least=least)]
            record.add(f"{case}, eager", where, measure(plain, **timing(given)), ratios, **more)
            del plain
            fresh_row(given.device)
            captured = {OURS: Column(ours_compiled(make(), loss_fn, *data), where)}
            if given.device == "cuda":
                captured[ADAM_GRAPH] = Column(adam_graph(make(), loss_fn, *data), where)
            if installed:
                captured[AUTHORS] = Column(authors(make(), loss_fn, *data), where)
            ratios = [Ratio(OURS, ADAM_GRAPH, at_most=most), Ratio(AUTHORS, OURS, at_least=least)]
            record.add(f"{case}, one graph", where, measure(captured, **timing(given)), ratios, **more)
            del captured
    record.close()


if __name__ == "__main__":
    main()
