"""Other libraries: the versions that shardkit is tested with, and their private names that it uses.

Only the modules in `PLACES` use such names. A feature that misses one logs a line and switches itself off; the rest
goes on.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import re
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from ..errors import ShardkitError

TESTED = {
    "torch": ("2.9.0", "2.15.0"), "deepspeed": ("0.19.3", "0.19.8"), "transformers": ("5.20.0", "5.23.0"),
    "accelerate": ("1.0.0", "1.15.0"),
}  # fmt: skip
"""Library → (the oldest, the newest version that the tests have passed on); the oldest are setup.cfg's bounds."""
PLACES = (
    "shardkit.parallel.compat",
    "shardkit.memory.tracing.compat",
    "shardkit.plan.simulate.compat",
    "shardkit.strategies.zero.state",
)
"""The modules with the tables of private names; the last represents its package."""
NO_ISSUE = "no upstream issue known"
ABSENT = "(not installed)"
_LOG = logging.getLogger(__name__)


_CHATTY = ("torchao", "torch.utils._pytree", "bitsandbytes")


def quiet() -> None:
    """Silence warnings that a user can do nothing about: about other machines' kernels, or meant for library authors.

    TORCH_LOGS, or a log level that is already set, keeps them.
    """
    for name in () if os.environ.get("TORCH_LOGS") else _CHATTY:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)


class NameGone(ShardkitError):
    """A library no longer has a private name that a part of shardkit needs."""


@dataclass(frozen=True)
class Private:
    """A library's private name, or a public one that shardkit replaces for a while."""

    # dotted, from the library's top; a class's attribute may exist on its instances only.
    # `torch.lib.<library>.<symbol>` is a symbol of one of torch's shared libraries.
    path: str
    feature: str  # the feature that is lost without it
    upstream: str = NO_ISSUE  # the issue or pull request that would make it unnecessary
    until: str = ""  # the version that makes it unnecessary; empty while there is none
    cuda: bool = False  # only builds for CUDA have it
    since: str = ""  # the oldest version that has it; empty if every supported version does

    @property
    def library(self) -> str:
        return self.path.partition(".")[0]

    def find(self) -> Any:
        owner, attributes = _holder(self.path)
        try:
            for part in attributes:
                owner = getattr(owner, part)
        except AttributeError:
            raise self.gone() from None
        return owner

    def needed(self) -> bool:
        """Whether shardkit uses the name with the installed version; False if the library is not installed."""
        version = installed(self.library)
        if version == ABSENT or (self.cuda and import_module("torch").version.cuda is None):
            return False
        release = _number(version)
        return release >= _number(self.since) and (not self.until or release < _number(self.until))

    def exists(self) -> bool:
        """Whether the name exists, also as an attribute that a class gives to its instances."""
        owner, attributes = _holder(self.path)
        for part in attributes:
            if hasattr(owner, part):
                owner = getattr(owner, part)
            elif not isinstance(owner, type) or not _given_to_instances(owner, part):
                return False
        return True

    def gone(self) -> NameGone:
        return NameGone(f"{self.description()}, which {self.feature} needs", f"install {tested(self.library)}")

    def description(self) -> str:
        return f"{self.library} {installed(self.library)} has no {self.path}"


class Feature:
    """A part of shardkit, and the private names that it needs."""

    def __init__(self, name: str) -> None:
        self.name = name  # its name in tables and messages
        self.names: list[Private] = []  # all private names that it needs, in the order they were declared
        self._missing: list[Private] = []
        self._warned: set[str] = set()

    def take(self, path: str, upstream: str = NO_ISSUE, until: str = "") -> Any:
        """The object of that name; if it is gone, a class that cannot be instantiated."""
        private = self.use(path, upstream, until)
        try:
            return private.find()
        except NameGone as error:
            self._missing.append(private)
            gone = error

        def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
            raise gone

        # An exception, so that `except` clauses accept it; other code may use it as a base class or a function.
        return type("Gone", (Exception,), {"__new__": refuse})

    def use(self, path: str, upstream: str = NO_ISSUE, until: str = "", cuda: bool = False, since: str = "") -> Private:
        """Declare a name that is looked up later: an instance's attribute, or one of a library that may be absent."""
        private = Private(path, self.name, upstream, until, cuda, since)
        self.names.append(private)
        return private

    def works(self, part: str = "", instead: str = "") -> bool:
        """Whether all names that `take` looked up exist; if not, rank 0 says so, once for each `part`.

        `part`: the part that is switched off; empty for the whole feature. `instead`: the behaviour without it.
        """
        if self._missing:
            self.lost(self._missing[0], part, instead)
        return not self._missing

    def lost(self, private: Private, part: str = "", instead: str = "") -> None:
        """Say once, on rank 0, that a part is off because a name is missing."""
        part = part or self.name
        if part not in self._warned and is_first_rank():
            _LOG.warning("%s is off%s: %s", part, f" ({instead})" if instead else "", private.description())
        self._warned.add(part)

    def require(self) -> None:
        """Raise if a name is gone."""
        if self._missing:
            raise self._missing[0].gone()


def installed(library: str) -> str:
    """The installed version, without its build's suffix."""
    try:
        return metadata.version(library).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ABSENT


def tested(library: str) -> str:
    oldest, newest = TESTED[library]
    return f"{library} {oldest} to {newest}"


def say_untested() -> None:
    """Log one line on rank 0 if torch is newer than any version that passed the tests."""
    version = installed("torch")
    if is_first_rank() and _number(version) > _number(TESTED["torch"][1]):
        _LOG.warning("torch %s is newer than what shardkit is tested with: %s", version, tested("torch"))


def _number(version: str) -> tuple[int, ...]:
    """`2.15.0a1` → (2, 15, 0): a pre-release counts as its release."""
    return tuple(int(digits[0]) for part in version.split(".")[:3] if (digits := re.match(r"\d+", part)))


def is_first_rank() -> bool:
    """Whether this process is rank 0, according to its launcher; for messages before the ranks are joined."""
    return (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0"


def _holder(path: str) -> tuple[Any, list[str]]:
    """The innermost module of a dotted name that can be imported (or a shared library), and the remaining parts."""
    parts = path.split(".")
    if parts[:2] == ["torch", "lib"]:
        folder = Path(import_module("torch").__file__ or "").parent / "lib"
        return ctypes.CDLL(str(next(folder.glob(f"{parts[2]}.*"), ""))), parts[3:]
    for end in range(len(parts), 0, -1):
        try:
            return import_module(".".join(parts[:end])), parts[end:]
        except ModuleNotFoundError as error:
            if not path.startswith(error.name or " "):
                raise  # the module is there, and lacks something else
    return None, parts


def _given_to_instances(cls: type, name: str) -> bool:
    """Whether a class annotates the name, or its code assigns it to `self` or to a `param`."""
    for base in cls.__mro__[:-1]:
        if name in vars(base).get("__annotations__", {}):
            return True
        try:
            if re.search(rf"\b(?:self|param)\.{name}\b[^=\n(]*=", inspect.getsource(base)):
                return True
        except (OSError, TypeError):  # a class without Python code
            continue
    return False
