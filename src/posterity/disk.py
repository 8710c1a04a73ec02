"""Atomic writing of files, and tensors written one by one without extra memory."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

# safetensors' names of dtypes.
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path for writing a file, which is renamed when the block ends.

    The path is unique: two processes never write to one file, and a reader sees the file before or after,
    whenever a process or the machine stops.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(Path(folder) / "note") as unfinished:
        ...         _ = unfinished.write_text("kept")
        ...     (Path(folder) / "note").read_text()
        'kept'
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}: make it first")
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        yield unfinished
        _sync(unfinished, os.O_RDWR)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    if os.name == "posix":
        _sync(path.parent, os.O_RDONLY)  # else a machine that stops may forget the name


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, copying at most one tensor at a time.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_tensors(Path(folder) / "file", {"w": torch.ones(2)}, {"made": "here"})
        ...     load_file(Path(folder) / "file")
        {'w': tensor([1., 1.])}
    """
    # In the order of safetensors, which keeps every tensor at a multiple of its numbers' size.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        if tensor.dtype not in _TYPES:
            raise TypeError(f"{name!r} is of type {tensor.dtype}, which is not saved: convert it to float32")
        end += tensor.numel() * tensor.itemsize
        entries[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb") as file:  # by Python, so that it has the permissions of any other file
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            write_numbers(file.write, tensors[name])


def write_numbers(write: Callable[[memoryview], object], tensor: Tensor) -> None:
    """Hand a tensor's memory to a function, such as a file's ``write`` or a digest's ``update``.

    Example:
        >>> from hashlib import sha256
        >>> digest = sha256()
        >>> write_numbers(digest.update, torch.zeros(2))
        >>> digest.hexdigest() == sha256(bytes(8)).hexdigest()
        True
    """
    own = tensor.detach().cpu().contiguous()
    size = own.numel() * own.itemsize
    if size:
        write(memoryview((ctypes.c_char * size).from_address(own.data_ptr())))


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
