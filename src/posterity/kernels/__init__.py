"""Triton kernels for the GPU; not importable where Triton is not installed."""

from posterity.kernels.conv import conv2d, conv2d_input_grad, conv2d_weight_grad
from posterity.kernels.guard import accept, finite, judge, report, verdict
from posterity.kernels.loss import cross_entropy
from posterity.kernels.matmul import linear, multiplies
from posterity.kernels.noise import add, moments, normal, perturb, transfer
from posterity.kernels.norm import batch_norm, batch_norm_grad, column_sums
from posterity.kernels.pool import max_pool2d, max_pool2d_grad, pools
from posterity.kernels.squares import batch_norm_squares, conv2d_squares

__all__ = [
    "accept",
    "add",
    "batch_norm",
    "batch_norm_grad",
    "batch_norm_squares",
    "column_sums",
    "conv2d",
    "conv2d_input_grad",
    "conv2d_squares",
    "conv2d_weight_grad",
    "cross_entropy",
    "finite",
    "judge",
    "linear",
    "max_pool2d",
    "max_pool2d_grad",
    "moments",
    "multiplies",
    "normal",
    "perturb",
    "pools",
    "report",
    "transfer",
    "verdict",
]
