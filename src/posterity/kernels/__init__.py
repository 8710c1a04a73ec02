"""Triton kernels for the GPU; not importable where Triton is not installed."""

from posterity.kernels.conv import channels_last, conv2d, conv2d_input_grad, conv2d_weight_grad
from posterity.kernels.loss import cross_entropy
from posterity.kernels.matmul import linear, multiplies
from posterity.kernels.noise import moments, normal, perturb, transfer

__all__ = [
    "channels_last",
    "conv2d",
    "conv2d_input_grad",
    "conv2d_weight_grad",
    "cross_entropy",
    "linear",
    "moments",
    "multiplies",
    "normal",
    "perturb",
    "transfer",
]
