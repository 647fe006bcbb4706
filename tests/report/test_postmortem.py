"""A post-mortem is shown whole, sizes as sizes."""

from __future__ import annotations

from typing import Any

import pytest

from shardkit.report.postmortem import cell, show
from tests.report.samples import EVIL, post_mortem


def test_cause_request_tensors_and_advice_are_there() -> None:
    text = show(1, post_mortem(EVIL))
    for shown in ("<h3>Rank 1</h3>", "memory: limit", "80.00 GiB", "train.py:3", "activation.policy=full", "2.00 GiB",
                  "2023-11-14T22:13:20+00:00", "&lt;script&gt;"):  # fmt: skip
        assert shown in text
    assert f'data-value="{3 * 2**30}"' in text
    assert "<script>" not in text


@pytest.mark.parametrize("found", [{}, {"a": None, "b": [1, 2], "c": [], "d": {"e": {"f": "<"}}, "time": "soon"}])
def test_anything_is_survived(found: dict[str, Any]) -> None:
    assert "Rank 0" in show(0, found)


def test_counts_are_no_sizes() -> None:
    assert cell("alloc_retries", 4096).text == "4096"
    assert cell("peak_rss", 4096).text == "4.0 KiB"
    assert cell("exact", True).text == "True"
