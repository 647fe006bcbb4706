"""A run that was stopped and resumed is the run that was not, bit for bit, generators too; what a resume refuses."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardkit.checkpoint import rng
from shardkit.checkpoint.native import layout
from shardkit.checkpoint.native.manifest import BLOCK_BYTES
from shardkit.config.load import load_config
from shardkit.errors import ShardkitError, report
from shardkit.launch.local.processes import note_early
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.checkpoint import runs
from tests.checkpoint.reads import WIDTH
from tests.commands import environment, python_m
from tests.ranks import run_ranks
from tests.run.test_train import lines, user_error
from tests.texts import write_numbers

DISTRIBUTED = ["ddp", "fsdp", "zero1", "zero2", "zero3", "zero3+optimizer"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_numbers(folder / "text")
    return folder


def check_bitwise(world: int, names: list[str], root: Path, **extra: Any) -> None:
    for result in run_ranks(
        world, "tests.checkpoint.runs:interrupted", timeout=850, names=names, root=str(root), **extra
    ):
        for case, (steps, pieces, recorded) in result.items():
            label = f"{case} on {world} ranks"
            taken = [step for step, *_ in pieces]
            assert taken == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8], f"{label}: the save comes after a step"
            final_figures = {step: figures for step, *figures in pieces}
            for step, *figures in steps:
                assert final_figures[step] == figures, (
                    f"{label}, step {step}: (loss, norm) {final_figures[step]} instead of {figures}"
                )
            assert recorded[0] == recorded[1], f"{label}: metrics.jsonl and memory.jsonl have each step once"
            assert recorded[0][0] == list(range(1, runs.STEPS + 1))


def check_reads(results: list[dict[str, Any]], copies: dict[str, float]) -> None:
    """Check that all ranks together read a checkpoint as many times as `copies` says, each an even part."""
    for case, times in copies.items():
        reads, total = [result[case][0] for result in results], results[0][case][1]
        assert all(result[case][2] for result in results), (case, "every rank holds the saved values")
        assert sum(reads) == pytest.approx(times * total, rel=2e-3), (case, reads, total)
        assert max(reads) - min(reads) < 2.1 * BLOCK_BYTES, (case, reads)


@pytest.mark.slow
@pytest.mark.parametrize("local_size", [2, 4])
def test_each_of_several_nodes_reads_once(local_size: int, tmp_path: Path) -> None:
    nodes, frozen = 4 // local_size, 4 * WIDTH * (WIDTH + 1)
    strategies = ["ddp", "hsdp", "zero1", "zero2"]
    arguments: dict[str, Any] = {"root": str(tmp_path), "strategies": strategies, "bucket_bytes": 2**22}
    results = run_ranks(4, "tests.checkpoint.reads:resumed", local_size=local_size, timeout=200, **arguments)
    frozen_share = frozen / results[0]["zero1"][1]  # under ZeRO-1 every rank holds it
    zero = 1 + (nodes - 1) * frozen_share
    check_reads(results, {"ddp": nodes, "hsdp": nodes, "zero1": zero, "zero2": zero})


@pytest.mark.timeout(900)
def test_resumed_runs_repeat_the_uninterrupted_one_to_the_bit(root: Path) -> None:
    check_bitwise(2, ["zero3+optimizer"], root)


@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_strategy_resumes_to_the_bit(world: int, async_save: bool, root: Path, tmp_path: Path) -> None:
    write_numbers(tmp_path / "text")
    names = DISTRIBUTED + {1: ["single"], 4: ["hsdp"]}.get(world, [])
    check_bitwise(world, names, tmp_path, **{"checkpoint.async_save": async_save})


@pytest.mark.release
def test_cpu_adam_goes_on_to_the_bit() -> None:
    stops = (7, 9, 14, 20)  # where the powers of beta by repeated multiplication and by `pow` differ
    assert all(run_ranks(1, "tests.checkpoint.runs:cpu_adam_bits", stops=stops, steps=24)[0])


def arguments(root: Path, ranks: int) -> list[str]:
    values = runs.settings("fsdp" if ranks else "single", max(ranks, 1), str(root), "run")
    return [f"{k}={'null' if v is None else str(v).lower() if isinstance(v, bool) else v}" for k, v in values.items()]


def run(root: Path, *overrides: str, ranks: int = 0, code: int | None = None) -> subprocess.CompletedProcess[str]:
    return python_m("shardkit.train", *arguments(root, ranks), *overrides, ranks=ranks, code=code)


def losses(root: Path) -> list[float]:
    return [record["loss"] for record in lines(root / "run" / "metrics.jsonl")]


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    write_numbers(tmp_path / "text")
    return tmp_path


def test_a_run_killed_before_its_first_checkpoint_starts_over(fresh: Path) -> None:
    assert run(fresh, "train.max_steps=2", "checkpoint.every_steps=null", "checkpoint.at_end=false").returncode == 0
    assert not (fresh / "run" / "checkpoints" / "latest").exists()
    run(fresh, "train.max_steps=2", "run.resume=true", code=0)
    assert [r["step"] for r in lines(fresh / "run" / "metrics.jsonl")] == [1, 2]


def test_a_finished_run_has_nothing_to_do_and_is_made_longer(fresh: Path) -> None:
    first_start = run(fresh, "train.max_steps=2")
    assert first_start.returncode == 0
    limit = "if a save makes no progress for {} s, the job ends (checkpoint.timeout_s)"
    assert limit.format(1800) in first_start.stdout, "no save of the run was timed yet"
    before, checkpoints = losses(fresh), fresh / "run" / "checkpoints"
    (checkpoints / "step_00000009.tmp").mkdir()  # as a start that was killed in a save leaves them
    (checkpoints / "step_00000009.tmp/rank_00000.bin").write_text("part")
    (checkpoints / "latest.part0123456789ab").write_text("step_00000009")
    later_start = run(fresh, "train.max_steps=2", "run.resume=true")
    assert not list(checkpoints.glob("*.tmp")) and not list(checkpoints.glob("*.part*"))
    saves_s = [save["total_s"] for save in lines(fresh / "run" / "logs" / "checkpoints.jsonl")]
    allowed_s = max(120, 10 * max(saves_s))  # a busy machine may take many seconds for a save
    assert limit.format(f"{allowed_s:.0f}") in later_start.stdout, "as long as the earlier start's saves allow"
    assert later_start.returncode == 0, later_start.stderr
    assert "nothing to do" in later_start.stdout
    assert losses(fresh) == before
    later_start = run(fresh, "train.max_steps=3", "run.resume=true", code=0)
    assert losses(fresh)[:2] == before and len(losses(fresh)) == 3


REFUSED = {
    "another seed": (["run.resume=true", "train.seed=7"], ["train.seed=7", "train.seed=0"]),
    "other data": (["run.resume=true", "train.seq_len=8"], ["samples", "train.seq_len"]),
    "another order": (["run.resume=true", "data.shuffle=false"], ["data.shuffle"]),
    "another packing": (["run.resume=true", "data.packing=packed"], ["data.packing=none"]),
    "another model": (["run.resume=true", "model.d_model=48"], ["[", "48]", "in this run"]),
    "more layers": (["run.resume=true", "model.n_layers=3"], ["has no model.blocks.2"]),
    "fewer layers": (["run.resume=true", "model.n_layers=1"], ["holds model.blocks.1", "no place"]),
    "another optimizer": (["run.resume=true", "optim.name=sgd"], ["holds optim.", "optim.name"]),
    "momentum that was not saved": (["run.resume=true", "optim.name=sgd", "optim.momentum=0.9"], ["optim.name"]),
    "no such checkpoint": (["run.resume=/nowhere", "run.dir=elsewhere"], ["run.resume=/nowhere", "does not exist"]),
    "resume and overwrite": (["run.resume=true", "run.overwrite=true"], ["resume", "overwrite"]),
    "a run is there": ([], ["already holds a run", "run.resume=true"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    write_numbers(folder / "text")
    assert run(folder, "train.max_steps=2").returncode == 0
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    """Without who wrote there, which every start notes."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.parent.name != ".shardkit"}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_does_not_fit_is_refused_in_two_lines(
    case: str, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, words = REFUSED[case]
    before = contents(finished / "run")
    extra = [o.replace("elsewhere", str(tmp_path / "new")) for o in overrides]
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a deterministic run sets it, for the whole process
    argv = [*arguments(finished, 0), "train.max_steps=4", *extra]
    with pytest.raises(ShardkitError) as caught, start(load_config(None, argv)) as job:  # as the command, here
        Trainer(job).fit()
    torch.use_deterministic_algorithms(False)
    user_error(subprocess.CompletedProcess(argv, report(caught.value), *capfd.readouterr()), *words)
    assert contents(finished / "run") == before, "a refused run leaves the directory as it was"


def test_another_run_starts_from_a_checkpoint(finished: Path, tmp_path: Path) -> None:
    checkpoint = finished / "run" / "checkpoints" / "step_00000001"
    run(finished, "train.max_steps=3", f"run.resume={checkpoint}", f"run.dir={tmp_path / 'other'}", code=0)
    assert [r["step"] for r in lines(tmp_path / "other" / "metrics.jsonl")] == [2, 3]
    assert lines(tmp_path / "other" / "metrics.jsonl")[0]["loss"] == losses(finished)[1]


def test_a_run_saves_by_time(fresh: Path) -> None:
    run(fresh, "checkpoint.every_steps=null", "checkpoint.every_minutes=0.00001", "checkpoint.keep_last=null", code=0)
    assert len(layout.checkpoints(fresh / "run" / "checkpoints")) == runs.STEPS


def test_saves_are_noted_with_what_they_cost(fresh: Path) -> None:
    run(fresh, "checkpoint.async_save=true", "train.max_steps=3", code=0)
    saves = lines(fresh / "run" / "logs" / "checkpoints.jsonl")
    assert [s["step"] for s in saves] == [1, 2, 3]
    for save in saves:
        assert save["error"] is None
        assert 0 < save["blocking_s"] <= save["total_s"]
        files = (fresh / "run" / "checkpoints").glob("step_*/rank_00000.bin")
        assert save["staging_bytes"] == pytest.approx(next(files).stat().st_size, rel=0.02)
    metrics = lines(fresh / "run" / "metrics.jsonl")
    assert [r.get("save_s", 0) > 0 for r in metrics] == [False, True, True], "what the save before a step took"
    assert metrics[1]["save_s"] >= saves[0]["blocking_s"]
    first_record, *_, last_record = lines(fresh / "run" / "memory.jsonl")
    assert first_record["ranks"][0]["host_mem"]["staging"] == 0
    assert last_record["ranks"][0]["host_mem"]["staging"] == saves[0]["staging_bytes"]


class Asked:
    """Validation data whose third sample on rank 1 comes with a signal to stop."""

    def __init__(self, data: Any, rank: int) -> None:
        self.data, self.rank, self.read = data, rank, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if self.rank == 1 and self.read == 3:
            os.kill(os.getpid(), signal.SIGUSR2)
        return self.data[index]


def stopped_while_evaluating(folder: str) -> tuple[int, str | None, int, bool]:
    """Steps done, signal, validation samples read, whether there was a validation loss."""
    settings = ["model.preset=debug", "train.seq_len=32", "train.micro_batch_size=1", "train.max_steps=5",
                "train.eval_every=2", "train.eval_samples=80", "run.device=cpu", "logging.tensorboard=false",
                "parallel.strategy=ddp", f"run.dir={folder}"]  # fmt: skip
    note_early()  # as train's entry does: the signal stays pending
    with start(load_config(None, settings)) as job:
        trainer = Trainer(job)
        (val_data,) = trainer.val_data.values()
        data = Asked(val_data, job.world.rank)
        trainer.loop.val_parts = {"": data}
        outcome = trainer.fit()
    return outcome.steps, outcome.stopped_by, data.read, outcome.val_loss is not None


def test_a_signal_during_an_evaluation_ends_it_on_every_rank_and_saves_that_step(tmp_path: Path) -> None:
    reports = run_ranks(2, "tests.checkpoint.test_resume:stopped_while_evaluating", folder=str(tmp_path))
    for steps, signal_name, read, has_val_loss in reports:
        assert (steps, signal_name, has_val_loss) == (2, "SIGUSR2", False)
        assert read <= 4
    assert layout.step_of(layout.checkpoints(tmp_path / "checkpoints")[0]) == 2


CPU = torch.device("cpu")


def draw() -> list[float]:
    # Gaussians too: Python and NumPy keep half of a pair back.
    return [
        random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(())),
        float(torch.nn.functional.dropout(torch.ones(64)).sum()),
    ]  # fmt: skip


def test_restored_generators_repeat_what_they_drew() -> None:
    draw()
    states = rng.capture(CPU)
    first = [draw(), draw()]
    rng.restore(states, CPU)
    assert [draw(), draw()] == first


def test_reseeding_depends_on_rank_and_step_and_repeats() -> None:
    seen = []
    for rank, step in ((0, 10), (1, 10), (0, 11), (0, 10)):
        rng.reseed(5, rank, step)
        seen.append(tuple(draw()))
    assert seen[0] == seen[3]
    assert len(set(seen)) == 3
