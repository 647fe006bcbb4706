"""Tests run in the order that a seed draws; those that a change touches are found."""

from __future__ import annotations

import pytest

from tests import touched


def test_a_change_touches_the_tests_that_cover_it(request: pytest.FixtureRequest) -> None:
    assert touched.touches({"shardkit/oom/shortage.py"}, {"shardkit/oom"})
    assert touched.touches({"setup.cfg"}, {"setup.cfg"})
    assert not touched.touches({"shardkit/oom_other.py", "docs/oom.md"}, {"shardkit/oom"})
    assert {"tests/test_order.py", "constraints.txt"} <= touched._covered(request.node)
    for path in (*touched.CARD, *touched.VERSIONS):
        assert (touched.REPO / path).exists(), path
