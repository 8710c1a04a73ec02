"""Shared by all tests: a quiet machine and a fixed seed for whatever a test draws itself."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(0)
