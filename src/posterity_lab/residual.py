"""ResNet-18 for small images, and as the VOGN paper's authors ran it; ResNet-20 for CIFAR."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn


class _Residual(nn.Module):
    """Two convolutions with BatchNorm, added to their input; a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, batch_norm: bool) -> None:
        super().__init__()
        first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=not batch_norm)
        second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=not batch_norm)
        self.body = nn.Sequential(
            first, *_norm(outputs, batch_norm), nn.ReLU(), second, *_norm(outputs, batch_norm)
        )
        self.shortcut = nn.Sequential()
        if (inputs, stride) != (outputs, 1):
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=not batch_norm)
            self.shortcut = nn.Sequential(projection, *_norm(outputs, batch_norm))
        self.last = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(x) + self.shortcut(x))
        return out


def resnet18(
    channels: int, classes: int, *, stem: Literal["small", "imagenet"] = "small", batch_norm: bool = True
) -> nn.Sequential:
    """ResNet-18: a stem, then eight blocks of 64 to 512 channels; any image size will do.

    At 3 channels, 10 classes and the small stem it has 11.17 million parameters.

    Args:
        channels: Channels of the image.
        classes: Outputs (logits).
        stem: ``"small"`` for a 3x3 convolution without pooling; ``"imagenet"`` for one of 7x7 and a pooling,
            each of stride 2, which leaves 8x8 features of a 32x32 image.
        batch_norm: BatchNorm after every convolution; without it, convolutions have biases.

    Example:
        >>> import torch
        >>> resnet18(3, 10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    small = stem == "small"
    size, stride, padding = (3, 1, 1) if small else (7, 2, 3)
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 64, size, stride, padding, bias=not batch_norm),
        *_norm(64, batch_norm),
        nn.ReLU(),
        *([] if small else [nn.MaxPool2d(3, 2, padding=1)]),
    ]
    before = 64
    for width in (64, 128, 256, 512):
        first = _Residual(before, width, 1 if width == before else 2, batch_norm)
        layers += [first, _Residual(width, width, 1, batch_norm)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def resnet20(channels: int, classes: int) -> nn.Sequential:
    """ResNet-20: a 3x3 convolution, nine blocks of 16, 32 and 64 channels, one linear layer.

    He et al. 2016, section 4.2, with a 1x1 convolution where a block changes the shape. At 3 channels and 10
    classes it has 0.27 million parameters.

    Args:
        channels: Channels of the image.
        classes: Outputs (logits).

    Example:
        >>> import torch
        >>> resnet20(3, 10)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    before = 16
    for width in (16, 32, 64):
        layers.append(_Residual(before, width, 1 if width == before else 2, batch_norm=True))
        layers += [_Residual(width, width, 1, batch_norm=True) for _ in range(2)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def _norm(width: int, wanted: bool) -> list[nn.Module]:
    return [nn.BatchNorm2d(width)] if wanted else []
