from __future__ import annotations

import pytest

from shardkit.config.load import load_config
from shardkit.errors import ConfigError, parse_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("2GiB", 2 * 2**30), ("1.5 MiB", 3 * 2**19), ("1KiB", 1024), (" 0.25TiB ", 2**38)]
)
def test_sizes_are_powers_of_two(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "2", "2GB", "2gib", "-1GiB", "0GiB", "1e3MiB", "GiB", "2GiB!"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)
    with pytest.raises(ConfigError, match="is not a size") as refused:
        load_config(overrides={"memory.cap": text})
    assert "memory.cap=2GiB" in refused.value.fix
