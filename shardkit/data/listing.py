"""List the files of a data set, and split them into training and validation files, by a hash or by their names."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import DataError

_SKIPPED_DIRECTORIES = {"__pycache__", "site-packages", "dist-packages"}
_WILDCARDS = frozenset("*?[")
_SNIFFED_BYTES = 8192


@dataclass(frozen=True)
class TextFile:
    """A file of a corpus; `name` is its path relative to the corpus' root, with forward slashes."""

    path: str
    name: str
    size: int
    mtime_ns: int


def find_files(path: str) -> list[TextFile]:
    """A file, the files of a directory or those of a glob, sorted by relative path, without hidden and `.bin` files.

    Raises:
        DataError: the path does not exist, cannot be read, or holds no file.
    """
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        files = [_stat(expanded, os.path.basename(expanded))]
        if not files[0].size:
            raise DataError(f"data path {path} is an empty file", "set data.path to text that is not empty")
    elif os.path.isdir(expanded):
        files = walk(expanded)
        weights = [file.name for file in files if file.name.endswith(".safetensors")]
        if weights and os.path.isfile(os.path.join(expanded, "config.json")):
            raise DataError(
                f"data path {path} is a model folder: it holds config.json and {weights[0]}",
                "set data.path to your text or records; a model folder belongs in model.init_from",
            )
    elif _WILDCARDS & set(expanded):
        parts = Path(expanded).parts
        fixed = next(i for i, part in enumerate(parts) if _WILDCARDS & set(part))
        root = os.path.join(*parts[:fixed]) if fixed else os.curdir
        files = _sorted_files(glob.glob(expanded, recursive=True), root)
    else:
        raise DataError(
            f"data path {path} does not exist",
            "set data.path to a file of text or records, a directory, a glob or a .bin file",
        )
    if not files:
        raise DataError(
            f"data path {path} holds no text files",
            "set data.path to a text file, a directory or a glob of text; token files are given one by one, as a .bin",
        )
    return files


def is_text(file: TextFile) -> bool:
    """Whether the first 8 KiB hold no zero byte (git's rule for telling text from binary)."""
    try:
        with open(file.path, "rb") as stream:
            return b"\0" not in stream.read(_SNIFFED_BYTES)
    except OSError as error:
        raise unreadable(file.path, error) from error


def split_files(files: list[TextFile], val_fraction: float) -> tuple[list[TextFile], list[TextFile]]:
    """Training and validation files: a file validates when the hash of its name falls in the first `val_fraction`.

    A file stays in its part when others come or go. With two files or more, neither part is empty: the file with the
    smallest hash validates and the one with the largest trains. With `val_fraction` 0 all train.
    """
    val_names = held_out([file.name for file in files], val_fraction)
    return [f for f in files if f.name not in val_names], [f for f in files if f.name in val_names]


def held_out(names: list[str], val_fraction: float) -> set[str]:
    """The names of `split_files`' validation part."""
    if not val_fraction:
        return set()
    fractions = {name: _hash_fraction(name) for name in names}
    ordered = sorted(names, key=lambda name: (fractions[name], name))
    n_val = sum(fraction < val_fraction for fraction in fractions.values())
    if len(names) > 1:
        n_val = min(max(n_val, 1), len(names) - 1)
    return set(ordered[:n_val])


SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split → the words that mean it in the names of files and folders, as in `datasets`."""
_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")


def splits_by_name(names: list[str]) -> dict[str, set[str]]:
    """Split → the files in it, by the rules of `datasets` (data_files.py); empty if no name means a split.

    The first rule that applies to any file decides: `data/SPLIT-00000-of-00001.*`, then words in the names of folders,
    then in those of files, where `-`, `.`, `_`, a space or a digit ends a word. Unlike there, case does not matter: the
    test data of `Train.jsonl` and `Test.jsonl` would be trained.
    """
    shards = {name: match[1] for name in names if (match := _SHARD.fullmatch(name))}
    if shards:
        splits: dict[str, set[str]] = {}
        for name, split in shards.items():
            split = next((s for s, words in SPLIT_WORDS.items() if split.lower() in words), split)
            splits.setdefault(split, set()).add(name)
        return splits
    for of_folder in (True, False):
        splits = {}
        for split, words in SPLIT_WORDS.items():
            end = "(?:[-._ 0-9].*)?" if of_folder else "[-._ 0-9].*"
            pattern = re.compile(f"(?:.*[-._ 0-9])?(?:{'|'.join(words)}){end}", re.IGNORECASE)
            for name in names:
                *folders, last = name.split("/")
                if any(pattern.fullmatch(part) for part in (folders if of_folder else [last])):
                    splits.setdefault(split, set()).add(name)
        if splits:
            return splits
    return {}


def unreadable(path: str, error: OSError) -> DataError:
    """The error for a file or folder that the system refuses to read."""
    return DataError(f"{path} cannot be read: {error.strerror or error}", "check the path and its permissions")


def _hash_fraction(name: str) -> float:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _stat(path: str, name: str) -> TextFile:
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    return TextFile(path, name.replace(os.sep, "/"), status.st_size, status.st_mtime_ns)


def _sorted_files(paths: Iterable[str], root: str) -> list[TextFile]:
    files = [_stat(path, os.path.relpath(path, root)) for path in paths if os.path.isfile(path)]
    return sorted((file for file in files if file.size and not file.name.endswith(".bin")), key=lambda file: file.name)


def walk(root: str) -> list[TextFile]:
    """All files below a folder, sorted by relative path, without hidden, `.bin` and empty ones and installed packages.

    Raises:
        DataError: a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise unreadable(str(error.filename), error) from error

    paths: list[str] = []
    for directory, subdirectories, names in os.walk(root, onerror=fail):
        subdirectories[:] = [s for s in subdirectories if not s.startswith(".") and s not in _SKIPPED_DIRECTORIES]
        paths += [os.path.join(directory, name) for name in names if not name.startswith(".")]
    return _sorted_files(paths, root)
