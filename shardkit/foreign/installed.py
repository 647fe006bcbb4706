"""Keys that the installed release of a tool knows, read from its source: no package is imported.

The tables hold the keys of one recorded release. A key that they lack may be newer, so it is looked up in the release
that is installed beside shardkit.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class _Source:
    """Files of a package, and which of their classes declare keys."""

    package: str
    patterns: tuple[str, ...]
    classes: str = r"\w+"


_TRAINING_ARGUMENTS = _Source("transformers", ("training_args.py",))
_SOURCES: dict[str, tuple[_Source, ...]] = {
    "trainer": (_TRAINING_ARGUMENTS,),
    "trl": (
        _Source("trl", ("trainer/*_config.py", "experimental/*/*_config.py", "scripts/utils.py")),
        _TRAINING_ARGUMENTS,
    ),
    "llamafactory": (_Source("llamafactory", ("hparams/*.py",)), _TRAINING_ARGUMENTS),
    "axolotl": (_Source("axolotl", ("utils/schemas/**/*.py",)),),
    "peft": (_Source("peft", ("config.py", "tuners/lora/config.py"), r"PeftConfig(?:Mixin)?|LoraConfig"),),
}
"""Tool → where its keys are declared; the first package's release is the tool's."""
LOOKED_UP = frozenset(_SOURCES)
"""Tools whose source is read. DeepSpeed's keys at the top of its file are declared by no class; Accelerate is asked."""


@dataclass(frozen=True)
class Release:
    """An installed release of a tool.

    Attributes:
        names: keys at the top of its files.
        names_in_sections: keys that some section of its files may hold.
    """

    version: str
    names: frozenset[str]
    names_in_sections: frozenset[str] = frozenset()

    def knows(self, key: str) -> bool:
        """Whether the release declares a dotted key; of a key in a section only its name is compared."""
        section, _, name = key.rpartition(".")
        return name in (self.names_in_sections if section else self.names)


@lru_cache
def installed_release(tool: str) -> Release | None:
    """The release of a tool that this Python would import; `None` if there is none, or its source is laid out anew."""
    names: set[str] = set()
    for source in _SOURCES.get(tool, ()):
        folder = _folder(source.package)
        if folder is None:
            return None
        paths = [path for pattern in source.patterns for path in sorted(folder.glob(pattern))]
        fields = {name for path in paths for name in _fields(path, source.classes)}
        if not fields:
            return None
        names |= fields
    if not names:
        return None
    package = _SOURCES[tool][0].package
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:  # a folder of that name, and no installed package
        return None
    of_sections = names if tool == "axolotl" else ()  # its sections are classes beside the others
    return Release(version, frozenset(names), frozenset(of_sections))


def _folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _fields(path: Path, classes: str) -> Iterator[str]:
    """Annotated fields of the classes in a file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and re.fullmatch(classes, node.name):
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.target.id
