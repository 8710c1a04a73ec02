"""The files of the data sets: where they lie, their published checksums, and how to get them.

Files are looked for in ``root``, else in the folder that the environment variable ``POSTERITY_DATA`` names,
else in ``~/.cache/posterity``.
"""

import errno
import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Literal
from urllib.error import URLError

from posterity_lab.hints import hint

Status = Literal["ok", "missing", "wrong checksum"]


class DataError(RuntimeError):
    """One sentence: what is wrong with a data set, where, and what to do.

    >>> try:
    ...     verify("minst")
    ... except DataError as error:
    ...     print(error)
    there is no data set 'minst', did you mean 'mnist'?
    """


@dataclass(frozen=True)
class File:
    """One file of a set, by its path below the data folder."""

    name: str
    split: Literal["train", "test"]
    path: str
    md5: str
    or_gzipped: bool = False  # whether a gzipped copy, of a name with .gz, will do; the md5 is of its content


@dataclass(frozen=True)
class Set:
    """What all files of a set share."""

    classes: int
    url: str = ""  # of the folder that holds the files or, with `archive_md5`, of a tar archive of them
    archive_md5: str = ""
    form: str = ""  # what to put there by hand where there is no url


_KRIZ = "https://www.cs.toronto.edu/~kriz/"
SETS = {
    "mnist": Set(10, "https://ossci-datasets.s3.amazonaws.com/mnist/"),
    "cifar10": Set(10, _KRIZ + "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    "cifar100": Set(100, _KRIZ + "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
    "notmnist": Set(10, form="letters A to J, gzipped idx like MNIST's"),
    "omniglot": Set(136, form="characters 28x28, light on dark, gzipped idx like MNIST's"),
    "mushrooms": Set(2, "https://archive.ics.uci.edu/ml/machine-learning-databases/mushroom/"),
    "svhn": Set(10, form="uint8 arrays `images` [N, 32, 32, 3] and `labels` [N] from 0 to 9"),
}
NAMES = ("digits", *SETS)
FILES = (
    File("mnist", "train", "MNIST/raw/train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    File("mnist", "train", "MNIST/raw/train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
    File("mnist", "test", "MNIST/raw/t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
    File("mnist", "test", "MNIST/raw/t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    File("cifar10", "train", "cifar-10-batches-py/data_batch_1", "c99cafc152244af753f735de768cd75f"),
    File("cifar10", "train", "cifar-10-batches-py/data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
    File("cifar10", "train", "cifar-10-batches-py/data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
    File("cifar10", "train", "cifar-10-batches-py/data_batch_4", "634d18415352ddfa80567beed471001a"),
    File("cifar10", "train", "cifar-10-batches-py/data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
    File("cifar10", "test", "cifar-10-batches-py/test_batch", "40351d587109b95175f43aff81a1287e"),
    File("cifar100", "train", "cifar-100-python/train", "16019d7e3df5f24257cddd939b257f8d"),
    File("cifar100", "test", "cifar-100-python/test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
    File("notmnist", "test", "notMNIST/raw/t10k-images-idx3-ubyte.gz", "2c87c839a4ef9b238846600eec8c35b7"),
    File("notmnist", "test", "notMNIST/raw/t10k-labels-idx1-ubyte.gz", "7ea9118cbafd0f6e3ee2ad771d782a01"),
    File("omniglot", "test", "omniglot/raw/images-idx3-ubyte.gz", "3cd3333531a6a79e052396a16e06b97a"),
    File("omniglot", "test", "omniglot/raw/labels-idx1-ubyte.gz", "cef6bcbd45cc505da90dfc9fe7b380c3"),
    File("mushrooms", "train", "uci/agaricus-lepiota.data", "08abc775ae2a79b402cc75f3a29e4b7d", True),
    File("svhn", "test", "svhn/test.npz", "a486ceea8f31ec9ef452b8c444ca0a96"),
)
# The published checksums are of the .gz files; MNIST is as often kept un-gzipped.
PLAIN_MD5 = {
    "MNIST/raw/train-images-idx3-ubyte.gz": "6bbc9ace898e44ae57da46a324031adb",
    "MNIST/raw/train-labels-idx1-ubyte.gz": "a25bea736e30d166cdddb491f175f624",
    "MNIST/raw/t10k-images-idx3-ubyte.gz": "2646ac647ad5339dbf082846283269ea",
    "MNIST/raw/t10k-labels-idx1-ubyte.gz": "27ae3e4e09519cfbb04c329615203637",
}


def verify(name: str, root: Path | None = None) -> dict[str, Status]:
    """Compare every file of the set `name` with its known md5.

    >>> verify("svhn", Path("/nowhere"))
    {'svhn/test.npz': 'missing'}
    """
    return {file.path: _status(folder_of(root), file) for file in files_of(name)}


def fetch(name: str, root: Path | None = None) -> list[Path]:
    """Download the files that `verify` does not call ok, and return those written.

    A file gets its name only when it is whole and its md5 is right, so call again after an interruption.

    Raises:
        DataError: There is no connection or no public download, what came is not the published file, or the
            folder cannot be written.

    >>> fetch("digits")  # part of scikit-learn
    []
    """
    folder = folder_of(root)
    wanted = [file for file in files_of(name) if _status(folder, file) != "ok"]
    if not wanted:
        return []
    known = SETS[name]
    if known.archive_md5:
        return _download(known.url, known.archive_md5, wanted, folder)
    if known.url:
        return [_download(known.url + Path(file.path).name, file.md5, [file], folder)[0] for file in wanted]
    raise DataError(f"{name} has no public download in this form: {remedy(name, folder)}")


def folder_of(root: Path | None) -> Path:
    """The data folder."""
    return Path(root or os.environ.get("POSTERITY_DATA") or "~/.cache/posterity").expanduser()


def files_of(name: str) -> list[File]:
    """The files of a set; `digits` has none."""
    if name not in NAMES:
        raise DataError(f"there is no data set {name!r}{hint(name, NAMES)}")
    return [file for file in FILES if file.name == name]


def locate(folder: Path, file: File) -> Path | None:
    """Where the file lies, gzipped or not; None if it does not."""
    path = folder / file.path
    others = [path.with_suffix("")] if file.path in PLAIN_MD5 else []
    others += [path.with_name(f"{path.name}.gz")] if file.or_gzipped else []
    return next((candidate for candidate in (path, *others) if candidate.is_file()), None)


def unpacked(path: Path) -> bytes:
    """The content of a file, gzipped or not."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _status(folder: Path, file: File) -> Status:
    path = locate(folder, file)
    if path is None:
        return "missing"
    if file.or_gzipped:
        try:
            seen = hashlib.md5(unpacked(path), usedforsecurity=False).hexdigest()
        except (OSError, EOFError, zlib.error):
            seen = ""
        return "ok" if seen == file.md5 else "wrong checksum"
    expected = file.md5 if path == folder / file.path else PLAIN_MD5[file.path]
    return "ok" if md5_of(path) == expected else "wrong checksum"


def md5_of(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def remedy(name: str, folder: Path) -> str:
    """What to do about a missing or damaged file, as the end of a sentence."""
    by_hand = " and ".join(file.path for file in files_of(name)) + f" ({SETS[name].form}) in {folder}"
    step = f"run `posterity data fetch {name}`" if SETS[name].url else f"put {by_hand}"
    return f"{step}, or set POSTERITY_DATA to a folder that has it"


def _download(url: str, md5: str, files: list[File], folder: Path) -> list[Path]:
    from rich.console import Console
    from rich.progress import wrap_file

    archived = url.endswith(".tar.gz")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Inside `folder`, because a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
            part = Path(temporary, "archive" if archived else files[0].path)
            part.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(url, timeout=30) as response, part.open("wb") as out:
                size, bar = int(response.headers.get("Content-Length", 0)), Console(stderr=True)
                with wrap_file(response, size, description=Path(url).name, console=bar) as stream:
                    shutil.copyfileobj(stream, out)
            if (seen := md5_of(part)) != md5:
                raise DataError(f"{url} sent a file of md5 {seen}, not {md5}, so it was not kept: try again")
            if archived:
                with tarfile.open(part) as archive:
                    members = [archive.getmember(file.path) for file in files]
                    archive.extractall(temporary, members, filter="data")
            for file in files:
                (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(temporary, file.path), folder / file.path)
    except (OSError, HTTPException, tarfile.TarError, KeyError) as error:
        if isinstance(error, OSError) and _local(error):
            raise DataError(
                f"{folder} cannot be written ({error.strerror}): set POSTERITY_DATA to another folder"
            ) from error
        step = "unpack it in" if archived else f"save it as {files[0].path} in"
        raise DataError(
            f"{url} could not be fetched ({getattr(error, 'reason', error)}): download it where there is "
            f"internet and {step} {folder}, or set POSTERITY_DATA to a folder that has it"
        ) from error
    return [folder / file.path for file in files]


def _local(error: OSError) -> bool:
    """Whether the disk, not the network, is to blame: errors of a connection name no file."""
    if isinstance(error, URLError):
        return False
    return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT)
