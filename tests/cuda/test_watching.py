"""`shardkit.watch` on a GPU: nothing waits for the device, and a real out-of-memory error is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.report.read import read_run
from tests.cuda import gpu_ranks
from tests.emulated_cuda import needs_emulation
from tests.integrations.loops import KINDS, NUMEL

pytestmark = [pytest.mark.gpu, pytest.mark.dist, needs_emulation]


def test_watching_asks_nothing_of_cuda_in_a_step(tmp_path: Path) -> None:
    (found,) = gpu_ranks(1, "tests.cuda.watched:cost", folder=str(tmp_path))
    assert found["plain"] == found["watched"], "no wait, copy or allocation more, whether or not memory is gathered"
    assert all(loss is not None for loss in found["losses"][-50:]), "a loss on the GPU is recorded without waiting"
    assert found["hooks_s"] < 2e-3, "hooks of a step with two micro-batches, at one thread of a busy machine"


@pytest.mark.parametrize(
    "tool", ["accelerate", pytest.param("deepspeed", marks=pytest.mark.deepspeed), "trainer", "lightning"]
)
def test_watching_a_tools_loop_asks_nothing_of_cuda_in_a_step(tool: str, tmp_path: Path) -> None:
    pytest.importorskip({"trainer": "transformers"}.get(tool, tool))
    env = {"EMUCUDA_DEVICES": "1"}  # the Trainer puts a model on all cards that it sees
    (found,) = gpu_ranks(1, "tests.cuda.watched:in_a_tool", env=env, tool=tool, folder=str(tmp_path / "run"))
    recorded = {"copy_d2h": 1} if tool == "lightning" else {}  # the callback records the loss, and nobody waits for it
    assert len(found["plain"]) > 3 and found["watched"] == [{**calls, **recorded} for calls in found["plain"]]
    assert (tmp_path / "run" / "memory.jsonl").exists()


@pytest.mark.multigpu
@pytest.mark.release
@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        # torch's counters of steps are on the host
        ("fsdp", (2 * NUMEL, 0, 2 * NUMEL, 4 * NUMEL)),
        pytest.param("zero2", (4 * NUMEL, 2 * NUMEL, 2 * NUMEL, 4 * NUMEL), marks=pytest.mark.deepspeed),
        pytest.param("zero3", (2 * NUMEL, 2 * NUMEL, 2 * NUMEL, 4 * NUMEL), marks=pytest.mark.deepspeed),
    ],
)
def test_accelerates_sharded_ranks_are_counted_to_the_byte(
    engine: str, expected: tuple[int, ...], tmp_path: Path
) -> None:
    found = gpu_ranks(2, "tests.integrations.loops:of_accelerate", folder=str(tmp_path), engine=engine)[0]
    assert found["ranks"] == [dict(zip(KINDS, expected, strict=True))] * 2
    assert found["steps"] == [1, 2, 3] and len(found["losses"]) == 3
    run = read_run(tmp_path)
    assert [run.setting(key) for key in ("parallel.strategy", "train.grad_accum_steps")] == [engine, 2]


@pytest.mark.multigpu
@pytest.mark.release
def test_a_trainers_ranks_of_fsdp2_are_counted_to_the_byte(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.integrations import test_transformers as trainer

    done = trainer.train(tmp_path, args={"use_cpu": False, "fsdp": True})
    assert done.returncode == 0, done.stderr
    state = trainer.NUMEL // 2 * 4
    expected = dict(zip(KINDS, (state, 0, state, 2 * state + 4 * trainer.TENSORS), strict=True))
    assert trainer.counted(tmp_path) == [expected] * 2
    assert read_run(tmp_path / "run").setting("parallel.strategy") == "fsdp"


def test_memory_that_runs_out_on_a_gpu_is_explained(tmp_path: Path) -> None:
    (found,) = gpu_ranks(1, "tests.cuda.watched:out_of_memory", env={"EMUCUDA_MEMORY": "1G"}, folder=str(tmp_path))
    assert (found["kind"], found["phase"], found["step"], found["gaps"]) == ("device", "forward", 3, [])
    assert found["memory"]["exact"] and 0 <= found["request"] - 200_000 * 256 * 4 < 2 * 2**20, "torch rounds it up"
    changes = [one["change"] for one in found["advice"]]
    assert (
        any(change.startswith("train.micro_batch_size=") for change in changes) and "activation.policy=full" in changes
    )
    assert found["row"]["state"]["optimizer"]["device"] > 0
    assert "ran out of memory in forward of step 3" in found["notes"][-1]
