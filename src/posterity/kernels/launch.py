"""Prepared launches with little overhead.

A call of a kernel inspects every argument to find the compiled version, which takes longer than many kernels
run. If the numbers that change do not affect the compilation, only the tensors' addresses matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor


@final
class Launch:
    """A kernel, its grid, and all arguments except tensors and numbers that change.

    Args:
        kernel: A Triton kernel; its parameters are tensors, then numbers that change, on which it must not
            specialise, then the other numbers.
        grid: Number of programs along three axes.
        numbers: All of the other numbers, in the kernel's order.
        options: Compiler options.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], numbers: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        self._kernel, self._grid, self._numbers, self._options = kernel, grid, numbers, options
        self._runs: dict[tuple[int, ...], tuple[Callable[..., Any], Any, Any]] = {}

    def __call__(self, *tensors: Tensor, given: tuple[float, ...] = ()) -> None:
        """Run it on tensors and numbers that change, whose types never change, if the grid is not empty."""
        if not self._grid[0]:
            return
        if torch.compiler.is_compiling():  # a compiler only supports Triton's own launch
            self._kernel[self._grid](*tensors, *given, *self._numbers, **self._options)
            return
        places = [each.data_ptr() for each in tensors]
        # A program is made for the current device, where it runs, and for addresses that are
        # multiples of 16 bytes or are not.
        device = torch._C._cuda_getDevice() if tensors[0].is_cuda else -1
        key = (device, *[place % 16 for place in places])
        compiled = self._runs.get(key)
        if compiled is not None:
            # Like Triton's own launch, but without hooks, and without queries of the driver for addresses.
            stream = torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0
            run, function, packed = compiled
            run(*self._grid, stream, function, packed, None, None, None, *places, *given, *self._numbers)
            return
        made = self._kernel[self._grid](*tensors, *given, *self._numbers, **self._options)
        if made is not None:  # Triton's interpreter does not compile
            self._runs[key] = made.run, made.function, made.packed_metadata
