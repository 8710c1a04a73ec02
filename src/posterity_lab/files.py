"""The files of the data sets: where they lie, their checksums, and how to get them.

MNIST's and CIFAR's checksums are published. The others are not: notMNIST's are of a public sample of it, and
Omniglot's and SVHN's of the conversion that the records were made with.

Files are looked for in ``root``, else in the folder that the environment variable ``POSTERITY_DATA`` names,
else in ``~/.cache/posterity``.
"""

import gzip
import hashlib
import os
import shutil
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posterity_lab.disk import locked, md5_of
from posterity_lab.download import DownloadError, download
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
    largest: int = 0  # bytes that a download may have
    form: str = ""  # what to put there by hand where there is no url


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
_KRIZ = "https://www.cs.toronto.edu/~kriz/"
SETS = {
    "mnist": Set(10, "https://ossci-datasets.s3.amazonaws.com/mnist/", largest=10_000_000),
    "cifar10": Set(10, _KRIZ + "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 180_000_000),
    "cifar100": Set(100, _KRIZ + "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 180_000_000),
    "notmnist": Set(10, form="letters A to J, gzipped idx like MNIST's"),
    "omniglot": Set(136, form="characters 28x28, light on dark, gzipped idx like MNIST's"),
    "mushrooms": Set(2, _UCI + "mushroom/", largest=400_000),
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
# The published checksums are of the .gz files; MNIST is as often kept un-gzipped, which gives these.
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

    A file gets its name only when it is whole and its md5 is right. Call again after an interruption: what is
    there of a file is not asked for twice.

    Raises:
        DataError: There is no connection or no public download, what came is not the published file, or the
            folder cannot be written.
        ValueError: Another process fetches into this folder.

    >>> fetch("digits")  # part of scikit-learn
    []
    """
    folder = folder_of(root)
    wanted = [file for file in files_of(name) if _status(folder, file) != "ok"]
    if not wanted:
        return []
    known = SETS[name]
    if not known.url:
        raise DataError(f"{name} has no public download in this form: {remedy(name, folder)}")
    try:
        with locked(folder):
            if known.archive_md5:
                archive = _fetched(known.url, known.archive_md5, known.largest, folder, "unpack it in")
                try:
                    _unpack(archive, wanted, folder)
                finally:
                    archive.unlink()
            else:
                for file in wanted:
                    url, step = known.url + Path(file.path).name, f"save it as {file.path} in"
                    _place(_fetched(url, file.md5, known.largest, folder, step), folder / file.path)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written ({error.strerror or error}): set POSTERITY_DATA to another folder"
        ) from error
    return [folder / file.path for file in wanted]


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


def _status(folder: Path, file: File) -> Status:
    path = locate(folder, file)
    if path is None:
        return "missing"
    try:
        # In pieces, where it is large.
        seen = _md5(content_of(path, file)) if file.or_gzipped else md5_of(path)
    except (OSError, EOFError, zlib.error):  # of a damaged gzip file
        return "wrong checksum"
    return "ok" if seen == known_md5(path, file) else "wrong checksum"


def content_of(path: Path, file: File) -> bytes:
    """What the checksum of a file is of: all of it or, of a gzipped copy that will do, what is in it."""
    content = path.read_bytes()
    return gzip.decompress(content) if file.or_gzipped and content[:2] == b"\x1f\x8b" else content


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def known_md5(path: Path, file: File) -> str:
    """What the file's checksum must be where `locate` found it.

    >>> known_md5(Path("t10k-labels-idx1-ubyte"), FILES[3])
    '27ae3e4e09519cfbb04c329615203637'
    """
    own = file.or_gzipped or path.name == Path(file.path).name
    return file.md5 if own else PLAIN_MD5[file.path]


def remedy(name: str, folder: Path) -> str:
    """What to do about a missing or damaged file, as the end of a sentence."""
    by_hand = " and ".join(file.path for file in files_of(name)) + f" ({SETS[name].form}) in {folder}"
    step = f"run `posterity data fetch {name}`" if SETS[name].url else f"put {by_hand}"
    return f"{step}, or set POSTERITY_DATA to a folder that has it"


def _fetched(url: str, md5: str, largest: int, folder: Path, step: str) -> Path:
    """A whole file that was published, under a name of its own; ``step`` says what to do with it by hand."""
    part = folder / f".fetch-{md5}"
    try:
        download(url, part, md5, largest)
    except DownloadError as error:
        again = "run this again to go on, or " if part.exists() else ""
        raise DataError(
            f"{url} could not be fetched ({error}): {again}download it where there is internet and {step} "
            f"{folder}, or set POSTERITY_DATA to a folder that has it"
        ) from error
    return part


def _unpack(archive: Path, files: list[File], folder: Path) -> None:
    with tarfile.open(archive) as content:
        for file in files:
            try:
                member = content.extractfile(file.path)
            except KeyError:
                member = None
            if member is None:
                raise DataError(
                    f"the archive of {file.name} has no file {file.path}: it is not the known one"
                )
            part = folder / f".fetch-{file.md5}"
            try:
                with part.open("wb") as out:
                    shutil.copyfileobj(member, out)
                _place(part, folder / file.path)
            finally:
                part.unlink(missing_ok=True)


def _place(part: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part, path)
