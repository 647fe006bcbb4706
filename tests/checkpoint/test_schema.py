"""Checkpoints made by earlier versions stay loadable: one of each schema is kept in `recorded/`.

To record the current schema, before it changes: call `record` on two ranks with `recorded/schema_<n>`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from shardkit.checkpoint import manage
from shardkit.checkpoint.native import manifest
from shardkit.checkpoint.native.manifest import RunState
from shardkit.errors import CheckpointError
from tests.checkpoint import fakes

RECORDED = Path(__file__).parent / "recorded"
ELEMENTS, STEP = 100, 2


def record(root: str) -> None:
    """Save the checkpoint that is kept."""
    strategy = fakes.Plain(dist.get_rank(), dist.get_world_size(), ELEMENTS)
    strategy.fill(STEP)
    checkpoints = fakes.checkpointer(root, strategy)
    checkpoints.save(RunState(STEP, 2000, 5, 1, 48, 1000, 2.5, {"shuffle": True}))
    checkpoints.close()


@pytest.mark.parametrize("schema", manifest.READABLE)
def test_a_recorded_checkpoint_loads(schema: int, alone: None, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(RECORDED / f"schema_{schema}", root)
    assert manage.verify(root / "step_00000002") == []
    strategy = fakes.Plain(n_elements=ELEMENTS)
    checkpoints = fakes.checkpointer(root, strategy)
    found = checkpoints.resume(root)
    checkpoints.close()
    assert found[1] == RunState(STEP, 2000, 5, 1, 48, 1000, 2.5, {"shuffle": True})
    assert strategy.holds(STEP)


def test_a_later_schema_is_refused_by_name_and_left_alone(alone: None, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(RECORDED / f"schema_{manifest.SCHEMA}", root)
    shutil.copytree(root / "step_00000002", root / "step_00000003")
    file = root / "step_00000003" / manifest.FILE_NAME
    body = json.loads(file.read_bytes())["manifest"]
    text = manifest._canonical({**body, "schema": manifest.SCHEMA + 1, "versions": {"shardkit": "9.1"}})
    file.write_text(f'{{"digest":"{manifest._digest(text)}","manifest":{text}}}')
    checkpoints = fakes.checkpointer(root, fakes.Plain(n_elements=ELEMENTS))
    with pytest.raises(CheckpointError, match=f"has schema {manifest.SCHEMA + 1}, this version reads") as caught:
        checkpoints.resume(root)
    checkpoints.close()
    assert "use shardkit 9.1" in caught.value.fix
    assert (root / "step_00000003").is_dir(), "the checkpoint before it is no replacement for one that is intact"


def test_the_current_schema_is_recorded() -> None:
    assert max(manifest.READABLE) == manifest.SCHEMA
    assert (RECORDED / f"schema_{manifest.SCHEMA}").is_dir()
