"""`profile:`: which steps are traced, what the files hold, and that other steps are left alone."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import train_here
from tests.ranks import LEAKS, run_ranks
from tests.texts import write_numbers

STRATEGIES = ("ddp", "fsdp", "zero2")
START, STEPS = 3, 2
RANGES = ["## forward ##", "## backward ##", "## optimizer ##"]


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
        return [train_here(run) for run in runs]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only rank."""
    for name in [n for n in os.environ if n.startswith((*LEAKS, "LOCAL_")) or n in ("RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)


def tables(run: Path, rank: int = 0) -> str:
    return (run / "profile" / f"rank{rank}_tables.txt").read_text()


def test_every_profiled_rank_writes_a_trace_with_ranges_and_tables(tmp_path: Path) -> None:
    runs = [settings(tmp_path, s, parallel__strategy=s, profile__ranks="all") for s in STRATEGIES]
    runs.append(settings(tmp_path, "one", profile__ranks="[1]", profile__record_shapes="true", profile__stack="true"))
    assert run_ranks(2, "tests.run.test_profiler:train_all", runs=runs) == [[0] * len(runs)] * 2
    for strategy in STRATEGIES:
        for rank in (0, 1):
            with gzip.open(tmp_path / strategy / "profile" / f"rank{rank}_trace.json.gz", "rt") as file:
                events = json.load(file)["traceEvents"]
            ranges = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in RANGES]
            names = [e["name"] for e in sorted(ranges, key=lambda e: float(e["ts"]))]
            # DeepSpeed's backward has a second part: the host's work of the step stands between them.
            assert [name for name, _ in itertools.groupby(names)] == RANGES * STEPS
            text = tables(tmp_path / strategy, rank)
            assert text.startswith(f"rank {rank} of 2 on cpu") and "steps 3, 4\n" in text
            time, memory = (part.splitlines() for part in text.split("Operators by their own ")[1:])
            assert time[0] == "time" and memory[0] == "memory"
            assert any("aten::" in line for line in time) and any("CPU Mem" in line for line in memory)
    assert {path.name for path in tmp_path.glob("one/profile/*")} == {"rank1_trace.json.gz", "rank1_tables.txt"}
    assert "Source Location" in tables(tmp_path / "one", 1) and "Input Shapes" in tables(tmp_path / "one", 1)


@pytest.mark.usefixtures("alone")
def test_only_profiled_steps_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from shardkit.run import profiler

    ranges: list[str] = []
    record = torch.profiler.record_function
    monkeypatch.setattr(profiler, "record_function", lambda name: (ranges.append(name), record(name))[1])
    assert train_here(settings(tmp_path, "run", parallel__strategy="single", profile__start=2, profile__steps=1)) == 0
    assert ranges == RANGES and "steps 2\n" in tables(tmp_path / "run")
    ranges.clear()
    off = settings(tmp_path, "run", parallel__strategy="single", profile__start=None, profile__steps=None)
    assert train_here([*off, "run.overwrite=true"]) == 0
    assert not ranges
    assert not (tmp_path / "run" / "profile").exists(), "nothing new, and the overwritten run's is gone"


@pytest.mark.usefixtures("alone")
def test_steps_that_end_with_the_run_and_steps_never_reached(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    extra = {"parallel__strategy": "single", "checkpoint__at_end": "true"}
    assert train_here(settings(tmp_path, "run", **extra, train__max_steps=2, profile__start=2, profile__steps=4)) == 0
    assert "steps 2\n" in tables(tmp_path / "run"), "the steps there were"
    capfd.readouterr()
    assert train_here([*settings(tmp_path, "run", **extra, profile__start=1), "run.resume=true"]) == 0
    assert "profile.start=1: nothing was profiled, this run did steps 3 to 5" in capfd.readouterr().err


@pytest.mark.usefixtures("alone")
def test_a_rank_that_is_not_there_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train_here(settings(tmp_path, "run", parallel__strategy="single", profile__ranks="[0,5]")) == 2
    assert "profile.ranks=[0, 5]" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
