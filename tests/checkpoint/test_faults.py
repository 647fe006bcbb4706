"""Kills, cut files, flipped bits, full disks: never a wrong load, never a lost older checkpoint."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardkit.checkpoint import manage
from shardkit.checkpoint.native import layout, manifest
from shardkit.checkpoint.native import writer as writer_module
from shardkit.checkpoint.native.manifest import RunState
from shardkit.checkpoint.save import Checkpointer
from shardkit.errors import CheckpointError
from tests.checkpoint import fakes, killed
from tests.ranks import RankError, _context, run_ranks


def resumed(root: Path, **config: Any) -> int | None:
    """The step that a resume finds, after checking that its values are right."""
    strategy = fakes.Plain()
    checkpoints = fakes.checkpointer(root, strategy, **config)
    try:
        loaded = checkpoints.resume(root)
    finally:
        checkpoints.close()
    if loaded is None:
        return None
    assert strategy.holds(loaded[1].step), "loaded, but wrongly"
    return loaded[1].step


def damage(path: Path, how: str, chance: random.Random) -> None:
    """Truncate a random file of a checkpoint, flip a bit in it, zero a stretch, or delete it."""
    file = chance.choice(sorted(path.iterdir()))
    content = bytearray(file.read_bytes())
    at = chance.randrange(len(content))
    if how == "truncate":
        content = content[:at]
    elif how == "flip":
        content[at] ^= 1 << chance.randrange(8)
    elif how == "zero":
        content[at : at + 4096] = bytes(len(content[at : at + 4096]))
    else:
        file.unlink()
        return
    file.write_bytes(content)


@pytest.mark.parametrize("how", ["truncate", "flip", "zero", "delete"])
def test_damage_at_random_places_never_loads_wrongly(how: str, saved: Path, tmp_path: Path) -> None:
    chance = random.Random(how)
    fell_back = 0
    for trial in range(35 if how != "delete" else 5):
        root = tmp_path / f"trial{trial}"
        shutil.copytree(saved, root)
        damage(root / "step_00000003", how, chance)
        step = resumed(root)
        assert step in (2, 3), "the one before is intact"
        fell_back += step == 2
        if step == 2:
            assert (root / "step_00000003.corrupt").is_dir(), "kept for a look, out of the way"
            assert (root / "latest").read_text() == "step_00000002\n"
        assert (root / "step_00000001").is_dir()
        assert (root / "step_00000002").is_dir()
        shutil.rmtree(root)
    assert fell_back, "no damage was noticed: is anything checked?"


def test_several_damaged_ones_are_passed_over(saved: Path) -> None:
    for step in (2, 3):
        (saved / layout.folder_name(step) / "manifest.json").unlink()
    assert resumed(saved) == 1


def test_none_intact_is_an_error(saved: Path) -> None:
    for path in layout.checkpoints(saved):
        os.truncate(path / "rank_00000.bin", 100)
    with pytest.raises(CheckpointError, match="none of the 3"):
        resumed(saved)


def test_on_corrupt_error_stops_and_names_the_file(saved: Path) -> None:
    os.truncate(saved / "step_00000003" / "rank_00000.bin", 100)
    with pytest.raises(CheckpointError, match=r"rank_00000\.bin has 100 bytes") as caught:
        resumed(saved, on_corrupt="error")
    assert "step_00000002" in caught.value.fix
    assert (saved / "step_00000003").is_dir(), "nothing was moved"


def test_a_retention_after_a_fallback_keeps_the_good_ones(saved: Path) -> None:
    os.truncate(saved / "step_00000003" / "rank_00000.bin", 100)
    strategy = fakes.Plain()
    checkpoints = fakes.checkpointer(saved, strategy, keep_last=1, keep_best=False)
    assert checkpoints.resume(saved) is not None
    strategy.fill(3)
    checkpoints.save(RunState(step=3))
    checkpoints.close()
    assert [p.name for p in layout.checkpoints(saved)] == ["step_00000003"]
    assert resumed(saved) == 3


def test_resuming_from_an_older_one_sets_the_newer_aside(saved: Path) -> None:
    strategy = fakes.Plain()
    checkpoints = fakes.checkpointer(saved, strategy)
    checkpoints.resume(saved / "step_00000001")
    checkpoints.close()
    assert strategy.holds(1)
    assert sorted(p.name for p in saved.iterdir() if p.is_dir()) == [
        "step_00000001", "step_00000002.superseded", "step_00000003.superseded",
    ]  # fmt: skip
    assert resumed(saved) == 1, "the run goes on from there, also after its next crash"


def test_another_runs_checkpoints_are_left_alone(saved: Path, tmp_path: Path) -> None:
    os.truncate(saved / "step_00000003" / "rank_00000.bin", 100)
    before = sorted(p.name for p in saved.iterdir())
    strategy = fakes.Plain()
    checkpoints = fakes.checkpointer(tmp_path / "mine", strategy)
    loaded = checkpoints.resume(saved)
    checkpoints.close()
    assert loaded[1].step == 2
    assert sorted(p.name for p in saved.iterdir()) == before


class TestAFullDisk:
    def test_too_little_space_fails_the_save_only(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stat = os.statvfs(saved)
        strategy = fakes.Plain()
        strategy.fill(4)
        checkpoints = fakes.checkpointer(saved, strategy)
        with monkeypatch.context() as patch:
            full = os.statvfs_result((*stat[:3], 0, 0, *stat[5:]))
            patch.setattr(writer_module.os, "statvfs", lambda _: full)
            report = checkpoints.save(RunState(step=4))
        assert "to write and 64.0 MiB to keep free, 0.0 MiB free in" in report.error
        assert checkpoints.failures == 1
        assert resumed(saved) == 3
        strategy.fill(5)
        report = checkpoints.save(RunState(step=5))
        checkpoints.close()
        assert report.error is None, "there is space again"
        assert resumed(saved) == 5

    @pytest.mark.parametrize("async_save", [False, True])
    def test_a_write_that_finds_no_room_fails_the_save_only(
        self, async_save: bool, alone: None, small_disk: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A real file system with less and less room, taken after the save has asked for it."""
        monkeypatch.setattr(writer_module, "check_space", lambda folder, needed: None)
        strategy, reports = fakes.Plain(), []
        checkpoints = fakes.checkpointer(small_disk, strategy, async_save=async_save, on_done=reports.append)
        save(checkpoints, strategy, 1)
        needed = manage.size_of(small_disk / "step_00000001")
        for step, room in enumerate(range(0, needed + 2**16, 2**15), 2):
            leave_free(small_disk, room)
            save(checkpoints, strategy, step)
            (small_disk / "filler").unlink()
            good = 1 if reports[-1].error else step
            assert [layout.step_of(p) for p in layout.checkpoints(small_disk)] == sorted({1, good}, reverse=True)
            assert not list(small_disk.glob("*.tmp"))
            assert resumed(small_disk) == good
            if good == step:
                layout.remove(small_disk / layout.folder_name(step))
        checkpoints.close()
        errors = [report.error for report in reports]
        assert all("No space left" in error for error in errors if error)
        assert errors[0] is None and errors[-1] is None and errors.count(None) < len(errors) / 4

    def test_a_resume_needs_no_room(
        self, alone: None, small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A job that Slurm starts again finds the disk as full as it left it."""
        monkeypatch.setattr(writer_module, "check_space", lambda folder, needed: None)
        strategy = fakes.Plain()
        checkpoints = fakes.checkpointer(small_disk, strategy)
        save(checkpoints, strategy, 1)
        save(checkpoints, strategy, 2)
        checkpoints.close()
        leave_free(small_disk, 0)
        assert resumed(small_disk) == 2 and "cannot be written" not in caplog.text
        (small_disk / "step_00000002/manifest.json").write_text("{")
        assert resumed(small_disk) == 1
        assert any("latest cannot be written: No space left on device" in line for line in caplog.messages)
        assert not (small_disk / layout.LATEST).exists(), "it named a checkpoint that was set aside"

    @pytest.mark.parametrize("async_save", [False, True])
    def test_one_rank_without_space_fails_the_save_on_all(self, async_save: bool, tmp_path: Path) -> None:
        reports = run_ranks(
            2, "tests.checkpoint.test_faults:save_with_a_full_rank", root=str(tmp_path), async_save=async_save
        )
        for errors, failures in reports:
            assert errors[0] is None
            assert errors[1] is not None and "rank 1" in errors[1] and "too large" in errors[1]
            assert errors[2] is None
            assert failures == 1
        assert [p.name for p in layout.checkpoints(tmp_path)] == ["step_00000003", "step_00000001"]
        assert not list(tmp_path.glob("*.tmp")), "what was written of it is gone"


def save(checkpoints: Checkpointer, strategy: fakes.Plain, step: int) -> None:
    strategy.fill(step)
    checkpoints.save(RunState(step=step))
    checkpoints.wait()


def leave_free(folder: Path, n_bytes: int) -> None:
    """Fill the folder's file system up to about this much."""
    stat = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(max(0, stat.f_bavail * stat.f_frsize - n_bytes)))


def save_with_a_full_rank(root: str, async_save: bool) -> tuple[list[str | None], int]:
    """Three saves; at the second, rank 1 may write only 100 KB per file."""
    import resource

    strategy = fakes.Plain(dist.get_rank(), dist.get_world_size())
    errors: list[str | None] = []
    checkpoints = fakes.checkpointer(
        root, strategy, async_save=async_save, on_done=lambda report: errors.append(report.error)
    )
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True  # the limit would cut it
    for step in (1, 2, 3):
        limited = step == 2 and dist.get_rank() == 1
        limit = 100_000 if limited else resource.RLIM_INFINITY
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        strategy.fill(step)
        checkpoints.save(RunState(step=step))
    checkpoints.close()
    return errors, checkpoints.failures


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"not all ranks came to save step 1 within 1 s.*1"):
        run_ranks(2, "tests.checkpoint.test_faults:only_rank_0_saves", root=str(tmp_path))
    assert not layout.checkpoints(tmp_path)


def only_rank_0_saves(root: str) -> None:
    checkpoints = fakes.checkpointer(root, fakes.Plain(dist.get_rank(), dist.get_world_size()), meeting_s=1)
    if dist.get_rank() == 0:
        checkpoints.save(RunState(step=1))
    else:
        signal.pause()  # ended by the helper once rank 0 has failed


# What is resumed from, the step that is saved then, and what may be found after a crash.
MOMENTS = {
    "a new step": ("newest", 4, {3, 4}),
    "going back": ("step_00000002", 3, {2, 3}),
    "after a damaged one": ("newest", 3, {2, 3}),
    "a step that is there": ("", 3, {3}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [pytest.param(name, marks=() if name == "after a damaged one" else pytest.mark.release) for name in MOMENTS],
)
def test_a_crash_before_any_change_on_disk(moment: str, saved: Path, tmp_path: Path) -> None:
    """One process for each change (write, fsync, rename, ...) that a resume and a save make, ended right before it."""
    source, step, allowed_steps = MOMENTS[moment]
    context = _context(None, False)
    for count in range(1, 1000):
        root = tmp_path / f"crash{count}"
        shutil.copytree(saved, root)
        if moment == "after a damaged one":
            os.truncate(root / "step_00000003" / "rank_00000.bin", 100)
        start = {"newest": str(root), "": ""}.get(source, f"{root}/{source}")
        process = context.Process(target=killed.crash_at, args=(str(root), count, start, step))
        process.start()
        process.join(60)
        assert process.exitcode in (0, 9), f"change {count}: exit code {process.exitcode}"
        bad = {p.name for p in layout.checkpoints(root) if manage.verify(p)}
        assert bad <= ({"step_00000003"} if moment == "after a damaged one" else set()), f"change {count}: {bad}"
        # As the next start of the run would: it sweeps, and takes the newest.
        resumed_step = resumed(root)
        assert resumed_step in allowed_steps, f"change {count}: step {resumed_step}"
        assert not [p for p in root.iterdir() if p.suffix in (layout.TMP, layout.OLD, layout.DELETED)]
        shutil.rmtree(root)
        if process.exitcode == 0:
            assert resumed_step == step
            assert count > 10, "the changes were not counted"
            return
    raise AssertionError("never came to its end")


def kill_during_saves(root: Path, kills: int, seed: int, async_save: bool) -> None:
    """Start two ranks that save without end, kill them at a random moment, look at what is left; again and again."""
    chance, context = random.Random(seed), _context(None, False)
    reached, halfway = [], 0
    for trial in range(kills):
        word = root.parent / f"word{trial}"
        ranks = [
            context.Process(
                target=killed.save_forever,
                args=(str(root), str(root.parent / f"store{trial}"), rank, 2, f"{word}.{rank}", async_save),
            )
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        try:
            _until(Path(f"{word}.0").exists, ranks)
            _until(lambda: any(root.glob("step_*.tmp")), ranks)
            # The moment is random on purpose: anywhere in the save that has begun, or after it.
            ended = connection.wait([p.sentinel for p in ranks], timeout=chance.uniform(0, 0.03))
            assert not ended, "a rank failed by itself"
        finally:
            for process in chance.sample(ranks, 2):
                process.kill()
                process.join()
        reached.append(_look(root, Path(f"{word}.0")))
        halfway += bool(list(root.glob("step_*.*")))
    assert reached == sorted(reached), "the next start went on from what was there"
    assert reached[-1] > reached[0]
    assert halfway >= kills // 10, "kills that hit no save show nothing"


def _until(seen: Callable[[], bool], ranks: list[Any]) -> None:
    deadline = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < deadline
        assert not connection.wait([p.sentinel for p in ranks], timeout=0.001), "a rank failed by itself"


def _look(root: Path, word: Path) -> int:
    """After a kill: everything that looks like a checkpoint is one, and what was said to be done is there."""
    lines = word.read_text().split("\n")[:-1]  # a last line without its end was cut by the kill
    announced = int(lines[-1]) if lines else 0
    checkpoints = layout.checkpoints(root)
    for path in checkpoints:
        assert manage.verify(path) == [], path
    newest = layout.step_of(checkpoints[0])
    assert newest >= announced, "a checkpoint that was done is gone"
    return newest


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kills", [pytest.param(6, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.release)]
)
def test_killed_during_saves(kills: int, async_save: bool, tmp_path: Path) -> None:
    kill_during_saves(tmp_path / "checkpoints", kills, seed=int(async_save), async_save=async_save)


def test_a_later_schema_is_refused_by_name_and_left_alone(saved: Path) -> None:
    file = saved / "step_00000003" / manifest.FILE_NAME
    body = json.loads(file.read_bytes())["manifest"]
    text = manifest._canonical({**body, "schema": manifest.SCHEMA + 1, "versions": {"shardkit": "9.1"}})
    file.write_text(f'{{"digest":"{manifest._digest(text)}","manifest":{text}}}')
    checkpoints = fakes.checkpointer(saved, fakes.Plain())
    with pytest.raises(CheckpointError, match=f"has schema {manifest.SCHEMA + 1}, this version reads") as caught:
        checkpoints.resume(saved)
    checkpoints.close()
    assert "use shardkit 9.1" in caught.value.fix
    assert file.parent.is_dir(), "the checkpoint before it is no replacement for one that is intact"
