"""What goes wrong on GPUs ends a run soon, with rank, cause and what would help; files it leaves can be read."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from shardkit.checkpoint.native import layout
from shardkit.checkpoint.native.reader import CheckpointReader
from tests.emulated_cuda import needs_emulation
from tests.faults.test_memory import MIB, post_mortem, settings
from tests.launch import jobs
from tests.launch.jobs import command, run

pytestmark = [pytest.mark.gpu, needs_emulation]

HOST = socket.gethostname()
BOUND_S = 180
EXPANDABLE = [{}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}]


def hungry(run_dir: Path, how: str, n_bytes: int, *more: str, code: int, ranks: int = 1, **env: str) -> Any:
    """A run on GPUs of 256 MiB whose last rank asks for too much; a launcher's process as `run` gives it."""
    argv = settings(
        run_dir, how, "run.device=cuda", "memory.plan=false", f"task.args.rank={ranks - 1}", "task.args.calls=2",
        f"task.args.n_bytes={n_bytes}", *more,
    )  # fmt: skip
    if ranks == 1:
        argv.append("parallel.strategy=single")
    argv = command("--nproc-per-node", str(ranks), *argv)
    return run(argv, timeout=BOUND_S, code=code, **{"EMUCUDA_MEMORY": "256M", **env})


@pytest.mark.parametrize("expandable", EXPANDABLE, ids=["segments", "expandable"])
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_a_full_device_is_explained(how: str, expandable: dict[str, str], tmp_path: Path) -> None:
    done = hungry(tmp_path / "run", how, 300 * MIB, **expandable, code=3)
    assert f"error: rank 0 ran out of memory in {how} of step 2" in done.stderr, done.stderr
    assert "it asked for 0.29 GiB of Emulated GPU's memory" in done.stderr
    found = post_mortem(tmp_path / "run", 0)
    assert (found["kind"], found["phase"], found["request"]) == ("device", how, 300 * MIB)
    assert found["memory"]["limit"] == 256 * MIB and found["memory"]["exact"]
    assert 0 < found["memory"]["allocated"] <= found["memory"]["reserved"] <= 256 * MIB
    assert found["gaps"] == [] and found["tensors"]
    check_snapshot(tmp_path / "run" / "oom" / found["snapshot"], found["memory"]["reserved"])


def check_snapshot(path: Path, reserved: int) -> None:
    """The file is what memory_viz takes: segments that add up to what was reserved."""
    from torch.cuda import _memory_viz

    snapshot = pickle.loads(path.read_bytes())
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == reserved
    assert "total_reserved: " in _memory_viz.segsum(snapshot)
    assert "MemoryViz" in _memory_viz.trace_plot(snapshot)


@pytest.mark.parametrize(
    ("width", "memory", "where", "phase"),
    [
        (5000, "256M", "while wrapping the model", "wrap"),
        # 64 MiB of weights and as much of gradients fit; AdamW's moments, as much again twice, do not.
        (2048, "220M", "in update of step 1", "update"),
    ],
    ids=["a model", "moments"],
)
def test_what_does_not_fit_is_explained(width: int, memory: str, where: str, phase: str, tmp_path: Path) -> None:
    done = hungry(tmp_path / "run", "nothing", 0, f"task.args.width={width}", EMUCUDA_MEMORY=memory, code=3)
    assert f"error: rank 0 ran out of memory {where}" in done.stderr, done.stderr
    assert post_mortem(tmp_path / "run", 0)["phase"] == phase


@pytest.mark.parametrize("expandable", EXPANDABLE, ids=["segments", "expandable"])
def test_the_cap_holds(expandable: dict[str, str], tmp_path: Path) -> None:
    done = hungry(tmp_path / "run", "forward", 100 * MIB, "memory.cap=128MiB", ranks=2, **expandable, code=3)
    assert "error: rank 1 ran out of memory in forward of step 2" in done.stderr, done.stderr
    assert "it asked for 100.0 MiB of memory.cap=128MiB" in done.stderr
    found = post_mortem(tmp_path / "run", 1)
    assert found["memory"]["limit"] == 128 * MIB and found["memory"]["reserved"] <= 128 * MIB
    hungry(tmp_path / "other", "forward", 100 * MIB, ranks=2, **expandable, code=0)  # without the cap it fits


def test_page_locked_memory_that_is_refused_is_the_hosts(tmp_path: Path) -> None:
    done = hungry(tmp_path / "run", "pinned", 2**50, code=3)
    assert "of the host's memory" in done.stderr, done.stderr
    found = post_mortem(tmp_path / "run", 0)
    assert found["kind"] == "host"
    assert not any("activation.policy" in one["change"] for one in found["advice"]), "that would help the device"


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("kill", 137, ["error: rank 1 failed: killed by SIGKILL"]),
        ("hang", 1, ["no progress for 6 s at step 3", f"did not arrive: rank 1 on {HOST} (step 3, forward, "]),
        ("stop", 1, [f"rank(s) 1 on {HOST} did not even answer"]),
    ],
)
def test_a_rank_that_is_lost_is_named(how: str, code: int, words: list[str], tmp_path: Path) -> None:
    argv = jobs.settings(tmp_path / "run", how, run__device="cuda", run__step_timeout_s=6, memory__plan="false")
    began = time.monotonic()
    done = run(command("--nproc-per-node", "2", *argv), timeout=BOUND_S, FAULTS=str(tmp_path))
    assert time.monotonic() - began < BOUND_S
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert jobs.with_marker(f"FAULTS={tmp_path}") == [], "processes are left"
    if how != "kill":
        check_flight_recorder(tmp_path / "run" / "logs" / "nccl_rank_0")


def check_flight_recorder(path: Path) -> None:
    """What NCCL's collectives were, and which the others did not join."""
    found = pickle.loads(path.read_bytes())
    assert found["entries"], found.keys()
    assert any("all_reduce" in entry["profiling_name"] for entry in found["entries"])


@pytest.mark.parametrize("rank", [0, 1], ids=["under its peer", "in its own forward"])
def test_a_device_that_is_lost_is_named(rank: int, tmp_path: Path) -> None:
    """The second rank's GPU falls off the bus: while the first rank computes, and while it does itself."""
    argv = jobs.settings(
        tmp_path / "run", "lose", run__device="cuda", run__step_timeout_s=60, memory__plan="false",
        train__max_steps=1000, task__args__rank=rank,
    )  # fmt: skip
    gone = {"EMUCUDA_LOST": f"1:{tmp_path / 'gone'}", "FAULTS": str(tmp_path)}
    done = run(command("--nproc-per-node", "2", *argv), timeout=BOUND_S, **gone)
    assert done.returncode in (1, 134), done.stderr
    assert "error: rank 1 failed: " in done.stderr, done.stderr
    assert "CUDA error: unknown error" in done.stderr.partition("error: rank 1 failed: ")[2], done.stderr
    assert "no progress for" not in done.stderr, "it ends by itself"
    assert jobs.with_marker(f"FAULTS={tmp_path}") == [], "processes are left"


def test_nccls_own_watchdog_ends_the_peers_of_a_rank_that_hangs(tmp_path: Path) -> None:
    argv = jobs.settings(
        tmp_path / "run", "hang", run__device="cuda", run__step_timeout_s=6, memory__plan="false",
        task__factory="tests.launch.tasks:Unwatched",
    )  # fmt: skip
    quick = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500", "FAULTS": str(tmp_path)}
    done = run(command("--nproc-per-node", "2", *argv), timeout=BOUND_S, code=134, **quick)
    assert "error: rank 0 failed: " in done.stderr, done.stderr
    (log,) = (tmp_path / "run" / "logs").glob("*/*/attempt_0/0/stderr.log")
    timed_out = "Watchdog caught collective operation timeout|Operation timed out after"  # the second since torch 2.15
    assert re.search(timed_out, log.read_text()) and re.search(timed_out, done.stderr)
    assert not (tmp_path / "run" / "logs" / "hang").exists(), "shardkit's own watchdog was not asked"
    check_flight_recorder(tmp_path / "run" / "logs" / "nccl_rank_0")
    assert jobs.with_marker(f"FAULTS={tmp_path}") == [], "processes are left"


@pytest.mark.parametrize("background", ["false", "true"], ids=["at once", "in the background"])
def test_a_device_that_is_full_while_saving_is_explained_and_the_last_checkpoint_stays(
    background: str, tmp_path: Path
) -> None:
    more = [f"checkpoint.async_save={background}", "checkpoint.every_steps=1", "checkpoint.at_end=false"]
    done = hungry(tmp_path / "run", "save", 300 * MIB, *more, ranks=2, code=3)
    assert "error: rank 1 ran out of memory while saving step 2" in done.stderr, done.stderr
    assert "it asked for 0.29 GiB of Emulated GPU's memory" in done.stderr and "what would help" in done.stderr
    assert "Traceback" not in done.stderr
    found = post_mortem(tmp_path / "run", 1)
    assert (found["kind"], found["phase"], found["step"], found["request"]) == ("device", "save", 2, 300 * MIB)
    assert found["advice"], "as for any other phase"
    (kept,) = layout.checkpoints(tmp_path / "run" / "checkpoints")
    with CheckpointReader(kept) as checkpoint:
        assert checkpoint.manifest.run.step == 1


def test_page_locked_memory_refused_to_a_save_is_explained_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    more = ["checkpoint.async_save=true", "checkpoint.every_steps=2", "task.args.width=512", "train.max_steps=2"]
    hungry(tmp_path / "run", "nothing", 0, *more, code=0)
    go_on = [*more, "run.resume=true", "train.max_steps=4"]
    done = hungry(tmp_path / "run", "nothing", 0, *go_on, EMUCUDA_HOST_MEMORY="4M", code=3)
    assert "error: rank 0 ran out of memory while saving" in done.stderr, done.stderr
    assert "of the host's memory" in done.stderr, done.stderr
    assert post_mortem(tmp_path / "run", 0)["kind"] == "host"
    (kept,) = layout.checkpoints(tmp_path / "run" / "checkpoints")
    with CheckpointReader(kept) as checkpoint:
        assert checkpoint.manifest.run.step == 2
    done = hungry(tmp_path / "run", "nothing", 0, *go_on, code=0)
    assert "step 2" in done.stdout, "it went on from there"


@pytest.mark.parametrize(
    ("visible", "words"),
    [("", "sees no GPU"), ("9", "sees no GPU"), ("0,-1,1", "torch sees 1 GPU"), ("3,1", "")],
)
def test_too_few_visible_devices_are_said(visible: str, words: str, tmp_path: Path) -> None:
    """Two in another order are enough."""
    argv = jobs.settings(tmp_path / "run", run__device="cuda", memory__plan="false", train__max_steps=2)
    code = 2 if words else 0
    done = run(command("--nproc-per-node", "2", *argv), timeout=BOUND_S, CUDA_VISIBLE_DEVICES=visible, code=code)
    assert words in done.stderr and ("  fix: " in done.stderr) == bool(words), done.stderr
    assert "Traceback" not in done.stderr


def test_a_profile_can_be_read_back(tmp_path: Path) -> None:
    argv = jobs.settings(
        tmp_path / "run", run__device="cuda", memory__plan="false", profile__start=3, profile__steps=2,
        train__max_steps=5,
    )  # fmt: skip
    run(command("--nproc-per-node", "2", *argv), timeout=BOUND_S, code=0)
    (path,) = (tmp_path / "run").rglob("*_trace.json.gz")
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any("cuda" in event.get("cat", "") for event in events)
