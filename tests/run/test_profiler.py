"""`profile:` and `shardkit profile`: what is traced, what is counted, what is said."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardkit.report.profile.account import CATEGORIES, Snapshot, account, summarise
from shardkit.report.profile.chrome_trace import parse
from shardkit.report.profile.timeline import render
from tests.commands import train_here
from tests.ranks import LEAKS, run_ranks
from tests.texts import write_numbers

REPO = Path(__file__).resolve().parents[2]
STRATEGIES = ("ddp", "fsdp", "zero2")
START, STEPS = 3, 2


def settings(folder: Path, name: str, **extra: Any) -> list[str]:
    """Of a small run in `folder/name` that profiles steps 3 and 4 of 5."""
    values = {
        "data.path": write_numbers(folder / "text"), "data.cache_dir": folder / "cache", "run.dir": folder / name,
        "run.device": "cpu",
        "train.max_steps": 5, "train.seq_len": 32, "train.micro_batch_size": 4, "train.eval_samples": 0,
        "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 2, "memory.interval": 1,
        "logging.tensorboard": "false", "checkpoint.at_end": "false", "profile.start": START, "profile.steps": STEPS,
    }  # fmt: skip
    values |= {key.replace("__", "."): value for key, value in extra.items()}
    return [f"{key}={value}" for key, value in values.items() if value is not None]


def train(*runs: list[str]) -> list[int]:
    return [train_here(run) for run in runs]


def train_all(runs: list[list[str]]) -> list[int]:
    """Runs in a rank's process, one after the other: torch is loaded once.

    A reduction that runs while torch's profiler stops corrupts the heap, once in some ten runs: none may be open then.
    """
    from shardkit.parallel.world import World
    from shardkit.run.profiler import Profiler

    running: set[int] = set()
    begin_sum, stop = World.begin_sum, Profiler._stop

    def begin_counted(self: World, values: list[float]) -> Callable[[], list[float]]:
        wait = begin_sum(self, values)
        running.add(id(wait))

        def wait_counted() -> list[float]:
            running.discard(id(wait))
            return wait()

        return wait_counted

    def stop_checked(self: Profiler) -> None:
        assert not running, "torch's profiler stops within a reduction"
        stop(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "begin_sum", begin_counted)
        patch.setattr(Profiler, "_stop", stop_checked)
        return train(*runs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a run on two ranks for each of STRATEGIES, and `checkpointed`: ddp that repeats every block's forward."""
    folder = tmp_path_factory.mktemp("profiled")
    runs = [settings(folder, s, parallel__strategy=s, profile__ranks="all") for s in STRATEGIES]
    runs.append(settings(folder, "checkpointed", activation__policy="full", profile__ranks="[1]"))
    assert run_ranks(2, "tests.run.test_profiler:train_all", runs=runs) == [[0] * len(runs)] * 2
    return folder


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only rank."""
    for name in [n for n in os.environ if n.startswith((*LEAKS, "LOCAL_")) or n in ("RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)


def events(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    with gzip.open(run / "profile" / f"rank{rank}_trace.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]  # type: ignore[no-any-return]


def summary(run: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((run / "profile" / f"rank{rank}_summary.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_profiled_run_has_its_phases_and_adds_up(strategy: str, folder: Path) -> None:
    run = folder / strategy
    state = json.loads((run / "memory.jsonl").read_text().splitlines()[START])["ranks"]
    for rank in (0, 1):
        ranges = [e for e in events(run, rank) if e.get("cat") == "user_annotation" and e["name"].startswith("## ")]
        in_order = [e["name"] for e in sorted(ranges, key=lambda e: float(e["ts"]))]
        assert in_order == ["## forward ##", "## backward ##", "## optimizer ##"] * STEPS
        found = summary(run, rank)
        assert (found["rank"], found["world_size"], found["steps"]) == (rank, 2, [3, 4])
        peak = found["peak"]
        assert tuple(peak["categories"]) == CATEGORIES
        assert sum(peak["categories"].values()) == peak["bytes"] > 0
        counted = {kind: b["device"] for kind, b in state[rank]["state"].items()}
        assert peak["categories"]["optimizer"] == counted["optimizer"]
        assert peak["categories"]["master_params"] == counted["master_params"]
        assert peak["categories"]["params"] >= counted["params"], "fsdp's gathered ones come on top"
        assert peak["categories"]["activations"] > 0.3 * peak["bytes"]
        assert (run / "profile" / f"rank{rank}_memory.html").read_text().startswith("<!doctype html>")


@pytest.mark.dist
def test_the_peak_is_state_and_what_the_allocator_reports(folder: Path) -> None:
    """ddp's state lies still, so what the allocator counts is the rest of the peak."""
    run = folder / "ddp"
    state = json.loads((run / "memory.jsonl").read_text().splitlines()[START])["ranks"][0]["state"]
    held = sum(kind["device"] for kind in state.values())
    assert summary(run)["peak"]["bytes"] == held + most_allocated(events(run))


def most_allocated(trace: list[dict[str, Any]]) -> int:
    """The largest total that torch's CPU allocator counted since the trace began.

    It does not count what a thread without the profiler frees. gloo's frees a tensor of a gather if it ends after the
    main thread has let go of it: its bytes are taken off where its address is given out again.
    """
    memory = sorted((e for e in trace if e["name"] == "[memory]"), key=lambda e: float(e["ts"]))
    most = uncounted = 0
    sizes: dict[int, int] = {}
    before = memory[0]["args"]["Total Allocated"] - memory[0]["args"]["Bytes"]
    for event in (e["args"] for e in memory):
        uncounted += sizes.pop(event["Addr"], 0) if event["Bytes"] > 0 else 0
        sizes[event["Addr"]] = max(event["Bytes"], 0)
        most = max(most, event["Total Allocated"] - before - uncounted)
    return most


def test_a_tensor_that_another_thread_freed_is_not_counted() -> None:
    def event(ts: int, address: int, n_bytes: int, total: int) -> dict[str, Any]:
        return {"name": "[memory]", "ts": ts, "args": {"Addr": address, "Bytes": n_bytes, "Total Allocated": total}}

    assert most_allocated([event(1, 8, 100, 150), event(2, 16, 10, 160), event(3, 16, -10, 150)]) == 110
    assert most_allocated([event(1, 8, 100, 100), event(2, 8, 60, 160)]) == 100


@pytest.mark.dist
def test_checkpointing_shows_as_fewer_activations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, checkpointed = summary(folder / "ddp", 1)["peak"], summary(folder / "checkpointed", 1)["peak"]
    assert checkpointed["categories"]["activations"] < 0.7 * plain["categories"]["activations"]
    for kind in ("params", "grads", "optimizer"):
        assert checkpointed["categories"][kind] == plain["categories"][kind]
    assert not (folder / "checkpointed" / "profile" / "rank0_trace.json.gz").exists(), "profile.ranks=[1]"
    repeated = [e for e in summary(folder / "checkpointed", 1)["allocations"] if e["op"] == "aten::gelu"]
    assert {e["phase"] for e in repeated} == {"forward", "backward"}

    from shardkit.cli.__main__ import app

    app(["profile", str(folder / "ddp"), str(folder / "checkpointed")], standalone_mode=False)
    out = capsys.readouterr().out
    assert "activation.policy: none | full" in out
    assert any(line.split()[0] == "activations" and "-" in line for line in out.splitlines() if line.strip())


@pytest.mark.dist
def test_the_command_answers_without_torch(folder: Path) -> None:
    code = (
        "import sys; from shardkit.cli.__main__ import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print('loaded', sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "profile", str(folder / "fsdp")], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "loaded []" in done.stdout
    found = max((summary(folder / "fsdp", rank) for rank in (0, 1)), key=lambda s: s["peak"]["bytes"])
    assert f"rank {found['rank']} of 2, steps 3 to 4, fsdp" in done.stdout
    assert f"{found['allocations'][0]['op']} allocates the most" in done.stdout
    for kind in ("trace", "memory"):
        assert str(folder / "fsdp" / "profile" / found["files"][kind]) in done.stdout
    asked = subprocess.run(
        [sys.executable, "-m", "shardkit.cli", "profile", "--json", str(folder / "fsdp"), str(folder / "ddp")],
        cwd=REPO, capture_output=True, text=True,
    )  # fmt: skip
    runs = json.loads(asked.stdout)["runs"]
    assert [Path(run["run"]).name for run in runs] == ["fsdp", "ddp"]
    assert sorted(rank["rank"] for rank in runs[0]["ranks"]) == [0, 1]


@pytest.mark.usefixtures("alone")
def test_the_biggest_allocator_is_what_dispatch_counts(tmp_path: Path) -> None:
    """The same step once more, its operators' fresh outputs counted one by one."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from shardkit import start
    from shardkit.config.load import load_config
    from shardkit.run.trainer import Trainer

    made: Counter[tuple[str, bool]] = Counter()

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view and not func._schema.is_mutable:
                in_backward = torch._C._current_graph_task_id() != -1
                made[func._schema.name, in_backward] += out.untyped_storage().nbytes()
            return out

    args = settings(tmp_path, "counted", parallel__strategy="single", profile__start=None, profile__steps=None)
    with start(load_config(None, args)) as job:
        steps = Trainer(job).recorded_steps()
        next(steps), next(steps)
        with Count():  # type: ignore[no-untyped-call]
            next(steps)
        steps.close()  # type: ignore[attr-defined]
    assert train(settings(tmp_path, "run", parallel__strategy="single")) == [0]
    top = summary(tmp_path / "run")["allocations"][0]
    (op, in_backward), n_bytes = made.most_common(1)[0]
    assert (top["op"], top["phase"] == "backward", top["bytes"]) == (op, in_backward, n_bytes)


@pytest.mark.usefixtures("alone")
def test_only_profiled_steps_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from shardkit.run import profiler
    from shardkit.run.trainer import Trainer

    ranges: list[tuple[int, str]] = []
    trainers: list[Trainer] = []
    record, make = torch.profiler.record_function, Trainer.__init__

    def remember(self: Trainer, *args: Any) -> None:
        trainers.append(self)
        make(self, *args)

    def count(name: str) -> Any:
        ranges.append((trainers[-1].loop.step, name))
        return record(name)

    monkeypatch.setattr(Trainer, "__init__", remember)
    monkeypatch.setattr(profiler, "record_function", count)
    assert train(settings(tmp_path, "run", parallel__strategy="single", profile__start=2, profile__steps=1)) == [0]
    assert ranges == [(2, "## forward ##"), (2, "## backward ##"), (2, "## optimizer ##")]
    assert summary(tmp_path / "run")["steps"] == [2]
    ranges.clear()
    off = settings(tmp_path, "run", parallel__strategy="single", profile__start=None, profile__steps=None)
    assert train([*off, "run.overwrite=true"]) == [0]
    assert not ranges
    assert not (tmp_path / "run" / "profile").exists(), "nothing new, and the overwritten run's is gone"


@pytest.mark.usefixtures("alone")
def test_steps_that_end_with_the_run_and_steps_never_reached(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    extra = {"parallel__strategy": "single", "checkpoint__at_end": "true"}
    assert train(settings(tmp_path, "run", **extra, train__max_steps=2, profile__start=2, profile__steps=4)) == [0]
    assert summary(tmp_path / "run")["steps"] == [2], "the steps there were"
    capfd.readouterr()
    assert train([*settings(tmp_path, "run", **extra, profile__start=1), "run.resume=true"]) == [0]
    assert "profile.start=1: nothing was profiled, this run did steps 3 to 5" in capfd.readouterr().err


@pytest.mark.usefixtures("alone")
def test_a_rank_that_is_not_there_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    args = settings(tmp_path, "run", parallel__strategy="single", profile__steps=3, profile__ranks="[0,5]")
    assert train(args) == [2]
    two_lines(capfd.readouterr().err, "profile.ranks=[0, 5]", "0 to 0")
    assert not (tmp_path / "run").exists()


def test_a_profile_of_a_stranger_is_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shardkit.cli.__main__ import main

    file = tmp_path / "profile" / "rank0_summary.json"
    file.parent.mkdir()
    os.mkfifo(file)
    for content in (None, "{", "[1]", '{"schema": 1, "files": {}}', '{"schema": 1, "files": [], "peak": 5, "rank": 0}',
                    '{"schema": 1, "files": {}, "rank": 0, "peak": {"bytes": 1}}', "[" * 100_000):  # fmt: skip
        if content is not None:
            file.unlink()
            file.write_text(content)
        with pytest.raises(SystemExit) as ended:
            main(["profile", str(tmp_path)])
        assert ended.value.code == 2
        two_lines(capsys.readouterr().err, "rank0_summary.json")


def test_names_in_a_profile_move_no_cursor(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shardkit.cli.__main__ import main

    shutil.copytree(folder / "ddp" / "profile", tmp_path / "run" / "profile")
    for file in (tmp_path / "run" / "profile").glob("*_summary.json"):
        file.write_text(file.read_text().replace("aten::", r"\u001b]0;owned\u0007"))
    with pytest.raises(SystemExit, match="0"):
        main(["profile", str(tmp_path / "run")])
    shown = capsys.readouterr().out
    assert r"\x1b]0;owned" in shown
    assert all(char.isprintable() or char == "\n" for char in shown), repr(shown)


def two_lines(err: str, *said: str) -> None:
    cause, fix = [line for line in err.splitlines() if not line.startswith("USDT")]
    assert cause.startswith("error: ") and fix.startswith("  fix: ")
    for words in said:
        assert words in err


def op(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": ts, "dur": dur, "args": args}


def memory(ts: float, n_bytes: int, address: int, tid: int = 1, device: int = 0) -> dict[str, Any]:
    args = {"Bytes": n_bytes, "Addr": address, "Device Type": device, "Total Allocated": 0}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": tid, "ts": ts, "args": args}


def step(*inside: dict[str, Any]) -> list[dict[str, Any]]:
    """A step from 0 to 300 µs, a third for each phase."""
    names = ("## forward ##", "## backward ##", "## optimizer ##")
    return [op(name, 100 * i, 99, cat="user_annotation") for i, name in enumerate(names)] + list(inside)


IDENTITY = {"rank": 0, "device": "cpu", "settings": {"parallel.strategy": "<b>ddp</b>"}}


def test_names_from_a_trace_are_escaped() -> None:
    events = step(op("<script>alert(1)</script>&", 10, 5), memory(12, 64, 1), memory(150, -64, 1))
    found = account(parse(events, "cpu"), [])
    page = render(found, {**IDENTITY, **summarise(found, [1])})
    assert "<script>" not in page and "<b>ddp" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in page
    assert "://" not in page and "default-src 'none'; style-src" in page, "loads nothing, runs nothing"


def test_a_device_trace_counts_kernels_and_only_its_own_memory() -> None:
    events = step(
        op("aten::mm", 10, 8, **{"External id": 7, "Sequence number": 3, "Fwd thread id": 0}),
        memory(12, 512, 1, device=1),
        memory(13, 9999, 2),
        {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "ts": 40, "dur": 30.0, "args": {"External id": 7}},
        op(
            "autograd::engine::evaluate_function: MmBackward0", 110, 20, 2, **{"Sequence number": 3, "Fwd thread id": 1}
        ),
        op("aten::mm", 112, 8, 2, **{"External id": 8}),
        memory(113, 1024, 3, tid=2, device=1),
        memory(114, 128, 4, tid=2, device=1),
        memory(180, -128, 4, tid=2, device=1),
        memory(140, -512, 1, tid=2, device=1),
        memory(250, -1024, 3, device=1),
        memory(260, -256, 99, device=1),
    )
    state = {50: ("params", 2048), 99: ("optimizer", 256)}
    looks = [Snapshot("start", state), Snapshot("forward", state), Snapshot("backward", {**state, 3: ("grads", 1024)})]
    answers = summarise(account(parse(events, "cuda"), looks, in_use=3000), [4])
    assert answers["peak"]["phase"] == "backward" and answers["peak"]["step"] == 4
    assert {k: v for k, v in answers["peak"]["categories"].items() if v} == {
        "params": 2048, "grads": 1024, "optimizer": 256, "activations": 512, "other": 3000 - 2048 - 256 + 128,
    }  # fmt: skip
    assert answers["ops"]["forward"][0] == {"op": "aten::mm", "self_us": 8.0, "device_us": 30.0, "count": 1.0}
    assert [(e["op"], e["phase"], e["bytes"]) for e in answers["allocations"]] == [
        ("aten::mm", "backward", 1024 + 128), ("aten::mm", "forward", 512),
    ]  # fmt: skip


def test_a_release_that_was_not_seen_ends_when_the_address_is_used_again() -> None:
    trace = parse(step(memory(10, 100, 1), memory(60, 40, 1), memory(70, -40, 1)), "cpu")
    assert [(a.n_bytes, a.start, a.end) for a in trace.allocations] == [(100, 10, 60), (40, 60, 70)]
    assert summarise(account(trace, []), [1])["peak"]["bytes"] == 100


def test_scratch_is_no_activation() -> None:
    """Scratch goes inside the operator that made it; an output that forward drops later is an activation."""
    autograd: dict[str, Any] = {"Sequence number": 1, "Fwd thread id": 0}
    events = step(
        op("aten::sdpa", 10, 20, **autograd), memory(12, 300, 1), memory(14, 100, 2), memory(20, -300, 1),
        memory(60, -100, 2),
    )  # fmt: skip
    found = account(parse(events, "cpu"), [])
    assert sorted((a.n_bytes, category) for a, category in found.category.items()) == [
        (100, "activations"), (300, "other"),
    ]  # fmt: skip
