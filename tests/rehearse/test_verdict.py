"""The verdict follows from the records of a rehearsal's processes, from what was assumed and what is expected."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import ConfigError, LaunchError
from shardkit.hardware.cards import GPUS
from shardkit.rehearse.ranks import RehearsedWorld
from shardkit.rehearse.rehearsal import AssumedNumber, parse_assumed, unused
from shardkit.rehearse.verdict import ASSUMPTIONS, CardUse, Finish, Verdict, judge, parse_expectation, read_records
from tests.rehearse import injected

CARD = GPUS["h100"]
GIB = 2**30
DONE, ENDED = Finish("steps"), Finish("program", 0)


def record(rank: int = 0, reserved: float = 20, allocated: float = 18, **changes: Any) -> dict[str, Any]:
    peaks = {
        "allocated": int(allocated * GIB), "reserved": int(reserved * GIB), "ooms": 0, "phase": "backward", "step": 2,
    }  # fmt: skip
    fields = {
        "pid": 100 + rank, "rank": rank, "world_size": 2, "launched": True, "devices": {str(rank): peaks}, "steps": 3,
        "phase": "update", "nccl_groups": 1, "end": {"kind": "steps", "time": 1.0},
    }  # fmt: skip
    return {**fields, **changes}


def failed(rank: int, kind: str, message: str, time: float = 5.0, **changes: Any) -> dict[str, Any]:
    end = {"kind": "exception", "type": kind, "message": message, "where": "train.py:7: loss.backward()", "time": time}
    return record(rank, steps=0, end=end, **changes)


def verdict_of(*records: dict[str, Any], finish: Finish = DONE) -> Verdict:
    return judge(records, CARD, 3, finish)


def test_the_largest_rank_decides_and_the_estimates_count() -> None:
    verdict = verdict_of(record(0), record(1, reserved=40))
    outside = CARD.context + CARD.per_communicator
    assert (verdict.kind, verdict.exit_code, verdict.needed) == ("fits", 0, 40 * GIB + outside)
    assert "a100-40gb" not in [gpu.name for gpu in verdict.other_cards()] and verdict.other_cards()[0].name == "a40"
    text = verdict.text()
    assert "37.97 GiB to spare" in text and "backward of step 2" in text and "context 0.74 GiB, NCCL 0.39 GiB" in text
    stored = json.loads(json.dumps(verdict.as_json()))
    assert (stored["verdict"], stored["exit_code"], stored["emulated"]) == ("fits", 0, True)
    assert stored["ranks"][1]["peak_reserved"] == 40 * GIB and stored["ranks"][1]["peak_in"] == "backward"


def test_what_the_peaks_are_not_is_noted() -> None:
    assert not verdict_of(record(0), record(1)).notes
    one = record(0, world_size=1, has_whole_history=False, is_warming_up=True)
    one["devices"]["0"]["ooms"] = 2
    one["with_messages"] = [[0, 8, 16]]
    notes = verdict_of(one).notes
    for note, words in zip(notes, ("ran out of memory 2 times", "--steps 4", "--live 0,8,16", "not told"), strict=True):
        assert words in note


def test_processes_on_one_card_add_up() -> None:
    uses = [
        CardUse(0, 0, 70 * GIB, {100: 21 * GIB, 101: 20 * GIB, 77: 29 * GIB}),
        CardUse(0, 1, 21 * GIB, {101: 21 * GIB}),
    ]
    verdict = judge([record(0), record(1)], CARD, 3, DONE, cards=uses)
    assert verdict is not None and verdict.kind == "fits"
    assert verdict.needed == 70 * GIB + 2 * CARD.per_communicator
    assert "card 0 holds 70.00 GiB of 3 processes: process 77 29.00 GiB, rank 0 21.00 GiB" in verdict.text()
    assert [use["card"] for use in verdict.as_json()["shared_cards"]] == [0]
    over = judge([record(0), record(1)], CARD, 3, DONE, cards=[CardUse(0, 0, 80 * GIB, {100: 40 * GIB, 101: 40 * GIB})])
    assert over is not None and over.kind == "does not fit" and "rank 1 40.00 GiB" in over.reason


def test_live_ranks_that_share_a_card_say_nothing_of_pretended_ones() -> None:
    world = RehearsedWorld(8, 8, (0, 1), fixed=True)
    alone = judge([record(0), record(1)], CARD, 3, DONE, world)
    assert alone is not None and alone.kind == "fits" and "on a card of its own" in alone.notes[0]
    shared = judge([record(0), record(1)], CARD, 3, DONE, world, [CardUse(0, 0, 40 * GIB, {100: 1, 101: 1})])
    assert shared is not None and shared.kind == "not known" and "--live 0,1,2,3,4,5,6,7" in shared.reason


ALONE: dict[str, Any] = {"world_size": 1}
NEVER = {"name": "Adam", "source_line": "gan.py:5: Adam(G.parameters())", "parameters": 4 * GIB, "more": 12 * GIB}
GROWTH = {"bytes_a_step": GIB, "first_step": 4, "last_step": 7, "source_line": "train.py:9: kept.append(loss)"}
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."
LIMIT = Finish("the time limit of 9 s came")
SOME_LATE = [
    failed(0, "RuntimeError", "NCCL: remote process exited", time=9.0),
    failed(1, "ValueError", "bad batch", time=5.0),
    failed(0, "ChildFailedError", "train.py FAILED", time=1.0, devices={}, pid=1),
]
PROBE = failed(0, "ModuleNotFoundError", "No module named 'flash_attn'", time=0.0, devices={}, pid=2)
PRETENDED = "rank 0 asks rank 32, which is pretended, for 1 numbers of type int64 (recv): nobody can invent them"
CODES = {"fits": 0, "does not fit": 4, "not known": 7, "failed": 8}
VERDICTS: dict[str, tuple[list[dict[str, Any]], Finish, str, str]] = {
    # what fits only if the allocator gives its cache back
    "cache": ([record(0, reserved=79), record(1)], DONE, "not known", "gives 1.03 GiB of its cache back"),
    "tensors": ([record(0, reserved=79, allocated=78.9), record(1)], DONE, "does not fit", ""),
    # a peak that is still to come, unless the program ran to its end
    "never stepped": ([record(0, never_stepped=[NEVER]), record(1)], DONE, "not known", "Adam of gan.py:5: Adam(G."),
    "grows": ([record(0, growth=GROWTH), record(1)], DONE, "not known", "grows 1.00 GiB a step and fills the card at"),
    "never stepped, ended": ([record(0, never_stepped=[NEVER]), record(1)], ENDED, "fits", ""),
    "grows, ended": ([record(0, growth=GROWTH), record(1)], ENDED, "fits", ""),
    # the program's own limit
    "limited": ([record(0, **ALONE, allowed={"0": 10 * GIB})], DONE, "does not fit", "lets torch take 10.00 GiB"),
    "limited, ran out": ([failed(0, "OutOfMemoryError", OOM, **ALONE, allowed={"0": 10 * GIB})], Finish("program", 1),
                         "does not fit", "lets torch take 10.00 GiB"),
    "out of memory": ([record(0), failed(1, "OutOfMemoryError", OOM)], Finish("program", 1), "does not fit",
                      "rank 1: OutOfMemoryError"),
    "a child ran out": ([record(0, **ALONE), failed(0, "OutOfMemoryError", OOM, pid=300, devices={}, **ALONE)], DONE,
                        "does not fit", ""),
    # the first exception is told, and a launcher's comes last
    "first": (SOME_LATE, Finish("program", 1), "failed", "rank 1: ValueError: bad batch, train.py:7: loss.backward()"),
    "a probe failed before": ([PROBE, SOME_LATE[1]], Finish("program", 1), "failed", "rank 1: ValueError"),
    "only a probe failed": ([PROBE, record(0), record(1)], DONE, "fits", ""),
    "crashed": ([record(0, end={}), record(1, end={})], Finish("program", -11), "failed", "exit code -11"),
    "ended": ([record(0), record(1)], ENDED, "fits", ""),
    # what did not run to its end
    "a rank without a GPU": ([record(0)], DONE, "not known", "of 2 ranks these used no GPU: 1"),
    "too late": ([record(0), record(1, steps=1, end={})], LIMIT, "not known", "rank 1 had done 1 of 3 steps"),
    "before a GPU": ([], LIMIT, "not known", "before a GPU was used"),
    "pretended": ([failed(0, "PretendedRankError", PRETENDED)], Finish("program", 1), "not known", "rank 32"),
    # what an emulated card cannot do
    **{
        named: ([failed(0, "RuntimeError", message), record(1)], Finish("program", 1), "not known", named)
        for message, named in [
            ("emucuda: aten::nonzero reads values that were not computed", "aten::nonzero"),
            ("CUDA error: initialization error when calling `cusparseCreate(handle)`", "cusparseCreate"),
            ("CUDA error: operation not supported\nSearch for `cudaErrorNotSupported'", "operation not supported"),
            ("CUDA driver error: CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_SUPPORTED"),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize(("records", "finish", "kind", "words"), VERDICTS.values(), ids=VERDICTS)
def test_the_verdict_follows_from_how_processes_ended(
    records: list[dict[str, Any]], finish: Finish, kind: str, words: str
) -> None:
    verdict = verdict_of(*records, finish=finish)
    assert (verdict.kind, verdict.exit_code) == (kind, CODES[kind]) and words in verdict.reason
    known = kind == "fits" or "cache" in words or (kind == "does not fit" and not verdict.at_least)
    assert known or verdict.other_cards() == [], "how much it needs is not known"
    assert verdict.pretended == (32 if "PretendedRank" in str(records) else None)


def test_an_event_that_never_came_is_not_known() -> None:
    seen = record(0, world_size=1, seen=["building", "forward", "backward", "update", "save"])
    for until, kind in (("save", "fits"), ("evaluation", "not known")):
        verdict = judge([seen], CARD, 3, DONE, until=until)
        assert verdict is not None and verdict.kind == kind
        assert "not seen: evaluation" in verdict.text()


def test_the_ranks_that_were_started_are_those_that_must_be_there() -> None:
    ranks = RehearsedWorld(64, 8, (0, 32))
    of_64 = record(0, world_size=64), record(32, world_size=64)
    verdict = judge(of_64, CARD, 3, DONE, ranks)
    assert verdict is not None and verdict.kind == "fits"
    assert verdict.notes[0].startswith("live of 64 ranks: 0, 32; the others were pretended")
    verdict = judge(of_64[:1], CARD, 3, DONE, ranks)
    assert verdict is not None and verdict.reason == "of 64 ranks these used no GPU: 32"


def test_assumptions_are_told_with_line_and_count_of_the_rank_with_most() -> None:
    def told(count: int) -> list[dict[str, Any]]:
        return [{"assumption": "any", "source_line": "train.py:7: if mask.any():", "count": count}]

    verdict = verdict_of(record(0, assumptions=told(2)), record(1, assumptions=told(5)))
    assert "assumed   any() of what nobody computed is False: 5 × train.py:7: if mask.any():" in verdict.text()
    (stored,) = verdict.as_json()["assumptions"]
    assert stored == {"kind": "any", "source_line": "train.py:7: if mask.any():", "count": 5}
    page = Path(__file__, "../../../docs/rehearse.md").resolve().read_text()
    assert all(f"| {row} |" in page for row in ASSUMPTIONS.values())


def test_a_card_without_a_type_of_the_program_does_not_hold_it_without_a_word() -> None:
    verdict = judge([record(0, reserved=5, types=["bf16"]), record(1, reserved=5)], GPUS["t4"], 3, DONE)
    assert verdict is not None and verdict.kind == "fits" and "t4 has no bf16" in verdict.reason
    assert "bf16" not in verdict_of(record(0, types=["bf16"]), record(1)).reason


def test_the_largest_tensors_of_the_peak_are_told_with_their_line() -> None:
    line = {"source_line": "model.py:7: gate * up", "n_bytes": 3 * GIB, "tensors": 12}
    telling = record(1, lines={"1": [line]}, at_update={"parameters": GIB, "optimizer states": 2 * GIB})
    verdict = verdict_of(record(0), telling)
    assert "at peak   3.00 GiB in 12 tensors: model.py:7: gate * up" in verdict.text()
    assert "update    rank 1 holds parameters 1.00 GiB, optimizer states 2.00 GiB" in verdict.text()
    assert verdict.as_json()["ranks"][1]["at_peak"] == [line]


def test_a_program_without_steps_or_cuda() -> None:
    assert "0 optimizer steps were seen" in verdict_of(record(0, steps=0, world_size=1), finish=ENDED).notes[0]
    assert judge([], CARD, 3, ENDED) is None  # it used no GPU: the caller refuses that


def test_a_record_that_is_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps(record(0)))
    (tmp_path / "2.json").write_text('{"pid": ')
    assert [fields["rank"] for fields in read_records(tmp_path)] == [0]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("peak < 21.2 GiB", 0), ("peak<20.8GiB", 4), ("peak < 22GB", 4), ("reserved <= 20 GiB", 0),
        ("reserved < 20GiB", 4), ("allocated < 19 GiB", 0), ("allocated < 17.5 GiB", 4),
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


def test_the_program_asks_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = sys._getframe().f_lineno + 4
    bounds = parse_assumed([f"rehearse/test_verdict.py:{line}=7", "other.py:1=2"])
    monkeypatch.setenv("SHARDKIT_REHEARSAL_ASSUME", json.dumps(list(map(astuple, bounds))))
    assumed: Any = injected("shardkit_assumed").Assumed()
    numbers = [assumed._bound(), assumed._bound()]
    assert numbers == [7, 7]
    assert assumed._bound() == -1
