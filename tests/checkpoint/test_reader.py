"""Any range of any tensor comes back as it was written, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.checkpoint.native import reader as reader_module
from shardkit.checkpoint.native.manifest import BLOCK_BYTES, CorruptCheckpoint, RunState
from shardkit.checkpoint.native.reader import CheckpointReader
from shardkit.checkpoint.save import Checkpointer
from shardkit.config.schema import CheckpointConfig
from shardkit.errors import CheckpointError
from tests.checkpoint import fakes


@pytest.fixture
def whole(saved: Path) -> fakes.Plain:
    plain = fakes.Plain()
    plain.fill(3)
    return plain


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_range_is_what_was_written(saved: Path, whole: fakes.Plain, data: st.DataObject) -> None:
    with CheckpointReader(saved / "step_00000003") as checkpoint:
        name = data.draw(st.sampled_from(list(whole.wholes)))
        numel = whole.wholes[name].numel()
        start = data.draw(st.integers(0, numel))
        length = data.draw(st.integers(0, numel - start))
        assert torch.equal(checkpoint.read(name, start, length), whole.wholes[name][start : start + length])


@pytest.fixture
def large(tmp_path: Path, alone: None) -> tuple[Path, torch.Tensor]:
    """A checkpoint with a tensor of one chunk and eight blocks, of which the last is short, and the tensor."""
    plain = fakes.Plain(n_elements=8 * BLOCK_BYTES // 4 - 5)
    plain.wholes["model.0"].copy_(torch.arange(plain.wholes["model.0"].numel()))
    checkpoints = Checkpointer(plain, fakes.world(), CheckpointConfig(), tmp_path)
    checkpoints.save(RunState(step=1))
    checkpoints.close()
    return tmp_path / "step_00000001", plain.wholes["model.0"]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every read."""
    read: list[int] = []
    real = reader_module.os.preadv
    monkeypatch.setattr(reader_module.os, "preadv", lambda fd, to, at: read.append(real(fd, to, at)) or read[-1])
    return read


def test_a_part_of_a_chunk_costs_no_more_than_its_blocks(large: tuple[Path, torch.Tensor], counted: list[int]) -> None:
    with CheckpointReader(large[0]) as checkpoint:
        checkpoint.read("model.0", 1000, 300_000)
    assert 4 * 300_000 <= sum(counted) <= 4 * 300_000 + 2 * BLOCK_BYTES


def test_whole_blocks_are_read_together(large: tuple[Path, torch.Tensor], counted: list[int]) -> None:
    with CheckpointReader(large[0]) as checkpoint:
        assert torch.equal(checkpoint.read("model.0"), large[1])
    assert counted == [8 * BLOCK_BYTES - 20], "block by block, a large checkpoint would take longer"


@pytest.mark.parametrize("most", [BLOCK_BYTES // 3, 2 * BLOCK_BYTES])
def test_a_range_over_blocks_is_right_although_the_system_gives_less_than_was_asked_for(
    most: int, large: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = large
    real = reader_module.os.preadv
    monkeypatch.setattr(reader_module.os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:most]], at))
    block = BLOCK_BYTES // 4  # elements
    with CheckpointReader(path) as checkpoint:
        for start, length in ((block, 3 * block), (block + 7, 4 * block), (3 * block - 5, 10)):
            assert torch.equal(checkpoint.read("model.0", start, length), whole[start : start + length])


@pytest.mark.parametrize("args", [(-1, 2), (0, 50_001), (50_000, 1)])
def test_a_range_outside_the_tensor_is_refused(saved: Path, args: tuple[int, int]) -> None:
    with CheckpointReader(saved / "step_00000003") as checkpoint, pytest.raises(ValueError, match=r"model\.0"):
        checkpoint.read("model.0", *args)


def test_an_unknown_tensor_is_named(saved: Path) -> None:
    with CheckpointReader(saved / "step_00000003") as checkpoint, pytest.raises(CheckpointError, match=r"model\.nope"):
        checkpoint.read("model.nope")


def test_a_link_in_place_of_a_data_file_is_not_followed(saved: Path, tmp_path: Path) -> None:
    data = saved / "step_00000003" / "rank_00000.bin"
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with CheckpointReader(saved / "step_00000003") as checkpoint, pytest.raises(CorruptCheckpoint):
        checkpoint.read("model.0")


def test_a_missing_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
        CheckpointReader(tmp_path)
