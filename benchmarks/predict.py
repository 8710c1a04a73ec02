"""How long do 64 sampled networks take for 10,000 images, stacked or one after another?

    posterity bench predict --device cuda
    posterity bench predict --nets mlp --images 100 --samples 4

The baseline draws a network, runs all images through it, and continues with the next one, with the same
precision and the same number of images per forward pass as `posterity.predict`. Both keep the logits [S, B,
10]. bf16 is autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from peers import arithmetic, batch, count, for_device, fresh_row, maker, timing
from torch import Tensor, nn

import posterity
from posterity_lab.bench import Column, Ratio, Record, measure, parser, positive

LOOP, OURS = "loop over networks", "predict"
NETS = {"mlp": ("mlp-1200-1200", [784]), "resnet18": ("resnet18", [3, 32, 32])}
BATCH = {"mlp": 10_000, "resnet18": 1_000}
# Networks at once: 64 ResNets on 1,000 images would need more memory than there is.
CHUNK = {"mlp": None, "resnet18": 8}
AIMS = {"mlp": 2.0, "resnet18": 1.0}


def looped(
    model: nn.Module, posterior: posterity.Factorised, x: Tensor, samples: int, size: int, bf16: bool
) -> Tensor:
    """The peer: the weights of one network after another, copied into the model."""
    weights = dict(model.named_parameters())
    means, stds = posterior.mean(), posterior.std()
    outputs = []
    with torch.inference_mode():
        for _ in range(samples):
            for name, mean in means.items():
                weights[name].copy_(mean + stds[name] * torch.randn_like(mean))
            # Entered anew for every network: autocast keeps the weights that it has cast.
            with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
                outputs.append(torch.cat([model(part) for part in torch.split(x, size)]))
    return torch.stack(outputs)


def steps(
    make: Callable[[], nn.Module], size: int, chunk: int | None, precision: str, samples: int
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The loop and ours as functions of the images."""
    model, other, bf16 = make(), make().eval(), precision == "bf16"
    plain = posterity.names_of(model, nn.BatchNorm2d)
    posterior = posterity.BGD(model, deterministic=plain).posterior()

    def ours(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            return posterity.predict(
                model, posterior, x, samples=samples, batch_size=size, chunk=chunk
            ).samples

    return {LOOP: lambda x: looped(other, posterior, x, samples, size, bf16), OURS: ours}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    options.add_argument("--precision", nargs="+", choices=["fp32", "tf32", "bf16"], help="tf32 and bf16")
    options.add_argument("--layout", choices=["nchw", "channels-last"], default="nchw")
    options.add_argument("--images", type=positive, default=10_000)
    options.add_argument("--samples", type=positive, default=64)
    options.add_argument(
        "--batch", type=positive, help="images in a forward pass: 10000 for the MLP, 1000 if not"
    )
    options.add_argument("--chunk", type=positive, help="networks at once: all for the MLP, 8 if not")
    given = options.parse_args()
    given.precision = for_device(options, given.device, given.precision, ["tf32", "bf16"])
    record = Record("predict", given, "ms per pass", OURS)
    standard = (given.samples, given.images) == (64, 10_000) and given.device == "cuda"
    for net in given.nets:
        name, shape = NETS[net]
        layout = given.layout if len(shape) == 3 else "nchw"
        size, chunk = given.batch or BATCH[net], given.chunk or CHUNK[net]
        x, _ = batch([given.images, *shape], given.device, layout)
        make = maker(name, shape, given.device, layout)
        for precision in given.precision:
            fresh_row(given.device)
            setting = f"{precision} {layout}" if len(shape) == 3 else precision
            with arithmetic(precision):
                # A pass takes seconds: it is one step, and the first batch alone is the warm-up.
                columns = {
                    each: Column(partial(f, x), setting, steps=1, warm_up=partial(f, x[:size]))
                    for each, f in steps(make, size, chunk, precision, given.samples).items()
                }
                times = measure(columns, **timing(given))
            ratios = [Ratio(LOOP, OURS, at_least=AIMS[net] if standard else None)]
            more = {"batch": size, "chunk": chunk, "parameters": count(make())}
            record.add(f"{given.samples} networks, {net}", setting, times, ratios, **more)
    record.close()


if __name__ == "__main__":
    main()
