"""Other tools' folders become checkpoints that a run resumes; weights become where a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.checkpoint.formats.convert import convert
from shardkit.checkpoint.manage import verify
from shardkit.checkpoint.native.reader import CheckpointReader
from shardkit.config.load import load_config
from shardkit.errors import CheckpointError, ConfigError
from tests.checkpoint.formats import foreign, runs
from tests.ranks import run_ranks
from tests.strategies.cases import on_cpus

RESUMED: list[tuple[str, dict[str, Any]]] = [
    ("zero2-fp32", {"parallel.strategy": "fsdp"}),
    ("zero3-bf16", {"parallel.strategy": "zero1", "precision.mode": "bf16"}),
    ("dcp", on_cpus("zero3")),
    ("dcp-flat", {"parallel.strategy": "ddp"}),
]


def check_bits(folder: Path, out: Path) -> None:
    """Masters, moments, frozen weights and buffers of a folder are those that were in memory."""
    converted = convert(folder, "shardkit", out)
    truth = torch.load(folder / "truth.pt", weights_only=True)
    assert converted.n_tensors == len(truth) and sum(name.startswith("optim.") for name in truth) == 10
    assert verify(out) == []
    with CheckpointReader(out) as checkpoint:
        assert set(checkpoint.tensors()) == set(truth)
        for name, expected in truth.items():
            tensor = checkpoint.read(name).view(expected.shape)
            assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name
        assert checkpoint.manifest.run.step == 3
        assert checkpoint.manifest.scalars == {
            f"{name.removesuffix('.exp_avg')}.step": 3 for name in truth if name.endswith(".exp_avg")
        }


@pytest.mark.parametrize("case", foreign.CASES)
def test_masters_and_moments_are_kept_to_the_bit(case: str, foreign_root: Path, tmp_path: Path) -> None:
    check_bits(foreign_root / case, tmp_path / "out")


def test_a_run_resumes_from_them_under_other_strategies(foreign_root: Path, tmp_path: Path) -> None:
    pairs = []
    for case, settings in RESUMED:
        convert(foreign_root / case, "shardkit", tmp_path / case)
        pairs.append((str(tmp_path / case), settings))
    for differences in run_ranks(2, "tests.checkpoint.formats.runs:resume_all", pairs=pairs, folder=str(tmp_path)):
        assert differences == [[]] * len(pairs)


STARTED = [
    ("gpt2", "zero3", "hf", {}),
    ("gpt2", "ddp", "again", {}),
    ("native", "fsdp", "native", {"train.ema_decay": 0.9}),
    # A state of another tool is gone on with, whatever the seed of this run's data order.
    ("native", "ddp", "imported", {"resume": True, "train.seed": 7, "train.max_steps": 2}),
    ("gpt2", "hsdp", "hf", {"parallel.dp_replicate": 2}),
    ("native", "zero1", "native/model.pt", {"precision.mode": "bf16"}),
]


@pytest.mark.release
def test_training_starts_from_exported_weights(runs_root: Path, tmp_path: Path) -> None:
    convert(runs_root / "gpt2", "safetensors", tmp_path / "hf", max_shard_size="100KB")
    convert(tmp_path / "hf", "shardkit", tmp_path / "again")
    convert(runs_root / "native", "torch", tmp_path / "native")
    convert(runs.dcp_of_native(tmp_path / "dcp", str(runs_root)), "shardkit", tmp_path / "imported")
    (tmp_path / "text.txt").write_bytes((runs_root / "text.txt").read_bytes())
    begin = [(case, strategy, str(tmp_path / source), extra) for case, strategy, source, extra in STARTED]
    for results in run_ranks(2, "tests.checkpoint.formats.runs:start_all", root=str(tmp_path), cases=begin):
        assert [differing for differing, _ in results] == [[]] * len(begin)
        assert results[0][1] == pytest.approx(results[1][1], abs=1e-5), "the same weights, the same loss"


def test_weights_alone_are_no_state_to_resume(plain_file: Path, tmp_path: Path) -> None:
    convert(plain_file, "shardkit", tmp_path / "out", dtype="bf16")
    with CheckpointReader(tmp_path / "out") as checkpoint:
        assert {info.dtype for info in checkpoint.tensors().values()} == {torch.bfloat16}
        expected = torch.load(plain_file, weights_only=True)
        for name, tensor in expected.items():
            assert torch.equal(checkpoint.read(f"model.{name}").view(40, 30), tensor.bfloat16())


def test_optimizer_state_is_never_cast(foreign_root: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="never cast"):
        convert(foreign_root / "zero2-fp32", "shardkit", tmp_path / "out", dtype="bf16")
    assert list(tmp_path.iterdir()) == []
    convert(foreign_root / "zero2-fp32", "shardkit", tmp_path / "out", dtype="bf16", weights_only=True)
    with CheckpointReader(tmp_path / "out") as checkpoint:
        assert not any(name.startswith("optim.") for name in checkpoint.tensors())


def test_two_things_to_start_from_are_refused() -> None:
    load_config(None, {"model.init_from": "a", "run.resume": True})  # a restart of such a run
    with pytest.raises(ConfigError, match="both say what to start from"):
        load_config(None, {"model.init_from": "a", "run.resume": "b"})
