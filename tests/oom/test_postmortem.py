"""The post-mortem holds what a person needs, is written before the error goes on, and never hides it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.config.load import load_config
from shardkit.errors import OutOfMemoryError
from shardkit.memory import MemoryLedger
from shardkit.memory.probe import module_state
from shardkit.oom import postmortem, shortage
from shardkit.oom.postmortem import PostMortem
from shardkit.oom.shortage import Shortage
from shardkit.run.trainer import Trainer
from tests.oom.test_shortage import GIB, MESSAGE, MIB


class Plain:
    """A strategy as a post-mortem sees one."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def state_tensors(self) -> Iterator[Any]:
        return module_state(self.model)

    def shards(self) -> Iterator[Any]:
        raise KeyError("shards are being moved")


def post_mortem(run_dir: Path, *overrides: str) -> PostMortem:
    config = load_config(overrides=["parallel.strategy=single", f"run.dir={run_dir}", *overrides]).config
    return PostMortem(config, MemoryLedger("cpu"), Plain())


def test_a_cuda_error_becomes_a_file_and_two_lines(tmp_path: Path) -> None:
    explained = post_mortem(tmp_path).explain(torch.OutOfMemoryError(MESSAGE))
    assert explained is not None and explained.exit_code == 3
    assert "rank 0 ran out of memory before the first step: it asked for 1.50 GiB" in explained.cause
    assert "8.00 GiB held in pieces" in explained.cause, "fragmentation would have been enough"
    assert f"see {tmp_path}/oom/rank0.json" in explained.fix and "\n" not in explained.cause + explained.fix
    found = json.loads((tmp_path / "oom/rank0.json").read_text())
    assert (found["schema"], found["kind"], found["rank"], found["request"]) == (1, "device", 0, 3 * GIB // 2)
    assert found["memory"]["fragmentation"] == 8 * GIB and not found["memory"]["exact"]
    assert found["row"]["state"]["params"]["device"] == 2 * (64 * 64 + 64) * 4
    assert found["message"] == MESSAGE and found["snapshot"] is None
    assert found["gaps"] == ["names: KeyError: 'shards are being moved'"], "what is not known is said"
    assert [path.name for path in (tmp_path / "oom").iterdir()] == ["rank0.json"]


def test_the_allocators_snapshot_lies_beside_it(tmp_path: Path) -> None:
    import pickle

    error = torch.OutOfMemoryError(MESSAGE)
    snapshot = {"segments": [{"device": 0, "blocks": []}]}
    error.shortage = Shortage("device", 5, 100, 1, 90, 95, snapshot=snapshot)
    assert post_mortem(tmp_path).explain(error) is not None
    found = json.loads((tmp_path / "oom/rank0.json").read_text())
    assert pickle.loads((tmp_path / "oom" / found["snapshot"]).read_bytes()) == snapshot


def test_a_directory_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    (tmp_path / "oom").write_text("a file")
    explained = post_mortem(tmp_path).explain(torch.OutOfMemoryError(MESSAGE))
    assert explained is not None and "could not be written: " in explained.fix


def test_a_cap_on_a_gpu_is_what_was_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkit.memory.rows import DeviceMemory

    mortem = post_mortem(tmp_path, "memory.cap=2GiB")
    row = mortem._ledger.row()
    object.__setattr__(row, "device_mem", DeviceMemory(GIB, GIB, 3 * GIB // 2, 3 * GIB // 2, 80 * GIB))
    monkeypatch.setattr(mortem._ledger, "row", lambda: row)
    monkeypatch.setattr(shortage._Observer, "_latest", None)
    explained = mortem.explain(RuntimeError("CUDA error: out of memory"))
    assert "more than there was of memory.cap=2GiB, 0.50 GiB were free" in explained.cause
    assert json.loads(mortem.path.read_text())["memory"]["allocated"] == GIB


def test_who_may_be_killed_leaves_word_first(tmp_path: Path) -> None:
    mortem = post_mortem(tmp_path)
    mortem.at_risk(mortem._ledger.row())
    found = json.loads(mortem.path.read_text())
    assert found["kind"] == "host-risk" and found["request"] is None
    used = found["memory"]["limit"] - found["memory"]["free"]
    assert used == found["row"]["host_mem"]["in_use"]


def test_a_loop_of_ones_own_runs_out_in_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postmortem, "TENSORS", sys.maxsize)  # tests before this one may have left larger tensors
    overrides = ["parallel.strategy=single", f"run.dir={tmp_path}", "run.device=cpu", "memory.cap=8MiB"]
    calls: list[int] = []

    def takes_memory(grad: torch.Tensor) -> None:
        torch.empty(8 * MIB, dtype=torch.uint8)

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        out = model(batch)
        if len(calls) == 2:
            out.register_hook(takes_memory)
        return torch.as_tensor(out.square().sum())

    def train() -> None:
        with shardkit.start(None, overrides) as job:
            job.wrap(nn.Sequential(*(nn.Linear(128, 128) for _ in range(3))))
            for _ in range(3):
                job.step([torch.ones(8, 128)], loss_fn, len)

    with pytest.raises(OutOfMemoryError, match="in backward of step 2") as caught:
        train()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    found = json.loads((tmp_path / "oom/rank0.json").read_text())
    assert (found["kind"], found["phase"], found["step"], found["module"]) == ("cap", "backward", 2, None)
    assert found["request"] == 8 * MIB and found["gaps"] == []
    assert {"params", "optimizer"} <= {tensor["category"] for tensor in found["tensors"]}
    assert "model.0.weight" in {tensor["name"] for tensor in found["tensors"]}


def test_while_all_goes_well_nothing_is_watched(tmp_path: Path) -> None:
    overrides = ["parallel.strategy=single", f"run.dir={tmp_path}", "run.device=cpu"]
    with shardkit.start(None, overrides) as job:
        model = job.wrap(nn.Linear(4, 4))
        assert torch._C._len_torch_dispatch_stack() == 0, "no operator is counted"
        hooks = [module._forward_pre_hooks or module._forward_hooks for module in model.modules()]
        assert not any(hooks) and not nn.modules.module._global_forward_hooks
        assert sys.gettrace() is None and sys.getprofile() is None


@pytest.mark.release
def test_what_is_advised_would_have_fitted(tmp_path: Path) -> None:
    """The reference transformer at two thirds of its peak: each change said to be enough is enough."""

    def train(name: str, *changes: str) -> Path:
        run_dir = tmp_path / name
        overrides = [
            f"run.dir={run_dir}", "run.device=cpu", "parallel.strategy=single", "model.preset=debug",
            "model.n_layers=12", "model.d_model=128", "train.micro_batch_size=16", "train.max_steps=2",
            "train.eval_samples=0", "logging.tensorboard=false", "checkpoint.at_end=false", "memory.cap=280MiB",
            "memory.plan=true",
        ]  # fmt: skip
        with shardkit.start(None, [*overrides, *changes]) as job:
            Trainer(job).fit()
        return run_dir

    with pytest.raises(OutOfMemoryError, match="in forward of step 1"):
        train("first")
    found = json.loads((tmp_path / "first/oom/rank0.json").read_text())
    tried = [one["change"] for one in found["advice"] if one.get("verdict") == "fits"]
    assert tried, found["advice"]
    for number, change in enumerate(tried):
        train(str(number), *change.split(" "))
