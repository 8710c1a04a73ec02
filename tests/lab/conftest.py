"""Shared by the lab's tests: how a GPU test refuses to wait for the device."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Whatever waits for the GPU raises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    return _no_waiting
