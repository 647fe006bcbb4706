"""The checkpoint folder after crashes, replacements and retention."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.checkpoint import save
from shardkit.checkpoint.native import layout
from tests.checkpoint import fakes


def make(root: Path, *folders: str) -> Path:
    for name in folders:
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text(name)
    return root


def test_checkpoints_are_sorted_by_number_not_by_name(tmp_path: Path) -> None:
    make(tmp_path, "step_00000002", "step_100000000", "step_00000010", "step_x", "other", "step_00000011.tmp")
    assert [layout.step_of(p) for p in layout.checkpoints(tmp_path)] == [100000000, 10, 2]


OTHERS = ["notes.tmp", "latest.tmp", "mine.deleted", "step_00000001.corrupt", "step_00000002.superseded"]


@pytest.mark.parametrize(
    ("folders", "left"),
    [
        # A crash between the renames of a replacement brings the old one back; one after them keeps the new one.
        (["step_00000001.old", "step_00000001.tmp"], {"step_00000001": "step_00000001.old"}),
        (["step_00000001", "step_00000001.old"], {"step_00000001": "step_00000001"}),
        # One while a checkpoint is written or deleted leaves nothing of it.
        (["step_00000001", "step_00000002.tmp", "step_00000003.deleted"], {"step_00000001": "step_00000001"}),
        (OTHERS, {name: name for name in OTHERS}),
    ],
)
def test_a_sweep_keeps_one_of_a_replacement_and_what_is_not_its_own(
    folders: list[str], left: dict[str, str], tmp_path: Path
) -> None:
    (make(tmp_path, *folders) / "latest.part0123456789ab").write_text("x")
    layout.sweep(tmp_path)
    assert {path.name: (path / "file").read_text() for path in tmp_path.iterdir()} == left


def test_the_limit_of_saves_follows_those_that_were_measured() -> None:
    assert save.standstill_s(None, []) == 1800
    assert save.standstill_s(None, [3.0, 2.0]) == 120
    assert save.standstill_s(None, [3.0, 20.0]) == 200
    assert save.standstill_s(7.0, [3.0, 20.0]) == 7


def test_what_a_silent_rank_has_written_is_read_off_the_disk(tmp_path: Path) -> None:
    assert save.seen_on_disk(tmp_path, 1, "rank_00001.bin") == "before the save's first file"
    make(tmp_path, "step_00000002.tmp")
    assert save.seen_on_disk(tmp_path, 1, "rank_00001.bin").endswith("step_00000002.tmp/rank_00001.bin")
    assert save.seen_on_disk(tmp_path, 1, "file") == "in or after step_00000002.tmp/file, which has 17 bytes"


def test_publishing_replaces_what_is_there(tmp_path: Path) -> None:
    make(tmp_path, "step_00000001", "step_00000001.tmp", "step_00000001.old")
    layout.publish(tmp_path / "step_00000001.tmp", tmp_path / "step_00000001")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert (tmp_path / "step_00000001" / "file").read_text() == "step_00000001.tmp"


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "left"),
    [(2, False, [4, 5]), (2, True, [3, 4, 5]), (3, True, [3, 4, 5]), (None, False, [1, 2, 3, 4, 5]), (1, True, [3, 5])],
)
def test_retention(keep_last: int | None, keep_best: bool, left: list[int], alone: None, tmp_path: Path) -> None:
    fakes.save_steps(str(tmp_path), [1, 2, 3, 4, 5], keep_last=keep_last, keep_best=keep_best)  # 3 has the best loss
    assert sorted(layout.step_of(p) or 0 for p in layout.checkpoints(tmp_path)) == left
    assert (tmp_path / "latest").read_text() == "step_00000005\n"
