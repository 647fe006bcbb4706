"""Lightning with a callback on GPUs: bytes of state under sharded strategies, and no wait for the device."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.memory import read_jsonl
from shardkit.report.read import read_run
from tests.commands import environment
from tests.cuda import gpu_ranks
from tests.emulated_cuda import REPO, needs_emulation
from tests.integrations.lightning_run import NUMEL
from tests.integrations.test_others import PACKAGES

pytestmark = [pytest.mark.multigpu, pytest.mark.dist, pytest.mark.release, needs_emulation]
WHOLE, HALF = NUMEL, NUMEL // 2
TENSORS = 4
KINDS = ("params", "master_params", "grads", "optimizer")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH of a process that has Lightning."""
    own = os.environ.get("PYTHONPATH", str(REPO))
    if importlib.util.find_spec("lightning") is not None:
        return own
    folder = str(tmp_path_factory.mktemp("packages"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *PACKAGES]
    subprocess.run(install, check=True)
    return os.pathsep.join([folder, own])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("strategy", "engine", "expected"),
    [
        # Adam's step counters: two tensors of a rank under FSDP, which cuts the flattened model in the middle; one
        # under ZeRO, whose partition is flat.
        ("fsdp", "fsdp", (4 * HALF, 0, 4 * HALF, 8 * HALF + 4 * TENSORS // 2)),
        ("deepspeed_stage_1", "zero1", (2 * WHOLE, 4 * HALF, 2 * HALF, 8 * HALF + 4)),
        ("deepspeed_stage_2", "zero2", (2 * WHOLE, 4 * HALF, 2 * HALF, 8 * HALF + 4)),
        # The model is below DeepSpeed's threshold for small parameters, which stay whole beside their shards.
        ("deepspeed_stage_3", "zero3", (2 * WHOLE + 2 * HALF, 4 * HALF, 2 * HALF, 8 * HALF + 4)),
    ],
)
def test_every_ranks_state_is_counted_to_the_byte(
    strategy: str, engine: str, expected: tuple[int, ...], path: str, tmp_path: Path
) -> None:
    precision = {} if strategy == "fsdp" else {"precision": "bf16-mixed"}
    settings = {"accelerator": "cuda", "devices": 2, "strategy": strategy, **precision}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.integrations.lightning_run", str(tmp_path), json.dumps(settings)]
    done = subprocess.run(
        command, cwd=REPO, env=environment({"PYTHONPATH": path}), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    gathers = list(read_jsonl(tmp_path / "memory.jsonl"))
    assert [step for step, _ in gathers] == [1, 2, 3]
    for row in gathers[-1][1]:
        assert row.state is not None and set(row.phases) == {"forward", "backward", "update"}
        assert tuple(row.state[kind].total for kind in KINDS) == expected
    run = read_run(tmp_path)
    assert run.notes == [] and len(run.last_rows) == 2
    assert (run.setting("parallel.strategy"), run.setting("train.grad_accum_steps")) == (engine, 2)
    assert [(line["step"], line["loss"] > 0) for line in run.metrics] == [(1, True), (2, True), (3, True)]


def test_watching_waits_for_nothing_in_a_step(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(path.split(os.pathsep)[0])  # ranks have this process's search path
    (found,) = gpu_ranks(
        1, "tests.cuda.watched:in_a_tool", env={"EMUCUDA_DEVICES": "1"}, tool="lightning", folder=str(tmp_path / "run")
    )
    loss = {"copy_d2h": 1}  # the callback records it: four bytes that nobody waits for
    assert len(found["plain"]) > 3 and found["watched"] == [{**calls, **loss} for calls in found["plain"]]
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert len(losses) == 12
