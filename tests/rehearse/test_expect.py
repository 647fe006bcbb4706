"""`--expect` turns a verdict that exceeds its limit into one that does not fit."""

from __future__ import annotations

import pytest

from shardkit.errors import ConfigError
from shardkit.rehearse.verdict import parse_expectation
from tests.rehearse.test_verdict import GIB, failed, record, verdict_of


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("peak < 21.2 GiB", 0), ("peak<20.8GiB", 4), ("reserved <= 20 GiB", 0), ("reserved < 20GiB", 4),
        ("allocated < 19 GiB", 0), ("allocated < 17.5 GiB", 4),
    ],
)  # fmt: skip
def test_a_limit_is_kept_or_exceeded(text: str, code: int) -> None:
    verdict = parse_expectation(text).applied(verdict_of(record(0), record(1)))
    assert verdict.exit_code == code
    assert (text in verdict.reason) == bool(code)


def test_other_verdicts_stay() -> None:
    limit = parse_expectation("peak < 1 GiB")
    for verdict in (verdict_of(record(0, reserved=90), record(1)), verdict_of(failed(0, "ValueError", "bad"))):
        assert limit.applied(verdict) == verdict


@pytest.mark.parametrize("text", ["70 GiB", "peak > 3 GiB", "speed < 3 GiB", "peak < much", "peak < -3 GiB", ""])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--expect"):
        parse_expectation(text)


def test_bytes_are_those_of_the_unit() -> None:
    assert parse_expectation("peak < 2GiB").n_bytes == 2 * GIB
    assert parse_expectation("peak < 2GB").n_bytes == 2 * 10**9
