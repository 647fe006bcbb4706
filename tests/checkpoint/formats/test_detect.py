"""What other tools' folders hold: ranges of tensors, kinds of files, missing parts, several steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardkit.checkpoint.formats.detect import open_source
from shardkit.checkpoint.formats.tensor_source import Source
from shardkit.errors import CheckpointError
from tests.checkpoint.formats import foreign


def whole(source: Source, name: str) -> torch.Tensor:
    info = source.tensors[name]
    return torch.cat([*source.pieces(name), torch.empty(0, dtype=info.dtype)]).view(info.shape)


@pytest.mark.parametrize("case", ["zero2-fp32", "zero3-bf16", "dcp"])
def test_any_range_is_the_same_as_from_the_whole(case: str, foreign_root: Path) -> None:
    source = open_source(foreign_root / case)
    full = whole(source, "model.embed.weight").view(-1)
    for start, length in [(0, 1), (7, 40), (30, 48), (77, 1), (38, 3)]:
        out = torch.empty(length)
        source.read_into("model.embed.weight", start, out)
        assert torch.equal(out, full[start : start + length])
    source.close()


@pytest.mark.parametrize("name", ["rows", "columns", "layers"])
def test_dcp_tensors_cut_along_any_axis(name: str, foreign_root: Path) -> None:
    """Tensor parallelism cuts along other axes than the first: the runs of a rank's part lie apart in the whole."""
    source = open_source(foreign_root / "dcp-axes")
    full = foreign.cube()
    assert torch.equal(whole(source, f"model.{name}"), full)
    for start, length in [(0, 240), (3, 100), (59, 2), (125, 61), (239, 1)]:
        out = torch.empty(length)
        source.read_into(f"model.{name}", start, out)
        assert torch.equal(out, full.view(-1)[start : start + length])
    source.close()


def test_other_kinds_of_weights(tmp_path: Path) -> None:
    tensors = {
        "module.a.weight": torch.randn(7, 5).to(torch.bfloat16),
        "module.norm.running_mean": torch.randn(5),
        "module.norm.num_batches_tracked": torch.tensor(9),
        "module._orig_mod.b": torch.randn(3, dtype=torch.float64),
        "module.empty": torch.empty(0, 4),
        "module.f8": torch.randn(6).to(torch.float8_e4m3fn),
    }
    names = {
        "model.a.weight": "module.a.weight", "buffer.norm.running_mean": "module.norm.running_mean",
        "buffer.norm.num_batches_tracked": "module.norm.num_batches_tracked", "model.b": "module._orig_mod.b",
        "model.empty": "module.empty", "model.f8": "module.f8",
    }  # fmt: skip
    save_file(tensors, tmp_path / "x.safetensors")
    torch.save(tensors, tmp_path / "x.pt")
    torch.save({"state_dict": tensors, "optimizer": {"lr": 0.1}, "epoch": 3}, tmp_path / "y.ckpt")
    for file in ("x.safetensors", "x.pt", "y.ckpt"):
        source = open_source(tmp_path / file)
        assert set(source.tensors) == set(names)
        for name, key in names.items():
            found = whole(source, name)
            assert found.dtype == tensors[key].dtype
            assert torch.equal(found.float(), tensors[key].float()), (file, name)
    assert source.notes == ["left out: optimizer, epoch of y.ckpt"]


def test_weights_that_share_storage_are_tied_only_if_they_are_the_same(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    torch.save({"a": base, "b": base, "part": base[2:4], "p": torch.nn.Parameter(base)}, tmp_path / "m.pt")
    source = open_source(tmp_path / "m.pt")
    assert source.ties == {"b": "a", "p": "a"}
    assert torch.equal(whole(source, "model.part"), base[2:4])


@pytest.mark.parametrize(
    ("case", "gone"),
    [
        ("zero1-bf16", "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero3-bf16", "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("dcp", "__1_0.distcp"),
    ],
)
def test_a_rank_whose_file_is_missing(case: str, gone: str, foreign_root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(foreign_root / case, tmp_path / "copy")
    (folder / gone).unlink()
    with pytest.raises(CheckpointError) as caught:
        open_source(folder)
    assert caught.value.fix and "\n" not in caught.value.cause


def test_a_step_of_several(tmp_path: Path, plain_file: Path) -> None:
    for step in (5, 20):
        folder = tmp_path / "run" / f"global_step{step}"
        folder.mkdir(parents=True)
        content = {"module": {"w": torch.full((2,), float(step))}, "global_steps": step, "buffer_names": []}
        torch.save(content, folder / "mp_rank_00_model_states.pt")
    (tmp_path / "run" / "latest").write_text("global_step20")
    assert open_source(tmp_path / "run").step == 20
    assert open_source(tmp_path / "run", step="5").step == 5
    with pytest.raises(CheckpointError, match="no checkpoint global_step7"):
        open_source(tmp_path / "run", step="7")
    with pytest.raises(CheckpointError, match="does not hold several checkpoints"):
        open_source(plain_file.parent.parent, step="7")
