"""The verdict follows from the records of a rehearsal's processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.hardware.cards import GPUS
from shardkit.rehearse.ranks import RehearsedWorld
from shardkit.rehearse.verdict import ASSUMPTIONS, Finish, Verdict, judge, read_records

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
    verdict = judge(records, CARD, 3, finish)
    assert verdict is not None
    return verdict


def test_the_largest_rank_decides_and_the_estimates_count() -> None:
    verdict = verdict_of(record(0), record(1, reserved=40))
    outside = CARD.context + CARD.per_communicator
    assert (verdict.kind, verdict.exit_code, verdict.needed) == ("fits", 0, 40 * GIB + outside)
    assert verdict.reason == "fits h100 (79.10 GiB) with 37.97 GiB to spare"
    assert "a100-40gb" not in [gpu.name for gpu in verdict.other_cards()] and verdict.other_cards()[0].name == "a40"
    text = verdict.text()
    assert "backward of step 2" in text and "context 0.74 GiB, NCCL 0.39 GiB on each GPU (estimates" in text
    assert "mean nothing" in text


def test_what_the_peaks_are_not_is_noted() -> None:
    assert not verdict_of(record(0), record(1)).notes
    one = record(0, world_size=1, has_whole_history=False, is_warming_up=True)
    one["devices"]["0"]["ooms"] = 2
    one["with_messages"] = [[0, 8, 16]]
    caught, warming, stages, history = verdict_of(one).notes
    assert "--live 0,8,16 shows them" in stages
    assert caught.startswith("rank 0 ran out of memory 2 times") and "of what it tried, too" in caught
    assert "before the capture of a CUDA graph" in warming and "--steps 4 shows its memory" in warming
    assert history.endswith("what it held at its peak is not told")


def test_what_fits_only_without_the_allocators_cache_is_not_known() -> None:
    verdict = verdict_of(record(0, reserved=79), record(1))
    assert (verdict.kind, verdict.exit_code) == ("not known", 7)
    assert "only if the allocator gives 1.03 GiB of its cache back" in verdict.reason
    assert verdict_of(record(0, reserved=79, allocated=78.9), record(1)).kind == "does not fit"


def test_out_of_memory_does_not_fit_and_names_the_rank() -> None:
    message = "CUDA out of memory. Tried to allocate 2.00 GiB."
    verdict = verdict_of(record(0), failed(1, "OutOfMemoryError", message), finish=Finish("program", 1))
    assert (verdict.kind, verdict.exit_code, verdict.at_least) == ("does not fit", 4, True)
    assert verdict.reason == f"rank 1: OutOfMemoryError: {message}, train.py:7: loss.backward()"
    assert verdict.other_cards() == []  # how much it needs is not known


def test_the_first_exception_is_told_and_a_launchers_comes_last() -> None:
    late = failed(0, "RuntimeError", "NCCL: remote process exited", time=9.0)
    first = failed(1, "ValueError", "bad batch", time=5.0)
    agent = failed(0, "ChildFailedError", "train.py FAILED", time=1.0, devices={}, pid=1)
    verdict = verdict_of(late, first, agent, finish=Finish("program", 1))
    assert (verdict.kind, verdict.exit_code) == ("failed", 8)
    assert verdict.reason == "rank 1: ValueError: bad batch, train.py:7: loss.backward() (exit code 1)"
    probe = failed(0, "ModuleNotFoundError", "No module named 'flash_attn'", time=0.0, devices={}, pid=2)
    assert verdict_of(probe, first, finish=Finish("program", 1)).reason.startswith("rank 1: ValueError")
    assert verdict_of(probe, record(0), record(1)).kind == "fits"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("emucuda: aten::nonzero reads values that were not computed", "aten::nonzero"),
        ("CUDA error: initialization error when calling `cusparseCreate(handle)`", "cusparseCreate"),
        ("CUDA error: operation not supported\nSearch for `cudaErrorNotSupported'", "operation not supported"),
        ("CUDA driver error: CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_SUPPORTED"),
    ],
    ids=[
        "values that nobody computed",
        "a library that does not see the emulated GPU",
        "a function that is not there",
        "a function of the driver",
    ],
)
def test_what_an_emulated_card_cannot_do_is_not_known(message: str, named: str) -> None:
    verdict = verdict_of(failed(0, "RuntimeError", message), record(1), finish=Finish("program", 1))
    assert (verdict.kind, verdict.exit_code) == ("not known", 7)
    assert named in verdict.reason and ("docs/rehearse.md" in verdict.text() or named == "cusparseCreate")


def test_the_ranks_that_were_started_are_those_that_must_be_there() -> None:
    ranks = RehearsedWorld(64, 8, (0, 32))
    of_64 = record(0, world_size=64), record(32, world_size=64)
    verdict = judge(of_64, CARD, 3, DONE, ranks)
    assert verdict is not None and verdict.kind == "fits"
    assert verdict.notes[0].startswith("live of 64 ranks: 0, 32; the others were pretended")
    verdict = judge(of_64[:1], CARD, 3, DONE, ranks)
    assert verdict is not None and verdict.reason == "of 64 ranks these used no GPU: 32"


def test_a_rank_that_was_asked_for_what_nobody_can_invent_is_known_by_number() -> None:
    message = "rank 0 asks rank 32, which is pretended, for 1 numbers of type int64 (recv): nobody can invent them"
    verdict = verdict_of(failed(0, "PretendedRankError", message), finish=Finish("program", 1))
    assert (verdict.kind, verdict.exit_code, verdict.pretended) == ("not known", 7, 32)


def test_assumptions_are_told_with_line_and_count_of_the_rank_with_most() -> None:
    def told(count: int) -> list[dict[str, Any]]:
        return [{"assumption": "any", "source_line": "train.py:7: if mask.any():", "count": count}]

    verdict = verdict_of(record(0, assumptions=told(2)), record(1, assumptions=told(5)))
    assert "assumed   any() of what nobody computed is False: 5 × train.py:7: if mask.any():" in verdict.text()
    assert verdict.as_json()["assumptions"] == [
        {"kind": "any", "source_line": "train.py:7: if mask.any():", "count": 5}
    ]
    page = Path(__file__, "../../../docs/rehearse.md").resolve().read_text()
    assert all(f"| {row} |" in page for row in ASSUMPTIONS.values())


def test_a_card_without_a_type_of_the_program_does_not_hold_it_without_a_word() -> None:
    verdict = judge([record(0, reserved=5, types=["bf16"]), record(1, reserved=5)], GPUS["t4"], 3, DONE)
    assert verdict is not None and verdict.kind == "fits"
    assert verdict.reason.endswith(
        "to spare; but t4 has no bf16: torch emulates it slowly there, and fp16 is the type to use"
    )
    assert "bf16" not in verdict_of(record(0, types=["bf16"]), record(1)).reason


def test_the_largest_tensors_of_the_peak_are_told_with_their_line() -> None:
    line = {"source_line": "model.py:7: gate * up", "n_bytes": 3 * GIB, "tensors": 12}
    telling = record(1, lines={"1": [line]}, at_update={"parameters": GIB, "optimizer states": 2 * GIB})
    verdict = verdict_of(record(0), telling)
    assert "at peak   3.00 GiB in 12 tensors: model.py:7: gate * up" in verdict.text()
    assert "update    rank 1 holds parameters 1.00 GiB, optimizer states 2.00 GiB" in verdict.text()
    assert verdict.as_json()["ranks"][1]["at_peak"] == [line]


@pytest.mark.parametrize(
    ("records", "finish", "reason"),
    [
        ([record(0)], DONE, "of 2 ranks these used no GPU: 1"),
        ([record(0), record(1, steps=1, end={})], Finish("the time limit of 9 s came"), "rank 1 had done 1 of 3 steps"),
        ([], Finish("the time limit of 9 s came"), "before a GPU was used"),
    ],
)
def test_what_did_not_run_to_its_end_is_not_known(records: list[dict[str, Any]], finish: Finish, reason: str) -> None:
    verdict = verdict_of(*records, finish=finish)
    assert verdict.kind == "not known" and reason in verdict.reason


def test_a_program_that_ends_by_itself() -> None:
    assert verdict_of(record(0), record(1), finish=ENDED).kind == "fits"
    crashed = verdict_of(record(0, end={}), record(1, end={}), finish=Finish("program", -11))
    assert crashed.kind == "failed" and "exit code -11" in crashed.reason
    assert judge([], CARD, 3, ENDED) is None  # it used no GPU: the caller refuses that


def test_few_steps_and_caught_errors_are_told() -> None:
    ooms = {"0": {**record()["devices"]["0"], "ooms": 2}}
    notes = verdict_of(record(0, steps=0, world_size=1, devices=ooms), finish=ENDED).notes
    assert "0 optimizer steps were seen" in notes[0]
    assert "rank 0 ran out of memory 2 times; the program caught it" in notes[1]


def test_the_verdict_as_json_has_bytes() -> None:
    stored = json.loads(json.dumps(verdict_of(record(0), record(1)).as_json()))
    assert stored["verdict"] == "fits" and stored["exit_code"] == 0 and stored["emulated"] is True
    assert stored["ranks"][1]["peak_reserved"] == 20 * GIB and stored["ranks"][1]["peak_in"] == "backward"


def test_a_record_that_is_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps(record(0)))
    (tmp_path / "2.json").write_text('{"pid": ')
    assert [fields["rank"] for fields in read_records(tmp_path)] == [0]
