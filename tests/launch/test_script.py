"""`shardkit launch -- SCRIPT`: programs that know nothing of shardkit, on real ranks."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import LaunchError
from shardkit.launch.batch import read_batch, step_argv
from shardkit.launch.failures import failure
from shardkit.launch.local.guard import FIRST_S, Heartbeats
from shardkit.launch.local.processes import Follower, PatientFollower
from shardkit.launch.script import Script, check, missing_module, newest_change
from shardkit.launch.slurm import requeue
from tests.launch.jobs import REPO, environment, run, with_marker

PLAIN = str(REPO / "tests/launch/plain.py")
TWO = ["--nproc-per-node", "2"]


def launched(*words: str) -> list[str]:
    return [sys.executable, "-m", "shardkit.cli", "launch", *TWO, *words]


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "losses.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_script_runs_unchanged_with_a_log_per_rank(tmp_path: Path) -> None:
    process = run(launched("--", PLAIN, str(tmp_path / "mine"), "--steps", "3"), cwd=tmp_path, code=0)
    assert [line for line in process.stdout.splitlines() if line.startswith("step")] == ["step 1", "step 2", "step 3"]
    assert len(list(tmp_path.glob("runs/plain/logs/*/*/attempt_0/[01]/stdout.log"))) == 2
    assert steps(tmp_path / "mine") == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise", 1, ["ValueError: the cat sat", "error: rank 1 failed: ValueError: the cat sat on the GPU"]),
        ("full", 1, ["error: rank 1 failed: torch.OutOfMemoryError: CUDA out of memory.",
                     "  likely cause: the GPU's memory is full"]),
        ("kill", 137, ["error: rank 1 failed: killed by SIGKILL", "  likely cause: "]),
        ("exit", 7, ["no sample is left", "error: rank 1 failed: exit code 7"]),
        ("term", 143, ["error: rank 1 failed: killed by SIGTERM"]),
        ("int", 130, ["error: rank 1 failed: "]),
        ("segv", 139, ["error: rank 1 failed: killed by SIGSEGV"]),
        ("done", 1, ["error: rank 1 failed: it ended early, with exit code 0"]),
    ],
)  # fmt: skip
def test_the_rank_that_failed_first_is_told_and_its_exit_code_passed_on(
    how: str, code: int, said: list[str], tmp_path: Path
) -> None:
    process = run(launched("--run-dir", str(tmp_path), "--", "-m", "tests.launch.plain", str(tmp_path), "--how", how))
    assert process.returncode == code, process.stderr
    lines = iter(process.stderr.splitlines())
    for wanted in said:
        assert any(line.startswith(wanted) for line in lines), (
            f"{wanted}\nis not, or not in this order, in {process.stderr}"
        )
    assert process.stderr.count("Traceback (most recent call last)") == (how in ("raise", "full", "int")), (
        process.stderr
    )
    assert "  1 other rank(s) ended because of it: 0" in process.stderr


@pytest.mark.slow
def test_a_hung_rank_is_named_with_its_place_and_the_job_restarts(tmp_path: Path) -> None:
    watch = ["--heartbeat", "auto", "--heartbeat-timeout", "5", "--max-restarts", "1", "--run-dir", str(tmp_path)]
    run(launched(*watch, "--", PLAIN, str(tmp_path / "mine"), "--how", "hang", "--steps", "4"), code=0)
    assert steps(tmp_path / "mine") == [1, 2, 1, 2, 3, 4]
    (event,) = map(json.loads, (tmp_path / "logs/restarts.jsonl").read_text().splitlines())
    assert event["reason"].startswith("rank 1: no heartbeat for ")
    assert "plain.py" in event["reason"] and event["reason"].endswith("in wait_for_ever")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number"),
    [("term", signal.SIGUSR2), ("usr1", signal.SIGTERM), ("file", signal.SIGTERM), ("usr2", signal.SIGUSR2)],
)
def test_a_preempted_script_is_told_as_it_expects_and_saves(how: str, number: signal.Signals, tmp_path: Path) -> None:
    words = ["--on-preempt", how, "--max-restarts", "1", "--run-dir", str(tmp_path), "--"]
    words += [PLAIN, str(tmp_path / "mine"), "--listen", how, "--wait", "0.02", "--steps", "100000"]
    env = environment(TEST_MARKER=str(tmp_path))
    process = subprocess.Popen(
        launched(*words), cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    next(line for line in process.stdout if line == "step 2\n")
    process.send_signal(number)
    shown, error = process.stdout.read(), process.stderr.read()
    assert process.wait(60) == 75, error
    assert "saved after step" in shown and error == "preempted: the script was told, and ended\n"
    assert with_marker(f"TEST_MARKER={tmp_path}") == []


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_accelerates_own_test_script_runs_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    words = ["--run-dir", str(tmp_path), "--", "-m", "accelerate.test_utils.scripts.test_script"]
    process = run(launched(*words), timeout=600, ACCELERATE_USE_CPU="true", code=0)
    assert "Num processes: 2" in process.stdout
    assert process.stdout.count("Training yielded the same results on one CPU or distributed setup") >= 2


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_trls_sft_script_runs_unchanged(tmp_path: Path) -> None:
    """A tiny model, tokenizer and data set of ours, as folders: nothing is downloaded."""
    pytest.importorskip("trl", reason="needs trl")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = [f"w{i}" for i in range(50)]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(tmp_path / "model")
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.LlamaConfig(vocab_size=len(vocabulary), **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    samples = [json.dumps({"text": " ".join(words[i : i + 10])}) for i in range(40)]
    (tmp_path / "data/train.jsonl").write_text("\n".join(samples))
    args = ["--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "data")]
    args += ["--output_dir", str(tmp_path / "out"), "--max_steps", "2", "--use_cpu", "--bf16", "false"]
    args += ["--report_to", "none", "--per_device_train_batch_size", "2", "--logging_steps", "1"]
    process = run(
        launched("--run-dir", str(tmp_path / "run"), "--", "-m", "trl.scripts.sft", *args),
        timeout=600, code=0,
        HF_HUB_OFFLINE="1", XDG_CACHE_HOME=str(tmp_path / "cache"), HF_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    assert process.stdout.count("'loss'") == 2
    assert (tmp_path / "out/model.safetensors").exists()


def test_a_module_is_found_without_running_any_of_its_code(tmp_path: Path) -> None:
    package = tmp_path / "loud" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "go.py").write_text("")
    assert missing_module("loud.inner.go", tmp_path) is None
    assert missing_module("loud.inner.stop", tmp_path) == "loud.inner.stop"
    assert missing_module("loud.outer.go", tmp_path) == "loud.outer"
    check(Script(("-m", "loud.inner.go")), tmp_path)


def test_checkpoints_are_progress_once_a_file_is_newer(tmp_path: Path) -> None:
    assert newest_change(None) == newest_change(str(tmp_path / "none")) == newest_change(str(tmp_path)) == 0
    inner = tmp_path / "checkpoint-1"
    inner.mkdir()
    (inner / "model").write_text("")
    before = newest_change(str(tmp_path))
    os.utime(inner / "model", ns=(before + 5, before + 5))
    assert newest_change(str(tmp_path)) == before + 5


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def begun(folder: Path, clock: Clock, path: str = "beat{local_rank}", ranks: int = 2) -> Heartbeats:
    path = path if path == "auto" else f"{folder}/{path}"
    beats = Heartbeats(Script(("x.py",), heartbeat=path, heartbeat_timeout_s=10), ranks, folder, clock)
    beats.begin()
    return beats


def test_a_rank_is_silent_only_by_time_in_which_the_launcher_ran(tmp_path: Path) -> None:
    clock = Clock()
    (tmp_path / "beat0").write_text("from an earlier start")
    beats = begun(tmp_path, clock)
    assert beats.quiet() == {}
    for rank in range(2):
        (tmp_path / f"beat{rank}").write_text("")
        os.utime(tmp_path / f"beat{rank}", ns=(1, rank + 1))  # whatever the clock of the rank says
    assert beats.quiet() == {}
    clock.now += 1000  # suspended
    assert beats.quiet() == {}
    for second in range(9):
        clock.now += 1
        os.utime(tmp_path / "beat0", ns=(1, second + 5))
        quiet = beats.quiet()
    assert list(quiet) == [1] and quiet[1].startswith("no heartbeat for 11 s (--heartbeat-timeout 10)")
    (tmp_path / "beat1").unlink()  # it has finished
    clock.now += 1
    assert beats.quiet() == {}


def silent_after(folder: Path, gap_s: float) -> tuple[float, list[int]]:
    """When which ranks are told of, where rank 0 is silent for good `gap_s` before rank 1; a limit of 10 s."""
    clock = Clock()
    beats = begun(folder, clock)
    quiet = beats.quiet()
    for rank in range(2):
        (folder / f"beat{rank}").touch()
    while not quiet:
        quiet = beats.quiet()
        clock.now += 0.5
        if clock.now <= gap_s:
            os.utime(folder / "beat1", ns=(1, int(1000 * clock.now)))
    return clock.now, list(quiet)


def test_ranks_that_fall_silent_together_are_told_of_together(tmp_path: Path) -> None:
    """One look falls between the last heartbeats of a rank that hangs and of a rank that waits for it."""
    assert silent_after(tmp_path, 0)[1] == silent_after(tmp_path, 0.5)[1] == silent_after(tmp_path, 2)[1] == [0, 1]
    told_at, ranks = silent_after(tmp_path, 5)
    assert ranks == [0] and told_at < 13, "no rank waits long for another's limit"


def test_a_script_that_never_touches_its_file_is_told_which(tmp_path: Path) -> None:
    clock = Clock()
    beats = begun(tmp_path, clock, "auto", ranks=1)
    quiet = beats.quiet()
    while not quiet:
        clock.now += 1
        quiet = beats.quiet()
    assert clock.now == FIRST_S + 1
    assert quiet == {0: f"no heartbeat in its first 600 s: {tmp_path}/heartbeat/0 was not touched"}


CHAINED = """warming up
[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 1, in <module>
[rank1]:     {}["x"]
[rank1]: KeyError: 'x'

[rank1]: During handling of the above exception, another exception occurred:

[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 3, in <module>
[rank1]:     raise RuntimeError("no x")
[rank1]: RuntimeError: no x
[rank1]:[W1122 ProcessGroup.cpp] Warning: destroy_process_group() was not called
"""


def test_the_last_traceback_has_the_errors_that_it_came_from() -> None:
    earlier = 'Traceback (most recent call last):\n  File "b.py", line 1, in f\nOSError: tried again\n'
    message, trace = failure.last_traceback(failure._PREFIX.sub("", earlier + CHAINED))
    assert message == "RuntimeError: no x"
    assert trace.startswith('Traceback (most recent call last):\n  File "a.py", line 1') and trace.endswith(message)
    assert "KeyError: 'x'" in trace and "tried again" not in trace
    assert failure.last_traceback('Traceback (most recent call last):\n  File "b.py", li') == ("", "")


def test_an_error_file_of_torchs_record_counts_before_stderr(tmp_path: Path) -> None:
    """@record of torch.distributed.elastic: the file has the traceback, stderr may have anything."""
    folder = tmp_path / "none/attempt_0/1"
    folder.mkdir(parents=True)
    entry = {"message": "ValueError: from the file", "extraInfo": {"py_callstack": "Traceback …", "timestamp": "1"}}
    (folder / "error.json").write_text(json.dumps({"message": entry}))
    (folder / "stderr.log").write_text("Traceback (most recent call last):\nOSError: from stderr\n")
    (rank_failure,) = failure.of_launcher(tmp_path)
    assert (rank_failure.message, rank_failure.trace) == ("ValueError: from the file", "Traceback …")


def test_a_traceback_of_rank_0_waits_until_it_is_clear_what_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, out, log = Clock(), io.BytesIO(), tmp_path / "stderr.log"
    monkeypatch.setattr(time, "monotonic", clock)
    follower = PatientFollower(log, out)
    log.write_bytes(b"warming up\nTraceback (most recent call last):\n  File x\nOSError: no\n")
    follower.pump()
    assert out.getvalue() == b"warming up\n"
    clock.now += 50
    follower.pump()
    assert out.getvalue() == b"warming up\n", "the process may be dying of it"
    with log.open("ab") as file:
        file.write(b"tried again\n")
    follower.pump()
    assert out.getvalue() == log.read_bytes() and follower.showed_traceback


def test_a_traceback_that_is_half_written_at_a_look_is_left_out_whole(tmp_path: Path) -> None:
    out, log = io.BytesIO(), tmp_path / "stderr.log"
    follower = Follower(log, out)
    log.write_bytes(b"warming up\nTraceback (most recent call last):\n")
    follower.pump(stop_at_error=True)
    with log.open("ab") as file:
        file.write(b"  File x\nOSError: no\n")
    follower.pump(stop_at_error=True)
    assert out.getvalue() == b"warming up\n"


@pytest.mark.parametrize(
    ("came", "code", "saved", "outlook", "reason"),
    [
        (["USR2"], 0, True, {}, "saved after USR2"),
        (["USR2"], 0, False, {}, "stopped after USR2"),
        (["USR2"], 75, False, {}, "stopped after USR2"),
        (["USR2"], 143, False, {}, "stopped after USR2"),
        (["USR2"], 1, True, {}, "saved after USR2"),
        (["USR2"], 1, False, {}, None),
        (["USR2"], 137, False, {}, None),
        (["TERM"], 143, True, {}, None),
        ([], 1, True, {}, None),
        (["TERM"], 143, False, {"preempted": True}, "preempted"),
        (["USR2"], 1, False, {"preempted": True}, "preempted"),
        (["TERM"], 137, False, {"restarts": 1}, "taken back by Slurm"),
    ],
)
def test_a_scripts_job_is_requeued_when_it_ended_as_told_or_slurm_took_it(
    came: list[str], code: int, saved: bool, outlook: dict[str, Any], reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(requeue, "outlook", lambda job: requeue.Outlook(**outlook))
    monkeypatch.setattr(requeue, "end_by_slurm", lambda *_: None)
    signals = [signal.Signals[f"SIG{name}"] for name in came]
    assert requeue.script_reason(requeue.ending("7", 0), signals, [], code, saved) == reason


def test_a_batch_job_starts_the_script_that_was_described(tmp_path: Path) -> None:
    path = tmp_path / "run/submit/3/script.json"
    path.parent.mkdir(parents=True)
    path.write_text(Script(("train.py", "--seed", "%a", "a b"), "usr1", checkpoints="out/%a").as_json())
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "NPROC_PER_NODE": "4", "SLURM_ARRAY_TASK_ID": "5"}
    batch = read_batch(["torchrun", "--script", str(path)], environ)
    assert batch.run_dir == tmp_path / "run/array_5" and batch.script is not None
    assert batch.script.checkpoints == "out/5"
    argv = step_argv(batch, environ)
    assert argv[argv.index("--") + 1 :] == ["train.py", "--seed", "5", "a b"]
    assert argv[argv.index("--on-preempt") + 1] == "usr1" and argv[argv.index("--nnodes") + 1] == "2"
    argv = step_argv(read_batch(["srun", "--script", str(path)], environ), environ)
    assert argv[-4:] == ["train.py", "--seed", "5", "a b"] and argv[-5] == sys.executable and "trap" not in str(argv)
    path.unlink()
    with pytest.raises(LaunchError, match="cannot read"):
        read_batch(["srun", "--script", str(path)], environ)
