"""Names of other tools are declared once; they lead to keys that exist."""

from __future__ import annotations

import pytest

from shardkit.config.errors import HERE, OTHER_NAMES, suggest
from shardkit.config.schema import section_fields


def test_a_name_is_declared_once_for_a_key_that_exists() -> None:
    assert len(HERE) == sum(len(names.split()) for names in OTHER_NAMES.values())
    fields = {f"{section}.{key}" for section, keys in section_fields().items() for key in keys}
    assert {".".join(key.split(".")[:2]) for key in OTHER_NAMES} <= fields
    assert list(OTHER_NAMES) == sorted(OTHER_NAMES)


@pytest.mark.parametrize("name", HERE)
def test_another_tools_name_suggests_the_key_here(name: str) -> None:
    key = ".".join(HERE[name].split(".")[:2])
    assert suggest(tuple(name.split("."))[:2]) == key or name.count(".") > 1
    assert "." in name or suggest(("adapter" if key.startswith("adapter.") else "optimizer", name)) == key
