"""Slow commands say what they do, quick ones nothing; a plan of a deep model has a first look before its verdict."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardkit.cli import progress
from shardkit.cli.progress import Waiting
from tests.commands import environment

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
ZERO3: dict[str, Any] = {
    "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 16,
}  # fmt: skip
JOBS: dict[str, tuple[dict[str, Any], str, float]] = {
    "zero3": ({**ZERO3, "train_micro_batch_size_per_gpu": 1}, "fits", 60.0),
    "zero3 that does not fit": ({**ZERO3, "train_micro_batch_size_per_gpu": 8}, "does not fit", 60.0),
}
"""Of each file: the job, its verdict, and the CPU seconds in which it comes."""


def test_a_slow_command_says_what_it_does_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    lines: list[str] = []
    first, later = threading.Event(), threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        (later if line.startswith("planning changes") else first).set()

    with Waiting("tracing", say) as waiting:
        assert first.wait(30)
        now += 61
        waiting.now("planning changes")
        assert later.wait(30)
    assert lines[0] == "tracing (0 s)" and lines[-1] == "planning changes (61 s)"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", JOBS)
def test_a_plan_of_8b_from_a_file_tells_its_progress_and_has_a_verdict_in_time(name: str, tmp_path: Path) -> None:
    """The time is measured in CPU seconds of all its processes, of which two cores give at least one a second."""
    pytest.importorskip("transformers")
    pytest.importorskip("deepspeed")
    job, verdict, cpu_s = JOBS[name]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "job.json").write_text(json.dumps(job))
    plan = [
        "plan", "--from", "job.json", "--model", "model", "--gpus", "8", "--gpu", "h100", "train.seq_len=2048",
        "--no-advice",
    ]  # fmt: skip
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.run(
        [sys.executable, "-m", "shardkit.cli", *plan], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=380,
    )  # fmt: skip
    after, took = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    assert process.returncode == {"fits": 0, "does not fit": 4}[verdict], process.stderr
    assert f"verdict    {verdict}" in process.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < cpu_s
    first, *_ = process.stderr.splitlines()
    assert first.startswith("planning job.json: tracing one step (")
    assert int(first.rpartition("(")[2].split()[0]) < took / 2
