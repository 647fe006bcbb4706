"""The traced step's file: categories that add up and are right to the byte, moments in order, modules by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from shardkit.config.load import load_config
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.ranks import run_ranks
from tests.run import gradients

SIZES = ["model.preset=debug", "train.micro_batch_size=2", "train.seq_len=64", "train.eval_samples=0",
         "logging.tensorboard=false", "run.device=cpu", "train.max_steps=2", "memory.trace_step=2"]  # fmt: skip


def traced(folder: str, overrides: list[str]) -> None:
    with start(load_config(None, [*SIZES, f"run.dir={folder}", *overrides])) as job:
        Trainer(job).fit()


def found(folder: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / "trace" / f"rank{rank}.json").read_text())


N = 891_648  # parameters of the debug model


@pytest.mark.parametrize(
    ("strategy", "params", "optimizer"),
    [("ddp", 4 * N, 8 * N), ("fsdp", 2 * N, 4 * N), ("zero2", 4 * N, 4 * N)],
)
def test_state_is_exact_and_sums_to_the_peak(strategy: str, params: int, optimizer: int, tmp_path: Path) -> None:
    run_ranks(2, f"{__name__}:traced", folder=str(tmp_path), overrides=[f"parallel.strategy={strategy}"])
    for rank in range(2):
        step = found(tmp_path, rank)
        assert step["step"] == 2 and step["device"] == "cpu"
        peak = step["peak"]
        assert sum(peak["categories"].values()) == peak["bytes"]
        assert max(n_bytes for _, n_bytes in step["timeline"]) == peak["bytes"]
        assert peak["categories"]["optimizer"] == pytest.approx(optimizer, abs=1024)  # and a step count per parameter
        assert peak["categories"]["params"] == params
        assert step["phases"]["forward"]["categories"]["activations"] > 0  # backward may peak when they are gone


def test_a_later_step_has_the_same_memory(tmp_path: Path) -> None:
    """DDP makes its buckets in the second step and keeps them: a trace of the third did not see them in forward."""
    steps = {}
    for step in (2, 3):
        overrides = ["parallel.strategy=ddp", "parallel.bucket_mb=1", "train.max_steps=3", f"memory.trace_step={step}"]
        folder = tmp_path / str(step)
        run_ranks(2, f"{__name__}:traced", folder=str(folder), overrides=overrides)
        steps[step] = found(folder)
    for phase in ("forward", "backward", "update"):
        # A few numbers of the step's message may be alive or not: it travels beside the update.
        assert abs(steps[3]["phases"][phase]["bytes"] - steps[2]["phases"][phase]["bytes"]) <= 64
        assert steps[3]["phases"][phase]["categories"]["grads"] == 4 * N
    assert [one for one, _ in steps[3]["timeline"]] == sorted(one for one, _ in steps[3]["timeline"])


def test_activations_are_those_that_autograd_saved(tmp_path: Path) -> None:
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with start(load_config(None, [*SIZES, f"run.dir={tmp_path}", "parallel.strategy=single"])) as job:
        trainer = Trainer(job)
        state = set()
        forward_loss = trainer.loop.loss_fn

        def counted(model: Any, batch: Any) -> torch.Tensor:
            saved.clear()
            state.update(p.untyped_storage().data_ptr() for p in model.parameters())
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                return forward_loss(model, batch)

        trainer.loop.loss_fn = counted
        trainer.fit()
    independent = sum(n_bytes for address, n_bytes in saved.items() if address not in state)
    step = found(tmp_path)
    assert max(step["stack"]["activations"]) == pytest.approx(independent, rel=0.01)


def test_the_timeline_names_blocks_in_order_and_what_is_largest(tmp_path: Path) -> None:
    traced(str(tmp_path), ["parallel.strategy=single"])
    step = found(tmp_path)
    forward = [band["module"] for band in step["bands"] if band["phase"] == "forward" and band["module"]]
    blocks = [name for name in dict.fromkeys(forward) if name.startswith("blocks.")]
    assert blocks == [f"blocks.{n}" for n in range(4)]
    backward = [band["module"] for band in step["bands"] if band["phase"] == "backward" and band["module"]]
    assert [name for name in dict.fromkeys(backward) if name.startswith("blocks.")] == blocks[::-1]
    moments = [at for at, _ in step["timeline"]]
    assert moments == sorted(moments)
    for values in step["stack"].values():
        assert len(values) == len(moments)
    for index, (_, n_bytes) in enumerate(step["timeline"]):
        assert sum(values[index] for values in step["stack"].values()) == n_bytes
    largest = step["largest"]
    assert largest == sorted(largest, key=lambda one: -one["bytes"])
    assert all(one["shape"] is not None and one["category"] for one in largest)


WIDE = 4096
ROWS = 4


class WideTask(gradients.Task):
    """Samples that weigh more than all else; the model returns no view of them, and nobody keeps them for backward."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, "fine")

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def dataset(self, split: str) -> Any:
        return [(torch.ones(WIDE), torch.ones(WIDE)) for _ in range(2 * ROWS)] if split == "train" else None

    def loss(self, model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        features, labels = (part.sum() for part in batch)
        return (model(features.view(1, 1)) - labels).square().sum()


def test_the_data_of_a_step_count_from_its_beginning(tmp_path: Path) -> None:
    overrides = ["task.factory=tests.memory.tracing.test_traced_step:WideTask", f"train.micro_batch_size={ROWS}",
                 "parallel.strategy=single", "train.max_steps=2", "memory.trace_step=2", "run.device=cpu",
                 "logging.tensorboard=false", f"run.dir={tmp_path}"]  # fmt: skip
    with start(load_config(None, overrides)) as job:
        Trainer(job).fit()
    step = found(tmp_path)
    for phase in ("forward", "backward", "update"):
        assert step["phases"][phase]["categories"]["workspace"] >= 2 * 4 * ROWS * WIDE
    largest = [(tensor["shape"], tensor["bytes"], tensor["category"]) for tensor in step["largest"][:2]]
    assert largest == [([ROWS, WIDE], 4 * ROWS * WIDE, "workspace")] * 2


def test_losses_do_not_change(tmp_path: Path) -> None:
    losses = []
    for name, extra in (("traced", []), ("plain", ["memory.trace_step=null"])):
        traced(str(tmp_path / name), ["parallel.strategy=single", *extra])
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[0] == losses[1]
    assert not (tmp_path / "plain" / "trace").exists()
