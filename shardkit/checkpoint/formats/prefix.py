"""The prefix by which a model's parameter names differ from those in a file: from a wrapper, or from a task's heads."""

from __future__ import annotations

from collections.abc import Mapping

Prefix = tuple[str, str]
"""(prefix to remove from the model's names, prefix to add instead): gives the names in the file."""


def find_prefix(names: list[str], saved: Mapping[str, object]) -> Prefix:
    """The prefix change that turns every name of the model into a saved name; ("", "") if no change does.

    Args:
        names: the model's parameters.
        saved: the tensors of the file, by name.
    """
    if any(name in saved for name in names):
        return "", ""
    for name in names:
        for saved_name in saved:
            if saved_name.endswith(f".{name}"):
                prefix = "", saved_name.removesuffix(name)
            elif name.endswith(f".{saved_name}"):
                prefix = name.removesuffix(saved_name), ""
            else:
                continue
            if all(with_prefix(name, prefix) in saved for name in names):
                return prefix
    return "", ""


def with_prefix(name: str, prefix: Prefix) -> str:
    """The name in the file of a parameter of the model."""
    removed, added = prefix
    return added + name.removeprefix(removed)
