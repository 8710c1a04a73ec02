"""Triton kernels for the GPU; not importable where Triton is not installed."""

from posterity.kernels.loss import cross_entropy
from posterity.kernels.matmul import linear, linear_input_grad, linear_moments, multiplies
from posterity.kernels.noise import moments, normal, perturb, transfer

__all__ = [
    "cross_entropy",
    "linear",
    "linear_input_grad",
    "linear_moments",
    "moments",
    "multiplies",
    "normal",
    "perturb",
    "transfer",
]
