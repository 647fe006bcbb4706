"""`shardkit.watch` around loops that know nothing of it: every rank's bytes, a run directory, a post-mortem."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardkit
from shardkit.errors import ConfigError
from shardkit.memory import read_jsonl
from shardkit.report.page import run_page
from shardkit.report.read import read_run
from tests.integrations.loops import NUMEL, SIZE, network, of_deepspeed, seen
from tests.ranks import run_ranks
from tests.zero_ops import leave_out_shm

STEP_COUNT = 4


def batches(steps: int, accum: int = 2) -> Iterator[tuple[torch.Tensor, bool]]:
    """Inputs, and whether the update follows."""
    for index in range(steps * accum):
        yield torch.ones(4, SIZE), (index + 1) % accum == 0


def torch_loop(model: nn.Module, optimizer: Any, steps: int, log: Callable[..., None] = lambda **_: None) -> None:
    for inputs, is_last in batches(steps):
        loss = model(inputs).pow(2).mean()
        loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            log(loss=loss)


def of_torch(folder: str, kind: str) -> dict[str, Any]:
    """A user's loop of DDP or FSDP2 under `watch`."""
    model = network()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with shardkit.watch(model, optimizer, run_dir=folder, every=2) as watching:
        torch_loop(model, optimizer, 5, watching.log)
    return seen(Path(folder))


def loops(kinds: list[str], folder: str) -> dict[str, Any]:
    return {
        kind: of_deepspeed(f"{folder}/{kind}", int(kind[-1]))
        if kind.startswith("zero")
        else of_torch(f"{folder}/{kind}", kind)
        for kind in kinds
    }


def bytes_of(params: int, master: int, grads: int, optimizer: int) -> dict[str, int]:
    return {"params": params, "master_params": master, "grads": grads, "optimizer": optimizer}


EXPECTED = {
    "ddp": bytes_of(4 * NUMEL, 0, 4 * NUMEL, 8 * NUMEL + 4 * STEP_COUNT),
    "fsdp": bytes_of(2 * NUMEL, 0, 2 * NUMEL, 4 * NUMEL + 4 * STEP_COUNT),
    # in bf16
    "zero1": bytes_of(2 * NUMEL, 2 * NUMEL, NUMEL, 4 * NUMEL + STEP_COUNT),
    "zero2": bytes_of(2 * NUMEL, 2 * NUMEL, NUMEL, 4 * NUMEL + STEP_COUNT),
    "zero3": bytes_of(NUMEL, 2 * NUMEL, NUMEL, 4 * NUMEL + STEP_COUNT),
}


def test_every_ranks_state_is_counted_to_the_byte_whatever_engine_the_loop_has(tmp_path: Path) -> None:
    found = run_ranks(2, "tests.integrations.test_watching:loops", kinds=list(EXPECTED), folder=str(tmp_path))[0]
    for kind, expected in EXPECTED.items():
        assert found[kind]["steps"] == [1, 2, 4, 5], kind
        assert found[kind]["ranks"] == [expected, expected], kind
        assert found[kind]["phases"] == [["backward", "forward", "update"]] * 2, kind
        run = read_run(tmp_path / kind)
        assert run.notes == [] and run.setting("parallel.strategy") == kind
        assert run.setting("precision.mode") == ("bf16" if kind.startswith("zero") else "fp32")
        assert (run.setting("train.micro_batch_size"), run.setting("train.grad_accum_steps")) == (4, 2)
        assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5]
        assert all(line["loss"] > 0 and line["lr"] == 1e-3 for line in run.metrics)


@pytest.mark.slow
def test_a_loop_of_accelerate_is_counted(tmp_path: Path) -> None:
    found = run_ranks(2, "tests.integrations.loops:of_accelerate", folder=str(tmp_path), engine="ddp")[0]
    assert found["ranks"] == [EXPECTED["ddp"]] * 2
    assert found["steps"] == [1, 2, 3] and len(found["losses"]) == 3
    assert read_run(tmp_path).setting("train.grad_accum_steps") == 2


def watched(tmp_path: Path, steps: int = 3, **settings: Any) -> Any:
    """A plain loop in this process, inside `watch`."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shardkit.watch(model, optimizer, run_dir=tmp_path / "run", tensorboard=False, **settings) as watching:
        torch_loop(model, optimizer, steps, watching.log)
    return watching


def test_the_report_of_a_watched_run_looks_like_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watching = watched(tmp_path, every=2)
    assert "peak" in watching.table() and watching.table() in capsys.readouterr().err
    page = run_page(read_run(tmp_path / "run"), tmp_path / "report.html")
    for section in ("summary", "training", "memory", "categories", "phases", "ranks", "config"):
        assert f'id="{section}"' in page, section
    assert "single" in page and "no step was recorded" not in page


def test_values_belong_to_the_step_whose_forward_began_last(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shardkit.watch(model, optimizer, run_dir=tmp_path, tensorboard=False) as watching:
        for index, (inputs, is_last) in enumerate(batches(2)):
            model(inputs).sum().backward()
            watching.log(micro=index)
            if is_last:
                optimizer.step()
                watching.log(loss=torch.tensor(float(index)), tokens=100)
                with torch.no_grad():
                    model(inputs)  # an evaluation
                watching.log(val_loss=-index)
        with pytest.raises(TypeError, match="log\\(\\) got note of type str"):
            watching.log(note="x")
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [first[k] for k in ("step", "micro", "loss", "val_loss", "tokens_total")] == [1, 1, 1, -1, 100]
    assert [second[k] for k in ("step", "micro", "loss", "val_loss", "tokens_total")] == [2, 3, 3, -3, 200]
    assert second["tokens_per_s"] == pytest.approx(100 / second["step_time_s"])


def run_out(folder: Path, cap: str, model: nn.Module, *batches: torch.Tensor) -> tuple[Any, Any]:
    """The error of a loop over these batches, and its post-mortem."""
    optimizer = torch.optim.AdamW(model.parameters())

    def run() -> None:
        with shardkit.watch(model, optimizer, run_dir=folder, cap=cap, tensorboard=False):
            for batch in batches:
                model(batch).sum().backward()
                optimizer.step()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        run()
    return caught.value, json.loads((folder / "oom" / "rank0.json").read_text())


def test_memory_that_runs_out_is_explained(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU()) for _ in range(4)))
    error, found = run_out(tmp_path, "1MiB", model, *(torch.ones(rows, SIZE) for rows in (4, 4, 2048)))
    assert (found["phase"], found["step"], found["gaps"]) == ("forward", 3, [])
    assert found["row"]["state"]["optimizer"]["device"] > 0
    changes = [one["change"] for one in found["advice"]]
    assert "train.micro_batch_size=1024 train.grad_accum_steps=2" in changes
    assert "activation.policy=full" in changes
    if sys.version_info >= (3, 11):
        cause, fix = error.__notes__[-1].split("\n")
        assert (
            cause.startswith("shardkit: rank 0 ran out of memory in forward of step 3 (") and "memory.cap=1MiB" in cause
        )
        assert fix.startswith("  fix: set ") and f"see {tmp_path}/oom/rank0.json" in fix
    with torch.no_grad():
        model(torch.ones(4096, SIZE))  # neither hooks nor cap are left


def runs_out_under_zero3(folder: str) -> Any:
    """The post-mortem of a DeepSpeed engine whose batch is too large."""
    import deepspeed

    leave_out_shm()
    settings = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3, "reduce_bucket_size": 100_000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    own = network()
    engine, *_ = deepspeed.initialize(
        model=own, model_parameters=own.parameters(), config=settings, dist_init_required=False
    )
    try:
        with shardkit.watch(engine, run_dir=folder, cap="4MiB", tensorboard=False):
            for rows in (4, 4, 8192):
                engine.backward(engine(torch.ones(rows, SIZE)).sum())
                engine.step()
    except torch.OutOfMemoryError:
        return json.loads((Path(folder) / "oom" / "rank0.json").read_text())
    finally:
        engine.destroy()


def test_memory_that_runs_out_under_zero3_is_explained(tmp_path: Path) -> None:
    (found,) = run_ranks(1, "tests.integrations.test_watching:runs_out_under_zero3", folder=str(tmp_path))
    assert (found["step"], found["gaps"]) == (3, [])
    assert any(one["change"].startswith("train.micro_batch_size=") for one in found["advice"]), found["advice"]


def test_long_sequences_are_described_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Embedding(32, SIZE), nn.Linear(SIZE, 32))
    _, found = run_out(tmp_path, "8MiB", model, *(torch.zeros(rows, 2048, dtype=torch.long) for rows in (1, 1, 64)))
    assert read_run(tmp_path).setting("train.seq_len") == 2048
    assert "is not complete" not in capsys.readouterr().err
    changes = [one["change"] for one in found["advice"]]
    assert found["gaps"] == [] and any("train.micro_batch_size=32 " in change for change in changes), changes


def test_other_errors_pass_and_nothing_is_left(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(RuntimeError, match="shapes"),
        shardkit.watch(model, optimizer, run_dir=tmp_path, tensorboard=False) as watching,
    ):
        model(torch.ones(1, 3))
    assert not (tmp_path / "oom").exists()
    before = (tmp_path / "config.yaml").read_text()
    torch_loop(model, optimizer, 1)
    assert not (tmp_path / "metrics.jsonl").exists() and (tmp_path / "config.yaml").read_text() == before
    assert watching.rows == []


def test_a_directory_with_a_run_is_refused_or_continued(tmp_path: Path) -> None:
    watched(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run") as refused:
        watched(tmp_path)
    assert "run_dir=" in refused.value.cause and "resume=True" in refused.value.fix and "run." not in refused.value.fix
    watched(tmp_path, resume=True)
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()] == [1, 2, 3, 4, 5, 6]
    watched(tmp_path, resume=True, done=4)
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optimizer": None}, "watch() got no optimizer"),
        ({"optimizer": 3}, "watch() got a int where an optimizer belongs"),
        ({"every": 0}, "every=0"),
        ({"files": ["accelerate.yaml"]}, "no longer takes files"),
        ({"cap": "much"}, "memory.cap"),
    ],
)
def test_what_cannot_work_is_said_in_two_lines(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = network()
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "run_dir": tmp_path / "run", **arguments}
    with pytest.raises(ConfigError) as refused, shardkit.watch(model, **given):
        pass
    assert said in refused.value.cause and refused.value.fix
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_ranks_without_a_group_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        watched(tmp_path)


def test_a_step_with_a_closure_has_its_phases(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(4, SIZE)).sum()
        loss.backward()
        return loss

    with shardkit.watch(model, optimizer, run_dir=tmp_path, tensorboard=False) as watching:
        optimizer.step(closure)
        optimizer.step(closure=closure)
    (row,) = watching.rows
    assert set(row.phases) == {"forward", "backward", "update"}
    assert row.state is not None and row.state["grads"].device == 4 * NUMEL


def half_fails(folder: str) -> str:
    """Rank 1 fails and goes on; rank 0 must end without it."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with shardkit.watch(model, optimizer, run_dir=folder, tensorboard=False):
            torch_loop(model, optimizer, 3)
            if dist.get_rank() == 1:
                raise ValueError("only here")
    except ValueError as error:
        return str(error)
    return "ended"


def test_a_rank_that_fails_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    assert run_ranks(2, "tests.integrations.test_watching:half_fails", folder=str(tmp_path)) == ["ended", "only here"]
    assert [step for step, _ in read_jsonl(tmp_path / "memory.jsonl")] == [1, 2]
