"""Nets that papers on pruning compare on, and how they begin; LeNet-300-100 is the MLP ``mlp-300-100``."""

from __future__ import annotations

import torch
from torch import nn

# Channels of the VGG-like net's convolutions at width 1; a pooling that halves the image ends every stage.
_VGG_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_VGG_HIDDEN = 512
# Rates of its dropout: after the first convolution of all, after others, around the hidden layer.
_VGG_DROPOUT = (0.3, 0.4, 0.5)


def lenet5_caffe(channels: int, size: int, classes: int) -> nn.Sequential:
    """LeNet-5 as Caffe has it: conv 20 and 50 of 5x5, each pooled, then 500 units; one ReLU, after these.

    At 1x28x28 and 10 classes it has 430,500 weights, biases not counted.

    Args:
        channels: Channels of the image.
        size: Height and width of the image.
        classes: Outputs (logits).

    Example:
        >>> net = lenet5_caffe(1, 28, 10)
        >>> sum(p.numel() for p in net.parameters() if p.dim() > 1)
        430500
    """
    features = ((size - 4) // 2 - 4) // 2
    if features < 1:
        raise ValueError(f"Caffe's LeNet-5 needs images of at least 16x16 pixels, not {size}x{size}")
    return nn.Sequential(
        nn.Conv2d(channels, 20, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(50 * features * features, 500),
        nn.ReLU(),
        nn.Linear(500, classes),
    )


def vgg_like(
    channels: int, size: int, classes: int, width: float = 1.0, dropout: bool = False
) -> nn.Sequential:
    """The VGG-like net of CIFAR-10: 13 convolutions of 3x3 in five stages, 512 units, BatchNorm after each.

    At 3x32x32, width 1 and 10 classes it has 15 million weights.

    Args:
        channels: Channels of the image.
        size: Height and width of the image.
        classes: Outputs (logits).
        width: What all widths are multiplied by.
        dropout: Rates of 0.3 to 0.5, by layer: for training the net as such.

    Example:
        >>> net = vgg_like(3, 32, 10, width=0.25)
        >>> [layer.out_channels for layer in net if isinstance(layer, nn.Conv2d)][:3]
        [16, 16, 32]
    """
    features = size // 2 ** len(_VGG_STAGES)
    if features < 1:
        raise ValueError(f"the VGG-like net needs images of at least 32x32 pixels, not {size}x{size}")
    if not round(width * _VGG_STAGES[0][0]):
        raise ValueError(f"a width of {width:g} leaves layers of the VGG-like net without units")
    first, later, around = _VGG_DROPOUT
    layers: list[nn.Module] = []
    for number, stage in enumerate(_VGG_STAGES):
        for place, full in enumerate(stage):
            outputs = round(width * full)
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            if dropout and place < len(stage) - 1:
                layers.append(nn.Dropout(later if number else first))
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    hidden = round(width * _VGG_HIDDEN)
    drop: list[nn.Module] = [nn.Dropout(around)] if dropout else []
    layers += [nn.Flatten(), *drop, nn.Linear(channels * features * features, hidden)]
    layers += [nn.BatchNorm1d(hidden), nn.ReLU(), *drop, nn.Linear(hidden, classes)]
    return nn.Sequential(*layers)


@torch.no_grad()
def narrow(model: nn.Module, std: float, seed: int) -> nn.Module:
    """Draw weights of linear layers from N(0, std²) and of convolutions by Glorot's rule; biases are 0.

    As sparse variational dropout begins (Molchanov et al. 2017); in place, else as `nets.initialise`.

    Example:
        >>> net = narrow(nn.Sequential(nn.Linear(4, 3)), 0.01, seed=0)
        >>> bool((net[0].weight.abs() < 0.06).all()), bool((net[0].bias == 0).all())
        (True, True)
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Conv2d):
            if module.bias is not None:
                module.bias.zero_()
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, std, generator=generator)
            else:
                nn.init.xavier_uniform_(module.weight, generator=generator)
    return model
