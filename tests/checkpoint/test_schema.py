"""A checkpoint of a later version is refused; those of earlier versions are in `tests/recorded`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardkit.checkpoint.native import manifest
from shardkit.errors import CheckpointError
from tests.checkpoint import fakes


def test_a_later_schema_is_refused_by_name_and_left_alone(saved: Path) -> None:
    file = saved / "step_00000003" / manifest.FILE_NAME
    body = json.loads(file.read_bytes())["manifest"]
    text = manifest._canonical({**body, "schema": manifest.SCHEMA + 1, "versions": {"shardkit": "9.1"}})
    file.write_text(f'{{"digest":"{manifest._digest(text)}","manifest":{text}}}')
    checkpoints = fakes.checkpointer(saved, fakes.Plain())
    with pytest.raises(CheckpointError, match=f"has schema {manifest.SCHEMA + 1}, this version reads") as caught:
        checkpoints.resume(saved)
    checkpoints.close()
    assert "use shardkit 9.1" in caught.value.fix
    assert file.parent.is_dir(), "the checkpoint before it is no replacement for one that is intact"
