"""Networks by size and by name, and the BGD paper's initialisation of the means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import nn

from posterity_lab.hints import hint
from posterity_lab.prunable import lenet5_caffe, vgg_like
from posterity_lab.residual import resnet18

Recipe: TypeAlias = Callable[[Sequence[int], int], nn.Module]

# What a misspelled name is compared with; an MLP of any depth and width has a name of this form.
EXAMPLES = ("mlp-400-400", "lenet5", "conv3fc3", "conv4", "alexnet", "vgg11", "resnet18")
# Of inputs and of hidden units of an MLP: Hinton et al. 2012, which Blundell et al. 2015 compare with.
_DROPOUT = (0.2, 0.5)
# Channels of VGG11's convolutions; a pooling that halves the image follows where a stage ends.
_VGG11_STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def mlp(
    inputs: int, hidden: Sequence[int], classes: int, dropout: tuple[float, float] | None = None
) -> nn.Sequential:
    """A fully connected net with ReLU between its layers; it flattens its input.

    Args:
        inputs: Numbers per example, such as 784 for a 28x28 image.
        hidden: Width of every hidden layer; none gives a linear classifier.
        classes: Outputs (logits).
        dropout: Rates of dropping an input and a hidden unit.

    Example:
        >>> mlp(64, [20], 10)(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 10])
    """
    sizes = [inputs, *hidden, classes]
    if min(sizes) < 1:
        raise ValueError(f"every layer of an MLP needs at least one unit, not {sizes}")
    layers: list[nn.Module] = [nn.Flatten()]
    for number, (before, after) in enumerate(pairwise(sizes)):
        layers += [] if dropout is None else [nn.Dropout(dropout[min(number, 1)])]
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def lenet5(channels: int, size: int, classes: int) -> nn.Sequential:
    """LeNet-5 with ReLU and max-pooling: conv 6 and 16 of 5x5, then fully connected 120 and 84.

    Images below 32 pixels are padded by 2 in the first convolution, so that 28 and 32 pixels both end in 5x5
    features, as in the original.

    Args:
        channels: Channels of the image.
        size: Height and width of the image.
        classes: Outputs (logits).

    Example:
        >>> lenet5(1, 28, 10)(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([3, 10])
    """
    padding = 2 if size < 32 else 0
    features = ((size + 2 * padding - 4) // 2 - 4) // 2
    if features < 1:
        raise ValueError(f"LeNet-5 needs images of at least 12x12 pixels, not {size}x{size}: use an mlp")
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * features * features, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def conv3fc3(channels: int, size: int, classes: int) -> nn.Sequential:
    """The net of Bayesian incremental learning for CIFAR-10: conv 32-64-128, then 1000 and 1000 units.

    Convolutions of 5x5, 5x5 and 3x3, each followed by max-pooling over 3x3 with stride 2.

    Args:
        channels: Channels of the image.
        size: Height and width of the image.
        classes: Outputs (logits).

    Example:
        >>> conv3fc3(3, 32, 10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    features, layers = size, list[nn.Module]()
    for width, kernel in ((32, 5), (64, 5), (128, 3)):
        layers += [nn.Conv2d(channels, width, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(3, 2)]
        channels, features = width, (features - 1) // 2
    if features < 1:
        raise ValueError(f"conv3fc3 needs images of at least 15x15 pixels, not {size}x{size}: use an mlp")
    layers += [nn.Flatten(), nn.Linear(channels * features * features, 1000), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, classes))


def conv4(channels: int, size: int, classes: int) -> nn.Sequential:
    """Zenke's net for sequences of CIFAR tasks: conv 32-32-pool-64-64-pool of 3x3, 512 units with dropout ½.

    Its heads are parts of the output layer: see `posterity_lab.streams.own_head`.

    Args:
        channels: Channels of the image.
        size: Height and width of the image.
        classes: Outputs (logits), of all heads together.

    Example:
        >>> conv4(3, 32, 60)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 60])
    """
    features = size // 4
    if features < 1:
        raise ValueError(f"conv4 needs images of at least 4x4 pixels, not {size}x{size}: use an mlp")
    layers: list[nn.Module] = []
    for width in (32, 64):
        for inputs in (channels, width):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = width
    hidden = [nn.Flatten(), nn.Linear(channels * features * features, 512), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, *hidden, nn.Linear(512, classes))


def vgg11(channels: int, size: int, classes: int, batch_norm: bool = False) -> nn.Sequential:
    """VGG11 for small images: eight convolutions of 3x3 in five stages, each halved, then one linear layer.

    At 3x32x32 and 10 classes it has 9.2 million weights.

    Args:
        channels: Channels of the image.
        size: Height and width of the image.
        classes: Outputs (logits).
        batch_norm: BatchNorm after every convolution.

    Example:
        >>> vgg11(3, 32, 10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    features = size // 2 ** len(_VGG11_STAGES)
    if features < 1:
        raise ValueError(f"VGG11 needs images of at least 32x32 pixels, not {size}x{size}: use lenet5")
    layers: list[nn.Module] = []
    for stage in _VGG11_STAGES:
        for width in stage:
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            layers += [nn.BatchNorm2d(width)] if batch_norm else []
            layers.append(nn.ReLU())
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * features * features, classes))


def alexnet(channels: int, size: int, classes: int) -> nn.Sequential:
    """AlexNet for small images: conv 64 (11x11, stride 4), 192 (5x5), 384, 256, 256 (3x3), one linear layer.

    A pooling that halves the image follows the first, the second and the last convolution. At 3x32x32 and 10
    classes it has 2.47 million parameters.

    Args:
        channels: Channels of the image.
        size: Height and width of the image.
        classes: Outputs (logits).

    Example:
        >>> alexnet(3, 32, 10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    features = (size + 3) // 4 // 8
    if features < 1:
        raise ValueError(f"AlexNet needs images of at least 29x29 pixels, not {size}x{size}: use lenet5")
    layers: list[nn.Module] = []
    for width, kernel, stride, pooled in (
        (64, 11, 4, True),
        (192, 5, 1, True),
        (384, 3, 1, False),
        (256, 3, 1, False),
        (256, 3, 1, True),
    ):
        layers += [nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pooled else []
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * features * features, classes))


def with_dropout(model: nn.Module, rate: float) -> nn.Module:
    """Put dropout before every ReLU of a model, in place, and return it; names of parameters stay.

    Args:
        model: Whose ReLUs are modules.
        rate: Probability of dropping a number.

    Example:
        >>> with_dropout(mlp(4, [3], 2), 0.1)[2]
        Sequential(
          (0): Dropout(p=0.1, inplace=False)
          (1): ReLU()
        )
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.Sequential(nn.Dropout(rate), child))
    return model


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> nn.Module:
    """Draw every weight from N(0, 2 / (n_in + n_out)), in place, and return the model.

    Zeno et al. 2018, section 5, with what the authors' code adds: n_in and n_out of a convolution count its
    kernel's area, a bias has n_in = 1, and BatchNorm starts as the identity. The numbers depend on the seed
    alone, not on the device, and torch's global generators are left as they are.

    Args:
        model: A module of linear, convolution and BatchNorm layers, and of layers without parameters.
        seed: Seed of the draw.

    Example:
        >>> one, two = (initialise(mlp(4, [3], 2), seed=7) for _ in range(2))
        >>> bool((one[1].weight == two[1].weight).all())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_parameters()
            continue
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            raise ValueError(
                f"there is no initialisation for {name!r}, a {type(module).__name__}: set its own"
            )
        outputs, inputs, *kernel = module.weight.shape
        area = math.prod(kernel)
        for key, p in own.items():
            fan_in = area * inputs if key == "weight" else 1
            std = math.sqrt(2.0 / (fan_in + area * outputs))
            p.copy_(std * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


@torch.no_grad()
def uniform(model: nn.Module, reach: float, seed: int) -> nn.Module:
    """Draw every parameter from U(−reach, reach), in place, and return the model; else as `initialise`.

    Example:
        >>> bool((uniform(mlp(4, [3], 2), 0.03, seed=0)[1].weight.abs() < 0.03).all())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.copy_(reach * (2.0 * torch.rand(p.shape, generator=generator, dtype=p.dtype) - 1.0))
    return model


def recipe(name: str) -> Recipe:
    """What makes the net of a name from shape and classes: a misspelled name is refused before any data.

    Example:
        >>> recipe("lenet6")
        Traceback (most recent call last):
            ...
        ValueError: there is no net 'lenet6', did you mean 'lenet5'?
    """
    kind, *sizes = name.split("-")
    if name in _BY_NAME:
        return _BY_NAME[name]
    if kind == "vgglike":
        return _vgg_like(name, sizes)
    dropout = _DROPOUT if sizes[-1:] == ["dropout"] else None
    sizes = sizes if dropout is None else sizes[:-1]
    if kind == "mlp" and sizes and all(size.isdecimal() and int(size) > 0 for size in sizes):
        hidden = [int(size) for size in sizes]
        return lambda shape, classes: mlp(math.prod(shape), hidden, classes, dropout)
    # The sizes of an MLP would outweigh its misspelled name, so only the names are compared.
    near = hint(name, EXAMPLES, "name one like", key=lambda each: each.lower().split("-")[0])
    raise ValueError(f"there is no net {name!r}{near}")


def build(name: str, shape: Sequence[int], classes: int) -> nn.Module:
    """The net of that name, with torch's default weights.

    Args:
        name: ``lenet5``, ``lenet5-caffe``, ``conv3fc3``, ``conv4``, ``alexnet``, ``vgg11``, ``vgg11-bn``,
            ``resnet18``, or ``mlp-`` and the widths of the hidden layers: ``mlp-400-400``. ``vgglike`` may be
            followed by what its widths are multiplied by, ``vgglike-0.5``, and by ``-dropout``.
            ``resnet18-imagenet`` has the stem for large images, and BatchNorm unless ``-nobn`` follows;
            ``-dropout`` after it, ``lenet5`` or ``alexnet`` adds what MC dropout needs, at the rates of the
            VOGN paper's authors, and after an MLP drops inputs at 0.2 and hidden units at 0.5.
        shape: Of one input, such as [1, 28, 28].
        classes: Outputs (logits).

    Raises:
        ValueError: There is no such net, it does not take such inputs, or it is too large.

    Example:
        >>> build("mlp-20", [1, 8, 8], 10)[1]
        Linear(in_features=64, out_features=20, bias=True)
    """
    make = recipe(name)
    try:
        return make(shape, classes)
    except (RuntimeError, MemoryError, TypeError) as error:  # TypeError: a size that no int64 holds
        raise ValueError(f"the net {name} does not fit in memory: choose a smaller one") from error


def _resnet18(
    shape: Sequence[int],
    classes: int,
    stem: Literal["small", "imagenet"] = "small",
    batch_norm: bool = True,
) -> nn.Module:
    if len(shape) != 3:
        raise ValueError(f"ResNet-18 needs images [C, H, W], not {list(shape)}: use an mlp")
    return resnet18(shape[0], classes, stem=stem, batch_norm=batch_norm)


def _dropping(make: Recipe, rate: float, shape: Sequence[int], classes: int) -> nn.Module:
    return with_dropout(make(shape, classes), rate)


def _lenet5_dropout(channels: int, size: int, classes: int) -> nn.Module:
    # The authors of the VOGN paper drop logits, too, in LeNet-5 alone.
    return nn.Sequential(*with_dropout(lenet5(channels, size, classes), 0.1).children(), nn.Dropout(0.1))


def _vgg_like(name: str, options: Sequence[str]) -> Recipe:
    """The VGG-like net by what follows its name: a width, ``dropout``, both or neither."""
    widths = options[:-1] if options[-1:] == ["dropout"] else options
    try:
        (width,) = map(float, widths or ["1"])
    except ValueError:
        width = math.nan
    if not 0.0 < width < math.inf:
        raise ValueError(
            f"there is no net {name!r}: name one like vgglike, vgglike-0.5 or vgglike-0.5-dropout"
        )

    dropout = len(widths) < len(options)
    return _of_squares("the VGG-like net", partial(vgg_like, width=width, dropout=dropout))


def _of_squares(net: str, make: Callable[[int, int, int], nn.Module]) -> Recipe:
    """The recipe of a net of square images, given what makes it of channels, size and classes."""

    def of_shape(shape: Sequence[int], classes: int) -> nn.Module:
        if len(shape) != 3 or shape[1] != shape[2]:
            raise ValueError(f"{net} needs square images [C, H, W], not {list(shape)}: use an mlp")
        return make(shape[0], shape[1], classes)

    return of_shape


_alexnet = _of_squares("AlexNet", alexnet)
_resnet18_imagenet: Recipe = partial(_resnet18, stem="imagenet")
_BY_NAME: dict[str, Recipe] = {
    "lenet5": _of_squares("LeNet-5", lenet5),
    "lenet5-dropout": _of_squares("LeNet-5", _lenet5_dropout),
    "lenet5-caffe": _of_squares("Caffe's LeNet-5", lenet5_caffe),
    "conv3fc3": _of_squares("conv3fc3", conv3fc3),
    "conv4": _of_squares("conv4", conv4),
    "alexnet": _alexnet,
    "alexnet-dropout": partial(_dropping, _alexnet, 0.5),
    "vgg11": _of_squares("VGG11", vgg11),
    "vgg11-bn": _of_squares("VGG11", partial(vgg11, batch_norm=True)),
    "resnet18": _resnet18,
    "resnet18-imagenet": _resnet18_imagenet,
    "resnet18-imagenet-dropout": partial(_dropping, _resnet18_imagenet, 0.1),
    "resnet18-imagenet-nobn": partial(_resnet18, stem="imagenet", batch_norm=False),
}
