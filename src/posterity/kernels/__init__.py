"""Triton kernels for the GPU; not importable where Triton is not installed."""

from posterity.kernels.noise import moments, normal, perturb

__all__ = ["moments", "normal", "perturb"]
