"""Launches that a layer's sizes decide: worked out once, and then as cheap as Triton has them.

A kernel that is called looks at every argument to find what it was compiled for, which takes longer than many
a kernel runs. Where all numbers are known beforehand, only the tensors' addresses can change that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor


@final
class Launch:
    """A kernel, its programs, and all arguments but tensors.

    Args:
        kernel: Of Triton, with tensors as its first parameters.
        grid: How many programs along three axes.
        numbers: The other arguments, all of them, in the kernel's order.
        options: How it is compiled.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], numbers: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        self._kernel, self._grid, self._numbers, self._options = kernel, grid, numbers, options
        self._runs: dict[tuple[int, ...], Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Run it on tensors of always the same types."""
        # A program is made for one device, and for addresses that are multiples of 16 bytes or are not.
        key = (tensors[0].get_device(), *[each.data_ptr() % 16 for each in tensors])
        run = self._runs.get(key)
        if run is not None:
            run(*tensors, *self._numbers)
            return
        compiled = self._kernel[self._grid](*tensors, *self._numbers, **self._options)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._runs[key] = compiled[self._grid]
