"""The fast path: one call trains on a batch with all weight samples, on a GPU as one CUDA graph."""

from posterity.train.compiled import compile_step

__all__ = ["compile_step"]
