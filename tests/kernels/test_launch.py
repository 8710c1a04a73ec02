"""A launch finds what was compiled for it, and goes there by addresses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
launch = pytest.importorskip("posterity.kernels.launch", reason="needs Triton")


class Kernel:
    """Stands for a kernel of Triton: notes how it is called, and what its programs get."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*args: Any, **options: int) -> Any:
            self.compiled.append((grid, *args, options))
            return SimpleNamespace(
                run=lambda *given: self.ran.append(given), function="function", packed_metadata="packed"
            )

        return run


def test_kernel_compiles_once_per_alignment_for_any_numbers() -> None:
    kernel = Kernel()
    run = launch.Launch(kernel, (3, 1, 1), (True, 128), {"num_warps": 2})
    x, y = torch.zeros(64), torch.zeros(64)
    run(x, y, given=(7, 0.5))
    assert kernel.compiled == [((3, 1, 1), x, y, 7, 0.5, True, 128, {"num_warps": 2})]
    run(y, x, given=(8, 0.25))
    run(x[4:], y, given=(9, 0.25))
    how = (3, 1, 1, 0, "function", "packed", None, None, None)  # programs, stream, what was compiled, hooks
    assert kernel.ran == [
        (*how, y.data_ptr(), x.data_ptr(), 8, 0.25, True, 128),
        (*how, x.data_ptr() + 16, y.data_ptr(), 9, 0.25, True, 128),
    ]
    run(x[1:], y, given=(9, 0.25))
    assert len(kernel.compiled) == 2
    assert len(kernel.ran) == 2


def test_a_compiler_sees_it_called_as_triton_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Kernel(), torch.zeros(64)
    run = launch.Launch(kernel, (3, 1, 1), (128,), {"num_warps": 2})
    run(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    run(x)
    assert kernel.compiled == [((3, 1, 1), x, 128, {"num_warps": 2})] * 2
    assert not kernel.ran


def test_without_programs_nothing_runs() -> None:
    kernel = Kernel()
    launch.Launch(kernel, (0, 1, 1), (), {})(torch.zeros(3))
    assert not kernel.compiled
