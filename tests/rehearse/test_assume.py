"""`--assume FILE:LINE=N`: where it holds, and that nobody is left to believe in one that was not used."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import astuple
from typing import Any

import pytest

from shardkit.errors import LaunchError
from shardkit.rehearse.rehearsal import AssumedNumber, parse_assumed, unused
from shardkit.rehearse.verdict import Finish
from tests.rehearse import injected
from tests.rehearse.test_verdict import failed, record, verdict_of


def test_a_bound_names_a_line_by_the_last_parts_of_its_path() -> None:
    (bound,) = parse_assumed(["./models/moe.py:88 = 512"])
    assert bound == AssumedNumber("models/moe.py", 88, 512) and str(bound) == "models/moe.py:88=512"
    assert bound.is_at("/home/me/models/moe.py:88: rows = mask.nonzero()")
    for other in ("/home/me/models/moe.py:8: x", "/home/me/mymodels/moe.py:88: x", "moe.py:88: x", ""):
        assert not bound.is_at(other)


@pytest.mark.parametrize(
    "text", ["", "512", "moe.py=512", "moe.py:0=512", "moe.py:88", "moe.py:88=-1", "moe.py:88=all"]
)
def test_what_is_no_bound_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(f"--assume {text!r} is no line")):
        parse_assumed([text])


def test_a_line_has_one_number() -> None:
    assert len(parse_assumed(["moe.py:88=512", "moe.py:88=512", "moe.py:89=1"])) == 2
    with pytest.raises(LaunchError, match=r"moe\.py:88 two numbers"):
        parse_assumed(["moe.py:88=512", "moe.py:88=5"])


def test_a_bound_that_no_line_asked_for_is_told() -> None:
    used = [{"assumption": "given", "source_line": "/a/moe.py:88: mask.nonzero()", "count": 3}]
    verdict = verdict_of(record(0, assumptions=used), record(1))
    assert unused(parse_assumed(["moe.py:88=512", "moe.py:89=1"]), verdict) == [
        "--assume moe.py:89=1: that line read nothing that nobody computed"
    ]
    for kind in ("ValueError", "OutOfMemoryError"):
        assert not unused(
            parse_assumed(["moe.py:89=1"]), verdict_of(failed(0, kind, "bad"), finish=Finish("program", 1))
        )


def test_the_refusal_names_the_option_with_its_line() -> None:
    message = "emucuda: aten::nonzero reads values that were not computed"
    verdict = verdict_of(failed(0, "RuntimeError", message), finish=Finish("program", 1))
    assert verdict.exit_code == 7
    assert any("--assume 'train.py:7=N'" in note for note in verdict.notes)


def test_the_program_asks_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = sys._getframe().f_lineno + 4
    bounds = parse_assumed([f"rehearse/test_assume.py:{line}=7", "other.py:1=2"])
    monkeypatch.setenv("SHARDKIT_REHEARSAL_ASSUME", json.dumps(list(map(astuple, bounds))))
    assumed: Any = injected("shardkit_assumed").Assumed()
    numbers = [assumed._bound(), assumed._bound()]
    assert numbers == [7, 7]
    assert assumed._bound() == -1
