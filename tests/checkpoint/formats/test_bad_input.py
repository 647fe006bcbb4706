"""What a user can get wrong ends with two lines and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardkit.checkpoint.formats.convert import convert
from shardkit.checkpoint.formats.tensor_source import Source
from shardkit.checkpoint.native import writer
from shardkit.cli.__main__ import main
from shardkit.errors import CheckpointError
from tests.ranks import REPO


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The two lines that `shardkit convert` ends with."""
    with pytest.raises(SystemExit) as ended:
        main(["convert", *map(str, arguments)])
    text = capsys.readouterr().err
    assert ended.value.code == 2 and text.count("\n") == 2, text
    assert text.startswith("error: ") and "\n  fix: " in text
    return text


def test_the_command_writes_and_says_what(plain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(plain_file), "--to", "safetensors", "--out", str(tmp_path / "out")])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"read torch checkpoint {plain_file}: 3 tensors" in shown
    assert f"wrote {tmp_path / 'out' / 'model.safetensors'}" in shown
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("missing", "does not exist"),
        ("empty", "no checkpoint that shardkit knows"),
        ("notes.txt", "none of the suffixes that shardkit knows"),
        ("notes.pt", "not the zip archive"),
        ("numbers.pt", "no state dict"),
        ("integers.pt", "holds no weights"),
    ],
)
def test_a_source_that_is_none(name: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for file in ("notes.txt", "notes.pt"):
        (tmp_path / file).write_text("hello")
    torch.save([1, 2], tmp_path / "numbers.pt")
    torch.save({"steps": torch.arange(3)}, tmp_path / "integers.pt")
    assert cause in fails(capsys, tmp_path / name, "--to", "torch", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--to", "onnx"], "--to 'onnx'"),
        (["--to", "torch", "--dtype", "int8"], "--dtype 'int8'"),
        (["--to", "safetensors", "--max-shard-size", "big"], "--max-shard-size 'big'"),
        (["--to", "safetensors", "--max-shard-size", "0GB"], "--max-shard-size '0GB'"),
        (["--to", "torch", "--step", "5"], "--step 5"),
        (["--to", "torch", "--ema"], "no moving average"),
        (["--to", "shardkit", "--ema"], "--ema with --to shardkit"),
    ],
)
def test_options_that_mean_nothing(
    options: list[str], cause: str, plain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cause in fails(capsys, plain_file, *options, "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_taken(plain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("keep")
    assert "is not empty" in fails(capsys, plain_file, "--to", "torch", "--out", tmp_path / "used")
    assert (tmp_path / "used" / "mine").read_text() == "keep"
    (tmp_path / "file").write_text("keep")
    assert "is a file" in fails(capsys, plain_file, "--to", "torch", "--out", tmp_path / "file")
    assert "cannot be written" in fails(capsys, plain_file, "--to", "torch", "--out", tmp_path / "file" / "below")
    (tmp_path / "fresh").mkdir()
    convert(plain_file, "torch", tmp_path / "fresh")  # an empty one is fine
    assert (tmp_path / "fresh" / "model.pt").exists()


def test_values_that_a_smaller_type_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.tensor([1.0, 7e4, float("inf")])}, tmp_path / "m.pt")
    text = fails(capsys, tmp_path / "m.pt", "--to", "safetensors", "--dtype", "fp16", "--out", tmp_path / "out")
    assert "model.w holds 7e+04" in text
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt"]
    convert(tmp_path / "m.pt", "safetensors", tmp_path / "out", dtype="bf16")


def test_a_shard_of_the_index_is_missing(plain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(plain_file, "safetensors", tmp_path / "st", max_shard_size="5KB")
    (tmp_path / "st" / "model-00002-of-00003.safetensors").unlink()
    assert "00002-of-00003" in fails(capsys, tmp_path / "st", "--to", "torch", "--out", tmp_path / "out")


def test_a_tensor_that_is_not_contiguous(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(3, 4).t()}, tmp_path / "m.pt")
    assert "not contiguous" in fails(capsys, tmp_path / "m.pt", "--to", "torch", "--out", tmp_path / "out")


@pytest.mark.slow
def test_a_damaged_checkpoint_of_shardkit(runs_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(runs_root / "llama" / "checkpoints" / "step_00000002", tmp_path / "damaged")
    data = bytearray((folder / "rank_00001.bin").read_bytes())
    data[1000] ^= 1
    (folder / "rank_00001.bin").write_bytes(data)
    assert "checksum" in fails(capsys, folder, "--to", "safetensors", "--out", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["damaged"]


def test_a_disk_without_room_is_noticed_before_anything_is_written(
    plain_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stat = os.statvfs(tmp_path)
    full = os.statvfs_result((*stat[:3], 0, 0, *stat[5:]))
    monkeypatch.setattr(writer.os, "statvfs", lambda _: full)
    assert "64.0 MiB to keep free" in fails(capsys, plain_file, "--to", "torch", "--out", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_disk_that_fills_up_leaves_nothing(plain_file: Path, tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\n"
        "from shardkit.cli.__main__ import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))\n"
        "for to in ('safetensors', 'torch', 'shardkit'):\n"
        "    try:\n"
        "        main(['convert', sys.argv[1], '--to', to, '--out', sys.argv[2]])\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 2, ended.code\n"
    )
    # -B: the limit would cut the bytecode of modules imported under it, and every later process would fail to load it.
    command = [sys.executable, "-B", "-c", code, str(plain_file), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr.count("\n") == 6, done.stderr
    assert done.stderr.count("cannot be written: File too large") == done.stderr.count("fix: free space") == 3
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(plain_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Source, name: str, dtype: object = None) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(Source, "pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(plain_file, "torch", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_optimizer_state_without_names(tmp_path: Path) -> None:
    """Numbered states (a plain `optimizer.state_dict()`) do not say whose they are."""
    import torch.distributed.checkpoint as dcp

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match="not the name of a weight") as caught:
        convert(tmp_path / "dcp", "shardkit", tmp_path / "out")
    assert "--weights-only" in caught.value.fix
    convert(tmp_path / "dcp", "shardkit", tmp_path / "out", weights_only=True)


def test_several_groups_of_tensors(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    groups = {"student": {"w": torch.ones(2)}, "teacher": {"w": torch.zeros(2)}}
    dcp.save(groups, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match="student, teacher"):
        convert(tmp_path / "dcp", "torch", tmp_path / "out")
    dcp.save({"model": groups["student"], "ema": groups["teacher"]}, checkpoint_id=tmp_path / "two", no_dist=True)
    done = convert(tmp_path / "two", "torch", tmp_path / "out")
    assert done.notes == ["left out: tensors under ema"]
    assert torch.load(tmp_path / "out" / "model.pt", weights_only=True)["w"].sum() == 2
