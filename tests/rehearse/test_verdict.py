"""The verdict follows from the records of a rehearsal's processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.hardware.cards import GPUS
from shardkit.rehearse.ranks import RehearsedWorld
from shardkit.rehearse.verdict import ASSUMPTIONS, CardUse, Finish, Verdict, judge, read_records

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


NEVER = {"name": "Adam", "source_line": "gan.py:5: Adam(G.parameters())", "parameters": 4 * GIB, "more": 12 * GIB}
GROWTH = {"bytes_a_step": GIB, "first_step": 4, "last_step": 7, "source_line": "train.py:9: kept.append(loss)"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"never_stepped": [NEVER]}, "Adam of gan.py:5: Adam(G.parameters()) (4.00 GiB of parameters, about 12.00 GiB"),
        ({"growth": GROWTH}, "it grows 1.00 GiB a step and fills the card at step 61"),
    ],
)
def test_a_peak_that_is_still_to_come_is_not_known(changes: dict[str, Any], words: str) -> None:
    verdict = verdict_of(record(0, **changes), record(1))
    assert (verdict.kind, verdict.exit_code) == ("not known", 7)
    assert words in verdict.reason and verdict.other_cards() == []
    assert verdict_of(record(0, **changes), record(1), finish=ENDED).kind == "fits"  # it ran to its end


def test_an_event_that_never_came_is_not_known() -> None:
    seen = record(0, world_size=1, seen=["building", "forward", "backward", "update", "save"])
    for until, kind in (("save", "fits"), ("evaluation", "not known")):
        verdict = judge([seen], CARD, 3, DONE, until=until)
        assert verdict is not None and verdict.kind == kind
        assert "seen      forward, backward, update, save; not seen: evaluation" in verdict.text()


def test_the_programs_own_limit_is_named() -> None:
    verdict = verdict_of(record(0, world_size=1, allowed={"0": 10 * GIB}))
    assert verdict.kind == "does not fit" and "lets torch take 10.00 GiB" in verdict.reason
    message = "CUDA out of memory. Tried to allocate 2.00 GiB."
    ended = failed(0, "OutOfMemoryError", message, world_size=1, allowed={"0": 10 * GIB})
    assert "lets torch take 10.00 GiB" in verdict_of(ended, finish=Finish("program", 1)).reason


def test_a_process_that_ran_out_of_memory_counts_where_the_others_went_on() -> None:
    child = failed(0, "OutOfMemoryError", "CUDA out of memory.", pid=300, devices={}, world_size=1)
    assert verdict_of(record(0, world_size=1), child).kind == "does not fit"


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
    assert "0 optimizer steps were seen" in verdict_of(record(0, steps=0, world_size=1), finish=ENDED).notes[0]
    assert judge([], CARD, 3, ENDED) is None  # it used no GPU: the caller refuses that


def test_the_verdict_as_json_has_bytes() -> None:
    stored = json.loads(json.dumps(verdict_of(record(0), record(1)).as_json()))
    assert stored["verdict"] == "fits" and stored["exit_code"] == 0 and stored["emulated"] is True
    assert stored["ranks"][1]["peak_reserved"] == 20 * GIB and stored["ranks"][1]["peak_in"] == "backward"


def test_a_record_that_is_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps(record(0)))
    (tmp_path / "2.json").write_text('{"pid": ')
    assert [fields["rank"] for fields in read_records(tmp_path)] == [0]
