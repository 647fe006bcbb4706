"""The file that Python loads at its start runs the one that it hides, and does nothing without a rehearsal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardkit.rehearse.build import INJECT
from tests.rehearse import injected


def test_the_hidden_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.flag_of_mine = __name__\n")
    env = {**os.environ, "PYTHONPATH": f"{INJECT}{os.pathsep}{tmp_path}"}
    env.pop("SHARDKIT_REHEARSAL", None)
    code = "import sys; print(sys.flag_of_mine, 'shardkit_rehearsal' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sitecustomize", "False", "False"]
    assert not done.stderr


def test_an_exception_is_recorded_and_printed_as_before(tmp_path: Path) -> None:
    (tmp_path / "emucuda.py").write_text("def preload(): pass\n")
    program = tmp_path / "train.py"
    program.write_text("def train():\n    raise ValueError('bad batch')\n\n\ntrain()\n")
    (tmp_path / "records").mkdir()
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{INJECT}", "RANK": "1", "WORLD_SIZE": "2"}
    env.update(SHARDKIT_REHEARSAL=str(tmp_path / "records"), SHARDKIT_REHEARSAL_STEPS="3")
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: bad batch" in done.stderr
    from shardkit.rehearse.verdict import first_error, read_records

    error = first_error(read_records(tmp_path / "records"))
    assert error is not None and error["rank"] == 1
    assert error["end"]["type"] == "ValueError"
    assert error["end"]["where"] == f"{program}:2: raise ValueError('bad batch')"


def test_a_rank_ends_after_a_step_more_than_the_first_that_saved(tmp_path: Path) -> None:
    """A save is there for all ranks as soon as one has made it, while another may still be in the step before."""
    saving, late = (injected("shardkit_rehearsal").Recording(str(tmp_path), 3, until="save") for _ in range(2))
    saving.steps = 1
    assert not saving.is_past("save")
    saving.note("save", saving.steps)
    late.steps = 1
    assert not saving.is_past("save") and not late.is_past("save")
    late.note("save", 2)
    saving.steps = late.steps = 2
    assert saving.is_past("save") and late.is_past("save")


def test_a_tensor_that_nobody_computed_is_printed_without_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor, indent: int) -> str:
        raise RuntimeError(f"emucuda: aten::masked_select {refusal}")

    monkeypatch.setattr(torch._tensor_str, "_tensor_str", refuse)
    assumed = injected("shardkit_assumed").Assumed()
    assumed.let_print(torch)
    refusal = "reads values that were not computed"
    assert repr(torch.ones(2, dtype=torch.bfloat16)) == "tensor(..., dtype=torch.bfloat16)"
    (row,) = assumed.as_json()
    assert (row["assumption"], row["count"]) == ("printed", 1)
    assert row["source_line"].startswith(__file__) and "repr(torch.ones" in row["source_line"]
    refusal = "is not emulated"
    with pytest.raises(RuntimeError, match="is not emulated"):
        repr(torch.ones(2))


def test_dtensor_propagates_flags_of_strided_shards_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of an operator's tensors is walked once, and torch's own function runs where a shard has strides."""
    from torch.distributed.tensor import Replicate, Shard, _sharding_prop
    from torch.distributed.tensor.placement_types import _StridedShard

    walks, propagated = [], []

    class Schema:
        def __init__(self, *placements: Any) -> None:
            self._specs = [SimpleNamespace(placements=placements)]

        @property
        def args_spec(self) -> list[Any]:
            walks.append(self)
            return self._specs

    def propagate(op_strategy: Any, op_schema: Any) -> None:
        propagated.append((op_strategy, op_schema))

    monkeypatch.setattr(_sharding_prop, "_propagate_use_strided_shard_flag", propagate)
    for _ in range(2):
        injected("shardkit_sharding").look_once()
    plain, strided = Schema(Replicate(), Shard(0)), Schema(Shard(0), _StridedShard(0, split_factor=2))
    for schema in (plain, strided, plain):
        for member in range(3):
            _sharding_prop._propagate_use_strided_shard_flag(member, schema)
    assert walks == [plain, strided, plain]
    assert propagated == [(member, strided) for member in range(3)]
