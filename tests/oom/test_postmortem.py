"""The post-mortem holds what a person needs, is written before the error goes on, and never hides it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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
from shardkit.oom.postmortem import Live, PostMortem, biggest, snapshot_blocks
from shardkit.oom.shortage import Made, Shortage
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


CPU = torch.device("cpu")
BIG = 3_000_000


def biggest_of_these(sizes: set[int], **known: Any) -> list[Live]:
    """The largest tensors of these sizes: those that other tests have left behind may be larger."""
    return [live for live in biggest(sys.maxsize, CPU, **known) if live.n_bytes in sizes]


def test_a_storage_counts_once_with_its_largest_view_and_its_name() -> None:
    model = nn.Linear(BIG, 4, bias=False)
    model.weight.grad = torch.zeros(4, BIG)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    shards = [SimpleNamespace(name="model.weight", local=model.weight.detach().view(-1))]
    activation = torch.zeros(2, BIG, dtype=torch.bfloat16)
    view = activation[:1]
    found = biggest_of_these({16 * BIG, 4 * BIG}, state=module_state(model, optimizer), shards=shards)
    assert [live.n_bytes for live in found] == [16 * BIG, 16 * BIG, 4 * BIG]
    assert {live.category for live in found[:2]} == {"params", "grads"}
    weight = next(live for live in found if live.category == "params")
    assert weight.name == "model.weight" and weight.shape in ((4, BIG), (4 * BIG,)) and weight.dtype == "torch.float32"
    assert found[2].to_json() == {
        "bytes": 4 * BIG, "shape": (2, BIG), "dtype": "torch.bfloat16", "category": None, "name": None, "made": None
    }  # fmt: skip
    del view


def test_what_only_an_allocator_or_a_cap_knows_is_listed_too() -> None:
    made = [Made(64 * BIG, 111, (8, 8), "torch.float32", "aten.mm at a.py:1 in f")]
    blocks = {222: (32 * BIG, "b.py:2 in g"), 111: (64 * BIG, None)}
    found = biggest_of_these({64 * BIG, 32 * BIG}, made=made, blocks=blocks)
    assert [(live.n_bytes, live.shape, live.made) for live in found] == [
        (64 * BIG, (8, 8), "aten.mm at a.py:1 in f"), (32 * BIG, None, "b.py:2 in g")
    ]  # fmt: skip


def test_fake_and_meta_tensors_hold_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(BIG, 100)
    meta = torch.zeros(BIG, 100, device="meta")
    found = biggest(5, CPU)
    assert len(found) <= 5 and all(live.n_bytes < 400 * BIG for live in found)
    del fake, meta


def test_blocks_in_use_of_one_device() -> None:
    frames = [
        {"filename": "/x/torch/nn/functional.py", "line": 5, "name": "linear"},
        {"filename": "/home/me/model.py", "line": 7, "name": "forward"},
    ]
    snapshot = {
        "segments": [
            {"device": 0, "blocks": [
                {"address": 10, "size": 512, "state": "active_allocated", "frames": frames},
                {"address": 11, "size": 99, "state": "inactive", "frames": []},
                {"address": 12, "size": 1024, "state": "active_pending_free", "frames": []},
            ]},
            {"device": 1, "blocks": [{"address": 20, "size": 7, "state": "active_allocated", "frames": []}]},
        ]
    }  # fmt: skip
    assert snapshot_blocks(snapshot, 0) == {10: (512, "/home/me/model.py:7 in forward"), 12: (1024, None)}
    assert set(snapshot_blocks(snapshot, None)) == {10, 12, 20}
    assert snapshot_blocks(None, 0) == {}
