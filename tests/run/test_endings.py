"""How a run ends: what it says about its last save, and that its error is recorded before anything waits."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from shardkit.launch.local import restart
from tests.commands import python_m
from tests.launch.jobs import losses, settings
from tests.ranks import run_ranks

# Six steps, saved every second: which save finds no room, whether the run is told to end after step 3, its exit code.
ENDS: dict[str, tuple[int, bool, int, dict[str, str]]] = {
    "the last save fails": (3, False, 5, {}),
    "the last save fails in the background": (3, False, 5, {"checkpoint.async_save": "true"}),
    "told to end, and the save fails": (2, True, 5, {}),
    "told to end, and the save fails in the background": (2, True, 5, {"checkpoint.async_save": "true"}),
    "told to end": (9, True, 75, {}),
    "an earlier save fails": (1, False, 0, {}),
    "without a save at the end": (2, False, 0, {"checkpoint.at_end": "false", "checkpoint.every_steps": "4"}),
}


STOPPED = r"stopped by SIGTERM after step (\d+) of 40: saved (\S+/checkpoints/step_0+\d+)\n"
COMMAND = r"to continue: (.*)\n"


def test_a_terminated_run_says_why_where_it_saved_and_the_command_that_continues(tmp_path: Path) -> None:
    asked = settings(tmp_path / "run", "terminate", train__max_steps=40, task__args__rank=0, run__overwrite="true")
    done = python_m("shardkit.train", *asked, code=75)
    step, path = re.search(STOPPED, done.stdout).groups()
    assert Path(path).is_dir() and int(step) == max(losses(tmp_path / "run"))
    words = shlex.split(re.search(COMMAND, done.stdout)[1])
    assert words[:3] == ["python", "-m", "shardkit.train"] and words[-1] == "run.resume=true"
    python_m("shardkit.train", *words[3:], "task.args.how=nothing", code=0)
    assert sorted(losses(tmp_path / "run")) == list(range(1, 41))


@pytest.mark.slow
def test_the_launcher_names_its_own_command(tmp_path: Path) -> None:
    asked = settings(tmp_path / "run", "terminate", train__max_steps=40, task__args__rank=0)
    done = python_m("shardkit.cli", "launch", "-", "--nproc-per-node", "1", *asked, code=75)
    assert re.search(STOPPED, done.stdout), done.stdout
    assert "\nto continue: shardkit launch - --nproc-per-node 1 " in done.stdout
    assert done.stdout.count("to continue: ") == 1 and "saved and stopped" not in done.stdout, "the stop is said once"


def test_a_job_is_told_that_its_next_start_continues() -> None:
    program = ["/venv/shardkit/train.py", "--config", "my config.yaml", "run.overwrite=true", "run.resume=auto"]
    said = restart.how_to_continue(program, True, {})
    assert said == "to continue: python -m shardkit.train --config 'my config.yaml' run.overwrite=false run.resume=true"
    job = restart.how_to_continue(program, True, {"SLURM_JOB_ID": "7"})
    assert job == "the next start of Slurm job 7 continues from there"
    for argv, environ in ((["mine.py"], {}), (program, {"WORLD_SIZE": "8"})):
        assert "the same command again with run.resume=true" in restart.how_to_continue(argv, False, environ)


@pytest.mark.slow
def test_a_last_save_that_fails_is_a_failure(tmp_path: Path) -> None:
    found = run_ranks(2, "tests.run.test_endings:end_each", folder=str(tmp_path))
    codes = {name: case[2] for name, case in ENDS.items()}
    assert found == [codes, codes]
    for number, (name, case) in enumerate(ENDS.items()):
        error = tmp_path / f"{number}.rank0.json"
        if case[2] != 5:
            assert not error.exists(), name
            continue
        said = json.loads(error.read_text())["shardkit"]
        step = 3 if case[1] else 6
        assert said["exit_code"] == 5 and said["message"].startswith(f"the last save, of step {step}, failed: rank 0: ")
        left = json.loads((tmp_path / f"{number}.left.json").read_text())
        assert said["fix"].endswith(f"it goes on from {left[-1]}"), "the newest checkpoint that is there"


def end_each(folder: str) -> dict[str, int]:
    """Exit code of each case, on one rank."""
    from shardkit.checkpoint.native import writer
    from shardkit.run.requests import StopRequest
    from shardkit.train import main

    check, flags, rank = writer.check_space, StopRequest.flags, int(os.environ["RANK"])
    codes = {}
    for number, (name, (fails, told, _, more)) in enumerate(ENDS.items()):
        steps, saves = [0], [0]

        def no_room(path: Path, needed: int, fails: int = fails, saves: list[int] = saves) -> None:
            saves[0] += 1
            if saves[0] == fails:
                raise OSError(errno.ENOSPC, "no room, for a test")
            check(path, needed)

        def told_to_end(self: StopRequest, told: bool = told, steps: list[int] = steps) -> list[float]:
            steps[0] += 1
            return [float(told and steps[0] == 3), *flags(self)[1:]]

        writer.check_space, StopRequest.flags = no_room, told_to_end
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{number}.rank{rank}.json"
        run_dir = Path(folder, str(number))
        saving = {"checkpoint.every_steps": "2", **more}
        codes[name] = main([*settings(run_dir), *(f"{key}={value}" for key, value in saving.items())])
        if rank == 0:
            left = sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))
            Path(folder, f"{number}.left.json").write_text(json.dumps(left))
    return codes


def test_an_error_is_recorded_before_a_save_in_the_background_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(2, "tests.run.test_endings:recorded_when_closing", folder=str(tmp_path)) == [[True], [True]]


def recorded_when_closing(folder: str) -> list[bool]:
    """Whether the error's file was there when the checkpointer was closed, and told the same afterwards."""
    from shardkit.checkpoint.save import Checkpointer
    from shardkit.train import main

    error, close, found = Path(folder, f"error{os.environ['RANK']}.json"), Checkpointer.close, []

    def look(self: Checkpointer, failed: bool = False) -> None:
        found.append(error.read_text() if error.exists() else "")
        close(self, failed)

    Checkpointer.close = look
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(error)
    with pytest.raises(ValueError, match="the cat"):
        main([*settings(Path(folder, "run"), "raise"), f"task.args.rank={os.environ['RANK']}"])
    return ["the cat sat on the GPU" in text and text == error.read_text() for text in found]


@pytest.mark.slow
def test_a_long_export_of_a_profile_holds_up_no_save(tmp_path: Path) -> None:
    assert run_ranks(2, "tests.run.test_endings:profile_while_saving", folder=str(tmp_path)) == [[0, 0], [0, 0]]
    for rank in (0, 1):
        assert (tmp_path / f"run{rank}/profile/rank{rank}_tables.txt").exists()
        assert (tmp_path / f"run{rank}/checkpoints/step_00000002/manifest.json").exists()


def profile_while_saving(folder: str) -> list[int]:
    """Each rank in turn exports for longer than ranks may be late for a save, and than a step may take."""
    from torch.profiler import profile

    from shardkit.checkpoint.save import Checkpointer
    from shardkit.train import main

    export: Any = profile.export_chrome_trace

    def slow(self: profile, path: str) -> None:
        time.sleep(7)
        export(self, path)

    profile.export_chrome_trace = slow
    Checkpointer.__init__.__kwdefaults__["meeting_s"] = 5
    more = ["profile.start=2", "profile.steps=1", "checkpoint.every_steps=2", "run.step_timeout_s=6"]
    return [main([*settings(Path(folder, f"run{rank}")), *more, f"profile.ranks=[{rank}]"]) for rank in (0, 1)]
