"""Warnings point to the user's own line, however deep inside the library they arise."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from types import FrameType

import torch

# Python 3.12 has skip_file_prefixes= for this; the oldest version that we support has not. contextlib is
# there for context managers, whose last lines it calls.
_PASSED = (os.path.dirname(__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep, contextlib.__file__)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is neither the library's nor torch's.

    Example:
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     warn("lower lr")
        >>> str(caught[0].message), caught[0].filename.startswith("<doctest")
        ('lower lr', True)
    """
    frame = _caller(sys._getframe())
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=names.get("__name__", "<string>"),  # a warning of None is dropped
        registry=names.setdefault("__warningregistry__", {}),
    )


def _caller(frame: FrameType) -> FrameType:
    """The user's frame; the outermost in a thread that has none of the user's."""
    while frame.f_code.co_filename.startswith(_PASSED) and frame.f_back is not None:
        frame = frame.f_back
    return frame
