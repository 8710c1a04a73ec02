"""How long does a step of Bayes by Backprop take, compared with Adam and other packages for it?

    posterity bench gradient_step --device cuda
    posterity bench gradient_step --nets mlp-400-400 --variants gaussian local --samples 1 --batch 32

Every parameter has a posterior, with K = 1 weight sample, and K = 10 for MLPs. The variants differ in one
thing each: the paper's scale mixture in place of a Gaussian prior, the estimators local and flipout in place
of one draw of the weights, the families CFG and MNF in place of independent weights. Ours is measured
twice: in a plain loop (`elbo(...)`, `backward()`, `step()`) and by `compile_step`. bayesian-torch 0.5
(Gaussian priors, flipout) and BLiTZ (mixtures) run in plain loops, one sample after another, as their users
run them, and leave BatchNorm without a posterior. Install both with
`pip install --no-deps bayesian-torch==0.5.0 blitz-bayesian-pytorch==0.2.8`; folders that hold them may be on
PYTHONPATH instead. Each Adam is torch's fused one. On a GPU, graphs are compared with graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import util
from typing import Any

import torch
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

PLAIN, INTEL, BLITZ = "plain loop", "bayesian-torch", "BLiTZ"
PACKAGES = {INTEL: "bayesian_torch", BLITZ: "blitz"}
ENCODER = "encoder"
NUM_DATA = 50_000


@dataclass(frozen=True)
class Variant:
    """What is trained, and what is asked of it.

    Attributes:
        options: Of `variational`.
        peer: The package that has the same.
        aims: Times of a step over Adam's that are aimed at on an H200, with K = 1, for the nets that have an
            aim: plain over eager, graph over graph.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    peer: str | None = None
    aims: tuple[float | None, float | None] = (None, None)


VARIANTS = {
    "gaussian": Variant(peer=INTEL, aims=(1.8, 1.25)),
    "mixture": Variant({"prior": posterity.ScaleMixture()}, BLITZ, (None, 1.5)),
    "local": Variant({"estimator": "local"}, aims=(None, 2.2)),
    "flipout": Variant({"estimator": "flipout"}, INTEL, (None, 2.2)),
    "cfg": Variant({"family": posterity.cfg}, aims=(None, 2.5)),
    "mnf": Variant({"family": posterity.mnf}, aims=(None, 2.5)),
}
AIMED = {
    "resnet18": ("gaussian", "mixture", "local", "flipout", "cfg"),
    ENCODER: ("gaussian", "mixture"),
    "lenet5": ("mnf",),
}
# What bayesian-torch calls them.
INTEL_TYPES = {"gaussian": "Reparameterization", "flipout": "Flipout"}


class Encoder(nn.Module):
    """Six layers of `nn.TransformerEncoder`, 256 wide, on 128 tokens, with ten classes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
        self.words = nn.Embedding(1000, 256)
        self.layers = nn.TransformerEncoder(layer, 6)
        self.head = nn.Linear(256, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.words(tokens)).mean(1))


def seeded_encoder(device: str) -> nn.Module:
    torch.manual_seed(0)
    return Encoder().to(device)


def problem(name: str, size: int, device: str, layout: str) -> tuple[Callable[[], nn.Module], Any]:
    """A function that makes the net, and a batch for it."""
    if name == ENCODER:
        x, y = batch([size, 128], device)
        return partial(seeded_encoder, device), ((1000 * x).long(), y)
    shape = [784] if name.startswith("mlp") else [3, 32, 32]
    return maker(name, shape, device, layout), batch([size, *shape], device, layout)


def ours(
    model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, variant: Variant, samples: int, compiled: bool
) -> Callable[[], object]:
    """A gradient method by this library."""
    torch.manual_seed(0)  # of flows
    bayesian = posterity.variational(model, seed=0, **variant.options)
    # Thousands of steps on one batch leave the net about where it is, and every step does the same work.
    adam = torch.optim.Adam(bayesian.parameters(), lr=1e-6, fused=True)
    if compiled:
        train_step = posterity.compile_step(bayesian, loss_fn, adam, num_data=NUM_DATA, mc_samples=samples)
        return lambda: train_step(x, y)

    def step() -> None:
        adam.zero_grad()
        if samples == 1:
            nll = loss_fn(bayesian, x, y)
        else:
            stacked = bayesian.outputs(x, samples=samples)
            nll = nn.functional.cross_entropy(stacked.flatten(0, 1), y.repeat(samples))
        posterity.elbo(nll, bayesian.kl(), num_data=NUM_DATA).backward()
        adam.step()

    return step


def intel(
    model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, samples: int, kind: str
) -> Callable[[], None]:
    """As bayesian-torch's own instructions have it, with weights drawn anew for each sample."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    priors = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -4.0}
    dnn_to_bnn(model, {**priors, "type": INTEL_TYPES[kind], "moped_enable": False, "moped_delta": 0.5})
    model.to(x.device)
    adam = torch.optim.Adam(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        adam.zero_grad()
        losses = [loss_fn(model, x, y) + get_kl_loss(model) / NUM_DATA for _ in range(samples)]
        torch.stack(losses).mean().backward()
        adam.step()

    return step


def blitz(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor, samples: int) -> Callable[[], None]:
    """As BLiTZ's own instructions have it: `sample_elbo`, with a mixture prior."""
    from blitz.losses import kl_divergence_from_nn

    _to_blitz(model)
    model.to(x.device)
    adam = torch.optim.Adam(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        adam.zero_grad()
        losses = [loss_fn(model, x, y) + kl_divergence_from_nn(model) / NUM_DATA for _ in range(samples)]
        torch.stack(losses).mean().backward()
        adam.step()

    return step


def _to_blitz(module: nn.Module) -> None:
    from blitz.modules import BayesianConv2d, BayesianLinear

    prior = {"prior_sigma_1": 1.0, "prior_sigma_2": 0.002, "prior_pi": 0.5}
    for name, part in module.named_children():
        bias = getattr(part, "bias", None) is not None
        if type(part) is nn.Linear:
            setattr(module, name, BayesianLinear(part.in_features, part.out_features, bias=bias, **prior))
        elif type(part) is nn.Conv2d:
            sizes = part.in_channels, part.out_channels, part.kernel_size
            where = {"stride": part.stride, "padding": part.padding, "dilation": part.dilation}
            setattr(module, name, BayesianConv2d(*sizes, bias=bias, **where, **prior))
        else:
            _to_blitz(part)


def packages(record: Record) -> set[str]:
    """Those that are installed; of others a sentence is said."""
    there = {name for name, module in PACKAGES.items() if util.find_spec(module) is not None}
    for name in PACKAGES.keys() - there:
        record.note(f"the column {name} is left out: its package is not installed (see the script)")
    return there


def peers(
    there: set[str],
    make: Callable[[], nn.Module],
    name: str,
    kind: str,
    loss_fn: Loss,
    data: Any,
    samples: int,
) -> dict[str, Callable[[], None]]:
    """Steps of packages that have such a prior and such layers; an encoder's attention has neither."""
    peer = VARIANTS[kind].peer
    if peer not in there or name == ENCODER:
        return {}
    if peer == INTEL:
        return {INTEL: intel(make(), loss_fn, *data, samples, kind)}
    return {BLITZ: blitz(make(), loss_fn, *data, samples)}


def known(text: str) -> str:
    """An option's value: the name of a net."""
    return text if text == ENCODER else net(text)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--nets", type=known, nargs="+", help="names of nets; 'encoder' is a transformer")
    options.add_argument("--settings", type=setting, nargs="+", help="'tf32 nchw' if not given on a GPU")
    options.add_argument(
        "--variants", choices=VARIANTS, nargs="+", help="if not given, the two priors, and those with an aim"
    )
    options.add_argument(
        "--samples", type=positive, nargs="+", help="1 if not given, and for MLPs 10 beside it"
    )
    options.add_argument("--batch", type=positive, default=128)
    given = options.parse_args()
    large = ["mlp-400-400", "mlp-1200-1200", "resnet18", ENCODER, "lenet5"]
    given.nets = given.nets or (large if given.device == "cuda" else large[:1])
    given.settings = for_device(options, given.device, given.settings, ["tf32 nchw"])
    # A remark of bayesian-torch's, which imports what torch is about to move.
    warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated", DeprecationWarning)
    record = Record("gradient_step", given, "ms per step", OURS)
    there = packages(record)
    for where in given.settings:
        precision, layout = where.split()
        loss_fn = Loss(precision, given.device)
        for name in given.nets:
            make, data = problem(name, given.batch, given.device, layout)
            for samples in given.samples or ([1, 10] if name.startswith("mlp") else [1]):
                for kind in given.variants or AIMED.get(name, ("gaussian", "mixture")):
                    rows(record, given, where, name, kind, samples, make, loss_fn, data, there)
    record.close()


def rows(
    record: Record,
    given: Any,
    where: str,
    name: str,
    kind: str,
    samples: int,
    make: Callable[[], nn.Module],
    loss_fn: Loss,
    data: Any,
    there: set[str],
) -> None:
    """Two rows: plain loops, and compiled steps; what is compared runs in turn, and holds memory together."""
    variant, aimed = VARIANTS[kind], kind in AIMED.get(name, ())
    aimed &= given.device == "cuda" and samples == 1 and given.batch == 128
    plain_aim, graph_aim = variant.aims if aimed else (None, None)
    case, more = f"BBB {kind} K = {samples}, {name}", {"parameters": count(make()), "samples": samples}
    with arithmetic(where.split()[0]):
        fresh_row(given.device)
        steps: dict[str, Callable[[], object]] = {
            PLAIN: ours(make(), loss_fn, *data, variant, samples, compiled=False),
            ADAM: adam_eager(make(), loss_fn, *data),
            **peers(there, make, name, kind, loss_fn, data, samples),
        }
        ratios = [Ratio(PLAIN, ADAM, at_most=plain_aim), Ratio(INTEL, PLAIN), Ratio(BLITZ, PLAIN)]
        columns = {key: Column(step, where) for key, step in steps.items()}
        record.add(f"{case}, plain", where, measure(columns, **timing(given)), ratios, **more)
        del steps, columns
        fresh_row(given.device)
        graphs = given.device == "cuda"
        steps = {
            OURS: ours(make(), loss_fn, *data, variant, samples, compiled=True),
            (ADAM_GRAPH if graphs else ADAM): (adam_graph if graphs else adam_eager)(make(), loss_fn, *data),
            **peers(there, make, name, kind, loss_fn, data, samples),
        }
        ratios = [Ratio(OURS, ADAM_GRAPH, at_most=graph_aim), Ratio(INTEL, OURS), Ratio(BLITZ, OURS)]
        columns = {key: Column(step, where) for key, step in steps.items()}
        record.add(f"{case}, compiled", where, measure(columns, **timing(given)), ratios, **more)


if __name__ == "__main__":
    main()
