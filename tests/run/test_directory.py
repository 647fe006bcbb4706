"""Who may write to a run directory, who has to give way, and what `run.overwrite` deletes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardkit.config.load import load_config
from shardkit.errors import ConfigError, SupersededError
from shardkit.launch.failures import job_starts
from shardkit.launch.local import restart
from shardkit.run import directory, owner
from tests.commands import python_m
from tests.launch.jobs import REPO, environment, losses, settings, started, until_line
from tests.slurm.cluster import until
from tests.texts import write_files

HERE = owner.this_process({})
ELSEWHERE = replace(HERE, host="far", space="another boot", token="far")


TRAIN = [sys.executable, "-m", "shardkit.train"]


@pytest.fixture
def prepared(tmp_path: Path) -> Any:
    """Claims tmp_path/run for a run with these overrides, and gives it back."""

    def prepare(*overrides: str) -> Path:
        world: Any = SimpleNamespace(is_main=True, gather=lambda found: [found])
        path, claimed = directory.prepare(load_config(None, [f"run.dir={tmp_path}/run", *overrides]), world)
        claimed.close()
        return path

    return prepare


@pytest.mark.slow
def test_a_second_writer_is_refused_by_name_and_a_dead_one_is_taken_over(tmp_path: Path) -> None:
    args = settings(tmp_path / "run", "wait", train__max_steps=100_000, checkpoint__every_steps=5, logging__every=6)
    first = started([*TRAIN, *args])
    try:
        until_line(first, "step 6/")
        for flag in ("run.resume=true", "run.overwrite=true"):
            said = python_m("shardkit.train", *args, flag, code=2).stderr
            assert f"run.dir={tmp_path}/run is being written by process {first.pid} on {os.uname().nodename}" in said
            assert f"kill {first.pid}" in said and "Traceback" not in said
        assert first.poll() is None and max(losses(tmp_path / "run")) >= 6, "the first was not disturbed"
    finally:
        first.kill()
        first.communicate()
    again = python_m("shardkit.train", *settings(tmp_path / "run", train__max_steps=12), "run.resume=true", code=0)
    assert "resuming from" in again.stdout


def test_a_later_start_of_the_job_ends_the_earlier_one_on_all_ranks(tmp_path: Path) -> None:
    """A requeued Slurm job, whose ranks of the start before went on without Slurm."""
    run_dir = tmp_path / "run"
    args = settings(run_dir, "wait", train__max_steps=100_000, checkpoint__every_steps=2, logging__every=1)
    with ThreadPoolExecutor(1) as threads:
        orphan = threads.submit(python_m, "shardkit.train", *args, ranks=2, env={"SLURM_JOB_ID": "7"})
        until(lambda: orphan.done() or (run_dir / "checkpoints/latest").exists(), 90, lambda: "no checkpoint yet")
        more = ["task.args.how=nothing", "train.max_steps=900", "checkpoint.every_steps=300"]
        restart = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
        python_m("shardkit.train", *args, *more, env=restart, code=0)
        ended = orphan.result()
    assert ended.codes == [6, 6], ended.stderr
    assert sorted(losses(run_dir)) == list(range(1, 901)), "no step twice"
    assert "Slurm job 7 (restart 1), process" in ended.stderr


@pytest.mark.parametrize("dead", [False, True])
def test_of_many_that_start_at_once_one_becomes_the_owner(dead: bool, tmp_path: Path) -> None:
    found: list[owner.Owner | Exception] = []

    def start(number: int) -> None:
        try:
            found.append(owner.claim(tmp_path, replace(HERE, token=str(number)), stale_s=0.5))
        except ConfigError as error:
            found.append(error)

    if dead:
        gone = owner.claim(tmp_path, replace(HERE, born=HERE.born - 1))
        gone._ended.set()
    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = [claimed for claimed in found if isinstance(claimed, owner.Owner)]
    assert len(owners) == 1 and len(found) == 8, found
    assert owners[0].lost() is None and owner._read(tmp_path / owner.FOLDER / owner.LOCK) == owners[0]._record
    owners[0].close()


@pytest.mark.parametrize("ended", [True, False])
def test_a_directory_of_an_earlier_version_is_taken_over_once_its_owner_has_ended(ended: bool, tmp_path: Path) -> None:
    folder = tmp_path / owner.FOLDER
    records = {1: replace(HERE, ended=True), 12: replace(HERE, token="old", ended=ended)}
    write_files(folder, {f"owner.{n}.json": json.dumps(asdict(record)) for n, record in records.items()})
    if not ended:
        with pytest.raises(ConfigError, match=f"is being written by process {HERE.pid}"):
            owner.claim(tmp_path, HERE)
        return
    owner.claim(tmp_path, HERE).close()
    assert os.listdir(folder) == [owner.LOCK]


def test_an_owner_elsewhere_lives_as_long_as_its_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of who looks: the file's own times are of another machine, hours ahead or behind."""
    monkeypatch.setattr(owner, "BEAT_S", 0.05)
    far = owner.claim(tmp_path, ELSEWHERE)
    os.utime(far._path, (1, 1))
    with pytest.raises(ConfigError, match=f"being written by process {HERE.pid} on far"):
        owner.claim(tmp_path, HERE, stale_s=60)  # at its first beat
    far._ended.set()  # its machine died
    far._thread.join()
    os.utime(far._path, (4e9, 4e9))
    near = owner.claim(tmp_path, HERE, stale_s=0.5)
    far._look()
    assert far.lost() == f"{HERE.name} owns it now"
    with pytest.raises(SupersededError, match=r"may not write to its directory any more"):
        far.fence()
    near.close()
    third = owner.claim(tmp_path, ELSEWHERE, stale_s=1e6)
    third.close()  # at once: the one before said that it had ended


def test_time_in_which_the_reader_is_suspended_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner may be suspended as well, and beats when both go on."""
    file = tmp_path / owner.LOCK
    file.touch()
    looks: list[float] = []

    def suspended(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            os.utime(file, (1, 1))

    monkeypatch.setattr(owner, "time", SimpleNamespace(sleep=suspended, monotonic=lambda: 60.0 * len(looks)))
    assert not owner._is_over(file, ELSEWHERE, owner.STALE_S)
    assert owner._is_over(file, ELSEWHERE, owner.STALE_S) and sum(looks[2:]) == owner.STALE_S


def test_an_orphan_that_comes_late_gives_way(tmp_path: Path) -> None:
    later = owner.claim(tmp_path, replace(HERE, job="Slurm job 7", restart=2))
    with pytest.raises(SupersededError, match=r"restart 2"):
        owner.claim(tmp_path, replace(HERE, token="old", job="Slurm job 7", restart=1))
    assert later.lost() is None
    later.close()


def test_a_later_start_waits_until_the_earlier_one_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 0.1)
    first = owner.claim(tmp_path, replace(HERE, job="Slurm job 7"))
    second = owner.claim(tmp_path, replace(HERE, token="new", job="Slurm job 7", restart=1), stale_s=1)
    assert first.lost() is not None, "by then it knew"
    first.close()
    assert second.lost() is None
    second.close()


def test_a_run_whose_mark_was_deleted_stops(tmp_path: Path) -> None:
    mine = owner.claim(tmp_path, HERE)
    mine._path.unlink()
    with pytest.raises(SupersededError, match=r"was deleted"):
        mine.fence()
    mine.close()


def test_a_suspended_run_looks_again_before_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = owner.claim(tmp_path, ELSEWHERE)
    mine._ended.set()  # as long as a process is stopped, its threads are
    mine._thread.join()
    owner.claim(tmp_path, HERE, stale_s=0.3).close()
    monkeypatch.setattr(mine, "_looked", time.monotonic() - 60)
    assert mine.lost() == f"{HERE.name} owns it now"


def test_a_start_again_by_the_same_torchrun_is_no_second_writer() -> None:
    agent = {"TORCHELASTIC_RUN_ID": "shardkit", "GROUP_WORLD_SIZE": "1"}
    first = owner.this_process({**agent, "TORCHELASTIC_RESTART_COUNT": "0"})
    assert first.is_earlier_start(owner.this_process({**agent, "TORCHELASTIC_RESTART_COUNT": "1"}))
    assert not first.is_earlier_start(owner.this_process({**agent, "TORCHELASTIC_RESTART_COUNT": "0"}))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    first = owner.this_process(slurm)
    assert first.is_earlier_start(owner.this_process({**slurm, "SLURM_RESTART_COUNT": "1"}))
    assert first.is_earlier_start(owner.this_process({**slurm, "TORCHELASTIC_RESTART_COUNT": "1"}))
    assert not first.is_earlier_start(owner.this_process({**slurm, "SLURM_STEP_ID": "1"})), "two steps of one job"
    assert not first.is_earlier_start(owner.this_process({**slurm, "SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}))


def old_run(folder: Path, mark: bool = True) -> None:
    """What a run leaves, and what somebody put beside it."""
    write_files(folder, dict.fromkeys(("config.yaml", "env.json", "metrics.jsonl", "memory.jsonl"), "{}\n"))
    names = ("checkpoints/step_00000005/manifest.json", "logs/hang/rank_0.txt", "tensorboard/events.out.tfevents.1",
             "logs/slurm-7.out", "wandb/run_id", "wandb/run-1/x")  # fmt: skip
    write_files(folder, dict.fromkeys(names, "of the run"))
    if mark:
        (folder / owner.FOLDER).mkdir()


MINE = ("notes.txt", "logs/notes.txt", "checkpoints/README", "wandb/settings", "profile/mine", "tensorboard/a/b")


def test_overwriting_deletes_what_a_run_wrote_and_nothing_else(
    tmp_path: Path, prepared: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    old_run(tmp_path / "run")
    write_files(tmp_path / "run", dict.fromkeys(MINE, "mine"))
    path = prepared("run.overwrite=true")
    assert [(path / name).read_text() for name in MINE] == ["mine"] * len(MINE)
    left = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert left == {*MINE, "config.yaml", "env.json", *(f".shardkit/{p.name}" for p in (path / ".shardkit").iterdir())}
    assert "run.overwrite keeps files in" in (said := capsys.readouterr().err) and "logs/notes.txt" in said


def test_overwriting_follows_no_link(tmp_path: Path, prepared: Any) -> None:
    precious = tmp_path / "precious"
    (precious / "hang").mkdir(parents=True)
    write_files(precious, {"slurm-1.out": "mine", "metrics.jsonl": "mine"})
    old_run(tmp_path / "run")
    for name in ("logs", "wandb"):
        (tmp_path / "run" / name).rename(tmp_path / f"{name}.old")
        (tmp_path / "run" / name).symlink_to(precious)
    (tmp_path / "run/metrics.jsonl").unlink()
    (tmp_path / "run/metrics.jsonl").symlink_to(precious / "metrics.jsonl")
    path = prepared("run.overwrite=true")
    assert sorted(entry.name for entry in precious.iterdir()) == ["hang", "metrics.jsonl", "slurm-1.out"]
    assert not (path / "logs").is_symlink() and not (path / "metrics.jsonl").is_symlink()


def test_checkpoints_may_lie_elsewhere_and_are_not_deleted_there(tmp_path: Path, prepared: Any) -> None:
    elsewhere = tmp_path / "large"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=r"is a link to .*large, which is no directory"):
        prepared()
    elsewhere.mkdir()
    path = prepared()
    assert (path / "checkpoints").is_symlink()
    (elsewhere / "step_00000005").mkdir()
    with pytest.raises(ConfigError, match=r"deletes nothing behind links"):
        prepared("run.overwrite=true")
    assert (elsewhere / "step_00000005").is_dir() and (path / "config.yaml").exists()
    prepared("run.resume=true")


def test_a_folder_that_no_run_made_is_left_alone(tmp_path: Path, prepared: Any) -> None:
    old_run(tmp_path / "run", mark=False)
    before = {file: file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(ConfigError, match=r"holds metrics\.jsonl, but no \.shardkit/") as caught:
        prepared("run.overwrite=true")
    assert "earlier version" in caught.value.fix
    with pytest.raises(ConfigError, match=r"already holds a run") as caught:
        prepared()
    assert "overwrite" not in caught.value.fix
    assert {file: file.read_text() for file in tmp_path.rglob("*") if file.is_file()} == before
    prepared("run.resume=true")  # an earlier version's run goes on


FOLDERS = {
    "a model": ("config.json", "model.safetensors", "tokenizer.json"),
    "another model": ("pytorch_model.bin", "readme.md"),
    "notes": ("notes.txt",),
    "a project": ("src/main.py", "logs/old.txt"),
    "other checkpoints": ("checkpoints/last.ckpt",),
    "a project with a config": ("config.yaml",),
    "another trainer's run": ("checkpoint-500/optimizer.pt", "runs/events.out.tfevents.1"),
}


@pytest.mark.parametrize("names", FOLDERS.values(), ids=FOLDERS)
@pytest.mark.parametrize("more", [[], ["run.overwrite=true"], ["run.resume=auto"], ["run.resume=true"]], ids=str)
def test_a_folder_of_other_things_is_no_run_directory(
    names: tuple[str, ...], more: list[str], tmp_path: Path, prepared: Any
) -> None:
    write_files(tmp_path / "run", dict.fromkeys(names, "mine"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"is a model folder|holds no run and is not empty|config\.yaml") as caught:
        prepared(*more)
    assert ("model folder" in caught.value.cause) == any("model" in name for name in names)
    assert "run.dir" in caught.value.fix
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_without_permission_is_refused_at_the_first_look(
    tmp_path: Path, prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=rf"run.dir={tmp_path}/run cannot be written: no permission to write in"):
        prepared()
    assert not (tmp_path / "run").exists()


def test_what_shells_and_launchers_put_there_does_not_stand_in_the_way(tmp_path: Path, prepared: Any) -> None:
    names = ("train.log", "logs/slurm-7.out", "submit/1/config.yaml", "plan.json", ".gitkeep", "slurm-8.err")
    write_files(tmp_path / "run", dict.fromkeys(names, "mine"))
    path = prepared()
    assert all((path / name).exists() for name in names)
    listed = directory.listed(path)
    assert "train.log" not in listed and "slurm-8.err" not in listed and "submit" not in listed
    assert "config.yaml" in listed and "plan.json" in listed
    write_files(path, {"checkpoints/step_00000001/manifest.json": "{}"})
    assert "checkpoints/ (1 file, 2 B)" in directory.listed(path)


def test_a_start_that_failed_before_its_first_step_is_no_run(tmp_path: Path, prepared: Any) -> None:
    path = prepared()
    write_files(path, {"metrics.jsonl": "", "tensorboard/events.out.tfevents.1": "of the failed start"})
    prepared("train.seed=7")
    assert "seed: 7" in (path / "config.yaml").read_text() and not (path / "tensorboard").exists()
    prepared("run.overwrite=true")


def test_a_run_that_is_not_there_is_not_continued_unless_a_job_may_start_it(
    tmp_path: Path, prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"run\.resume=true, but run\.dir=.*/run does not exist") as caught:
        prepared("run.resume=true")
    assert "run.resume=auto" in caught.value.fix and not (tmp_path / "run").exists()
    path = prepared("run.resume=auto")
    with pytest.raises(ConfigError, match=r"holds no run: no step was recorded there"):
        prepared("run.resume=true")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert prepared("run.resume=true") == path


def test_the_launchers_logs_stay_behind_a_link(tmp_path: Path, prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old_run(tmp_path / "run")
    (tmp_path / "run/logs").rename(tmp_path / "elsewhere")
    (tmp_path / "run/logs").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("SHARDKIT_KEEP", str(tmp_path / "run/logs/20260101-000000-node0-1"))
    assert (prepared("run.overwrite=true") / "logs").is_symlink()


def test_what_is_half_deleted_still_counts_as_a_run(tmp_path: Path, prepared: Any) -> None:
    """A crash during an overwrite: the next start must not go on with a rest of checkpoints."""
    old_run(tmp_path / "run")
    for name in ("config.yaml", "env.json", "metrics.jsonl"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(ConfigError, match=r"already holds a run"):
        prepared()


def test_a_restart_goes_on_from_whole_checkpoints_only(tmp_path: Path) -> None:
    """Started from another run's checkpoint, and killed in its first save: it has to start from there again."""
    (tmp_path / "checkpoints/step_00000005.tmp").mkdir(parents=True)
    assert restart.overrides(str(tmp_path), "other/run", {"TORCHELASTIC_RESTART_COUNT": "1"}) == ["run.overwrite=true"]


@pytest.mark.slow
def test_a_closed_terminal_saves_as_a_termination_does(tmp_path: Path) -> None:
    import pty

    args = settings(tmp_path / "run", "wait", train__max_steps=100_000, logging__every=1)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(REPO)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
        os.execve(sys.executable, [*TRAIN, *args], environment())
    try:
        seen = b""
        while not any(int(step) >= 3 for step in re.findall(rb"\b(\d+)/100000", seen)):  # a bar leaves steps out
            seen += os.read(terminal, 4096)
        os.close(terminal)  # what it prints from now on has nowhere to go
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 75
    saved = int((tmp_path / "run/checkpoints/latest").read_text().strip().removeprefix("step_"))
    assert saved == max(losses(tmp_path / "run")) >= 3


@pytest.mark.slow
def test_under_nohup_the_hangup_is_ignored(tmp_path: Path) -> None:
    args = settings(tmp_path / "run", "wait", train__max_steps=30, logging__every=1)
    process = started(["nohup", *TRAIN, *args])
    until_line(process, "step 3/")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 0 and max(losses(tmp_path / "run")) == 30


def in_a_loop(args: list[str], starts: int = 3, **env: str) -> subprocess.CompletedProcess[str]:
    """The same command again and again until it succeeds, by a shell that counts nothing."""
    command = shlex.join([*TRAIN, *args])
    loop = f"for i in $(seq {starts}); do {command} && exit 0; code=$?; [ $code != 2 ] || exit 2; done; exit $code"
    return subprocess.run(
        ["bash", "-c", loop], cwd=REPO, env=environment(**env), capture_output=True, text=True, timeout=180
    )


def dies_in_every_fourth_step(run_dir: Path) -> list[str]:
    """Each start is killed in its fourth step and has saved the two steps before; the run has five."""
    return settings(
        run_dir, "kill", task__args__rank=0, task__args__calls=4, train__max_steps=5, train__deterministic="true",
        checkpoint__every_steps=2, checkpoint__async_save="false",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["run.overwrite=true"]], ids=["plain", "overwrite"])
def test_a_command_that_a_shell_starts_again_under_the_same_name_goes_on(more: list[str], tmp_path: Path) -> None:
    done = in_a_loop([*dies_in_every_fourth_step(tmp_path / "run"), *more], SHARDKIT_JOB_ID="nightly")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resuming from") == 1 and "step_00000002, step 2" in done.stdout
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_command_that_is_started_again_without_a_name_deletes_no_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    args = [*dies_in_every_fourth_step(run_dir), "run.overwrite=true"]
    done = in_a_loop(args)
    assert done.returncode == 2, done.stderr
    assert "holds an unfinished run of this same config with checkpoints up to step 2" in done.stderr
    assert "SHARDKIT_JOB_ID" in done.stderr and (run_dir / "checkpoints/step_00000002/manifest.json").exists()
    another = python_m("shardkit.train", *args, "optim.lr=0.02", "task.args.how=nothing", code=0)
    assert f"run.overwrite deletes the run in {run_dir}, with checkpoints up to step 2" in another.stderr
    assert "resuming" not in another.stdout and sorted(losses(run_dir)) == [1, 2, 3, 4, 5]
    python_m("shardkit.train", *args, "optim.lr=0.02", "task.args.how=nothing", code=0)  # a finished run is overwritten


def test_an_overwrite_never_deletes_its_own_jobs_checkpoints(
    tmp_path: Path, prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a program of the user's own makes the trainer, and nobody has asked for the restart's overrides."""
    old_run(tmp_path / "run")
    (tmp_path / "run/env.json").write_text('{"job": "job nightly", "torchrun": null}')
    monkeypatch.setenv("SHARDKIT_JOB_ID", "nightly")
    with pytest.raises(ConfigError, match=r"this job's earlier start .*up to step 5\)") as caught:
        prepared("run.overwrite=true")
    assert "run.resume=true" in caught.value.fix
    assert (tmp_path / "run/checkpoints/step_00000005").is_dir()


def test_a_replaced_pod_waits_for_the_one_that_still_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts the starts of a pod that is replaced, so it cannot take the directory from the earlier one."""
    monkeypatch.setattr(owner, "BEAT_S", 0.05)
    monkeypatch.setenv("SHARDKIT_GRACE_S", "60")
    saving = owner.claim(tmp_path, replace(ELSEWHERE, job="job uid"))
    ended = threading.Timer(0.5, saving.close)
    ended.start()
    owner.claim(tmp_path, replace(HERE, job="job uid"), stale_s=60).close()
    assert saving.lost() == "this run has ended", "nobody took it away"
    monkeypatch.setenv("SHARDKIT_GRACE_S", "0")
    busy = owner.claim(tmp_path, replace(ELSEWHERE, job="job uid"))
    with pytest.raises(ConfigError, match=r"is being written by job uid \(restart 0\), process \d+ on far"):
        owner.claim(tmp_path, replace(HERE, job="job uid"), stale_s=1)
    counted = replace(HERE, job="job uid", restart=1)
    owner.claim(tmp_path, counted, stale_s=0.5).close()  # JobSet counts: the later start takes over
    assert busy.lost() == f"{counted.name} owns it now"
    busy.close()


def test_overwriting_leaves_a_rival_that_is_starting_and_names_it(
    tmp_path: Path, prepared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_run(tmp_path / "run")
    run_dir, logs = tmp_path / "run", tmp_path / "run/logs"
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setenv("SHARDKIT_KEEP", str(job_starts.path(run_dir)))
    job_starts.note_start(run_dir, "6", 0, "n1")  # of the old run: killed with its node
    job_starts.note_start(run_dir, "9", 0, "n2")
    job_starts.note_start(run_dir, "8", 0, "n1")
    for name in ("slurm-6.0", "slurm-9.0", "20260101-000000-node0-1", "20260101-000000-node0-2"):
        write_files(logs, {f"{name}/torchrun.log": ""})
    write_files(logs, {"slurm-6.out": "", "slurm-9.out": ""})
    rivals = [job_starts.InUse(logs / name) for name in ("slurm-9.0", "20260101-000000-node0-2")]
    for rival in rivals:
        rival.beat()
    job_starts.InUse(logs / "slurm-6.0").beat()
    os.utime(logs / "slurm-6.0/in_use", (1, 1))
    write_files(run_dir / ".rendezvous", {"9.0.0": "n2 1234 word", "6.0.0": "n1 1234 word"})
    os.utime(run_dir / ".rendezvous/6.0.0", (1, 1))
    prepared("run.overwrite=true")
    left = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
    assert {"logs/slurm-9.0/torchrun.log", "logs/slurm-9.out", "logs/20260101-000000-node0-2/torchrun.log"} <= left
    assert not {"logs/slurm-6.out", "logs/slurm-6.0/torchrun.log", "logs/20260101-000000-node0-1/torchrun.log"} & left
    assert ".rendezvous/9.0.0" in left and ".rendezvous/6.0.0" not in left, "the rival's ranks still meet there"
    assert job_starts.summary(run_dir) == "starting in the same directory now: job 9", "not refused yet"
    job_starts.note_end(run_dir, "9", 0, f"failed: run.dir={'x' * 300} is being written by Slurm job 8")
    for rival in rivals:
        rival.close()
    assert job_starts.summary(run_dir) == "refused, as this run was writing to the directory: job 9"
    assert [start.job for start in job_starts.history(run_dir, {})[0]] == [], "the report on file says the same"
