"""Kernels run on a GPU, or on any machine in Triton's interpreter: ``TRITON_INTERPRET=1``."""

import importlib.util
import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is None:
    raise pytest.UsageError("TRITON_INTERPRET=1 asks for Triton, which is not installed: pip install triton")
