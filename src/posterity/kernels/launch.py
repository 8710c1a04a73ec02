"""Launches worked out once, and then as cheap as Triton has them.

A kernel that is called looks at every argument to find what it was compiled for, which takes longer than many
a kernel runs. Where it is not compiled for the numbers that change, only the tensors' addresses matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor


@final
class Launch:
    """A kernel, its programs, and all arguments but tensors and the numbers that change.

    Args:
        kernel: Of Triton; its parameters are tensors, then numbers that change, which it is not to specialise
            on, then the other numbers.
        grid: How many programs along three axes.
        numbers: The other numbers, all of them, in the kernel's order.
        options: How it is compiled.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], numbers: tuple[Any, ...], options: dict[str, int]
    ) -> None:
        self._kernel, self._grid, self._numbers, self._options = kernel, grid, numbers, options
        self._runs: dict[tuple[int, ...], tuple[Callable[..., Any], Any, Any]] = {}

    def __call__(self, *tensors: Tensor, given: tuple[float, ...] = ()) -> None:
        """Run it on tensors, and numbers that change, of always the same types, if there are programs."""
        if not self._grid[0]:
            return
        if torch.compiler.is_compiling():  # a compiler knows Triton's own way alone
            self._kernel[self._grid](*tensors, *given, *self._numbers, **self._options)
            return
        places = [each.data_ptr() for each in tensors]
        # A program is made for the current device, where it runs, and for addresses that are
        # multiples of 16 bytes or are not.
        device = torch._C._cuda_getDevice() if tensors[0].is_cuda else -1
        key = (device, *[place % 16 for place in places])
        compiled = self._runs.get(key)
        if compiled is not None:
            # As Triton itself does, but without hooks; of a tensor it would ask the driver for its place.
            stream = torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0
            run, function, packed = compiled
            run(*self._grid, stream, function, packed, None, None, None, *places, *given, *self._numbers)
            return
        made = self._kernel[self._grid](*tensors, *given, *self._numbers, **self._options)
        if made is not None:  # Triton's interpreter compiles nothing
            self._runs[key] = made.run, made.function, made.packed_metadata
