"""A user's own inputs, read from a file and compared with what a network was trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor


def read_inputs(file: Path, shape: list[int]) -> Tensor:
    """The one tensor of inputs in a .pt, .safetensors or .npy file.

    Args:
        file: Where it is.
        shape: Of one input, as the network takes it.

    Raises:
        ValueError: The network was not trained for what the file holds.

    Example:
        >>> read_inputs(Path("x.csv"), [1, 8, 8])
        Traceback (most recent call last):
            ...
        ValueError: x.csv is none of .pt, .safetensors, .npy: save the inputs as one of these
    """
    readers: dict[str, Callable[[], object]] = {
        ".pt": lambda: torch.load(file, map_location="cpu", weights_only=True),
        ".safetensors": lambda: load_file(file),
        ".npy": lambda: torch.from_numpy(np.load(file, allow_pickle=False)),
    }
    if file.suffix not in readers:
        raise ValueError(f"{file} is none of {', '.join(readers)}: save the inputs as one of these")
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}: choose another")
    try:
        content = readers[file.suffix]()
    except UnpicklingError:  # torch's own advice is to load it nevertheless
        raise ValueError(
            f"{file} is damaged or holds more than tensors, which might run code: save the tensor alone, or "
            "as .safetensors"
        ) from None
    except Exception as error:
        reason = str(error).partition("\n")[0]
        if "pickle" in reason:  # NumPy's advice too is to load it unsafely
            reason = "it holds no plain array"
        raise ValueError(f"{file} cannot be read as {file.suffix}: {reason}") from error
    if isinstance(content, dict) and len(content) == 1:
        (content,) = content.values()
    if not isinstance(content, torch.Tensor):
        raise ValueError(f"{file} must hold one tensor of inputs, not {type(content).__name__}")
    if not content.is_floating_point():
        raise ValueError(
            f"{file} holds {content.dtype}: pass floats scaled as in training, pixels from 0 to 1"
        )
    if list(content.shape[1:]) != shape or len(content) == 0:
        raise ValueError(f"{file} holds inputs {list(content.shape)}: the network takes [N, {str(shape)[1:]}")
    if not bool(torch.isfinite(content).all()):
        raise ValueError(f"{file} holds inputs that are not finite: remove them first")
    # Every set of the lab has its pixels in [0, 1]; the margin is for inputs with noise added.
    lowest, highest = float(content.min()), float(content.max())
    if lowest < -0.5 or highest > 1.5:
        reach = f"up to {highest:g}" if highest > 1.5 else f"down to {lowest:g}"
        raise ValueError(f"{file} holds values {reach}: scale pixels to 0 … 1")
    return content.float()
