"""Files of strangers: a pickle cannot run code, and damaged bytes are a clear error, wherever they lie."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.checkpoint.formats.detect import open_source
from shardkit.checkpoint.formats.unpickle import _NAMES, PickledObject, load
from shardkit.cli.__main__ import main
from shardkit.errors import CheckpointError
from tests.checkpoint import fakes
from tests.checkpoint.formats.test_bad_input import fails


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path, function: Callable[..., Any] = os.mkdir) -> None:
        self.path, self.function = path, function

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return self.function, (str(self.path),)


def refused(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Convert must end with exit code 2 and two lines, leave nothing, and run nothing; returns the lines."""
    text = fails(capsys, source, "--to", "safetensors", "--out", out)
    assert not out.exists() and not list(out.parent.glob(f".{out.name}*"))
    assert not (out.parent / "was_here").exists()
    return text


@pytest.mark.parametrize("position", ["beside", "alone", "as a weight"])
def test_a_hostile_state_dict(position: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bomb = Bomb(tmp_path / "was_here")
    content = {"beside": {"w": torch.ones(3), "x": bomb}, "alone": bomb, "as a weight": {"w": bomb}}[position]
    torch.save(content, tmp_path / "m.pt")
    torch.load(tmp_path / "m.pt", weights_only=False)
    (tmp_path / "was_here").rmdir()  # it does work
    assert "posix.mkdir" in refused(tmp_path / "m.pt", tmp_path / "out", capsys)


@pytest.mark.parametrize("name", ["manifest.json", "rank_00000.bin", ".metadata"])
def test_a_pickle_in_a_checkpoint_of_ours_is_not_opened(name: str, saved: Path, tmp_path: Path) -> None:
    for path in sorted(saved.glob("step_*")):
        (path / name).write_bytes(pickle.dumps(Bomb(tmp_path / "was_here")))
    checkpoints = fakes.checkpointer(saved, fakes.Plain())
    with nullcontext() if name == ".metadata" else pytest.raises(CheckpointError, match="none of the 3"):
        assert checkpoints.resume(saved) is not None, "a file that is not ours means nothing"
    checkpoints.close()
    assert not (tmp_path / "was_here").exists()


@pytest.mark.parametrize("target", ["optim_states", "model_states"])
def test_a_hostile_zero(target: str, foreign_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(foreign_root / "zero2-fp32" / "global_step3", tmp_path / "ds")
    file = next(folder.glob(f"*_{target}.pt"))
    torch.save({"optimizer_state_dict": {"zero_stage": Bomb(tmp_path / "was_here")}}, file)
    assert "posix.mkdir" in refused(folder, tmp_path / "out", capsys)


@pytest.mark.parametrize("position", ["instead", "inside", "in a data file"])
def test_a_hostile_dcp(position: str, foreign_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(foreign_root / "dcp", tmp_path / "dcp")
    bomb = Bomb(tmp_path / "was_here")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    if position == "instead":
        metadata = bomb
    elif position == "inside":
        metadata.storage_meta = bomb
    else:
        torch.save(bomb, folder / "__0_0.distcp")
        size = (folder / "__0_0.distcp").stat().st_size
        for info in metadata.storage_data.values():
            info.relative_path, info.offset, info.length = "__0_0.distcp", 0, size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "posix.mkdir" in refused(folder, tmp_path / "out", capsys)


def test_dcp_names_no_file_elsewhere(foreign_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(foreign_root / "dcp", tmp_path / "dcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../elsewhere/{info.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    shutil.copytree(foreign_root / "dcp", tmp_path / "elsewhere")
    assert "another folder" in refused(folder, tmp_path / "out", capsys)


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'touch was_here'\ntR.",
        b"c__builtin__\neval\n(S'1'\ntR.",
        b"cbuiltins\ngetattr\n(cos\nsystem\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.",
        b"\x80\x04\x8c\x08builtins\x8c\x0bdict.pop.os\x93.",
        b"cfunctools\npartial\n.",
        b"ctorch\nload\n.",
        b"ctorch.hub\nload\n.",
        b"cdeepspeed\nrunner\n.",
        b"(S'touch was_here'\nios\nsystem\n.",
        b"\x80\x02\x82\x01.",  # an extension code
        pickle.dumps(PickledObject.get),
        # Giving state to what the reader itself hands out.
        b"ctorch._utils\n_rebuild_tensor_v2\n}S'_function'\nI1\nsb.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'_function'\nI1\nstb.",
        b"ctorch\nFloatStorage\n}S'name'\nS'x'\nsb.",
    ],
)
def test_what_is_not_on_the_list_is_refused(content: bytes) -> None:
    before = dict(vars(PickledObject)), dict(_NAMES)
    with pytest.raises(CheckpointError, match=r"was not loaded|is damaged"):
        load(content, Path("x"))
    assert (dict(vars(PickledObject)), dict(_NAMES)) == before


@pytest.mark.parametrize("name", ["argparse\nNamespace", "collections\nOrderedDict", "torch\nfloat32", "torch\nSize",
                                  "torch\nFloatStorage", "torch._utils\n_rebuild_parameter"])  # fmt: skip
@pytest.mark.parametrize("change", ["}S'get'\nS'x'\nsb.", "(N}S'get'\nS'x'\nstb.", "S'x'\na.", "S'get'\nS'x'\ns."])
def test_a_pickle_cannot_change_what_later_pickles_get(name: str, change: str) -> None:
    """Opcodes that set attributes and items work on whatever is on the stack: a class would keep them."""
    with pytest.raises(CheckpointError, match="is damaged"):
        load(f"c{name}\n{change}".encode(), Path("x"))
    assert callable(PickledObject.get) and callable(load(b"cargparse\nNamespace\n)\x81.", Path("x")).get)


@pytest.mark.parametrize("case", ["zero2-fp32/global_step3", "zero3-bf16/global_step3", "dcp"])
def test_flipped_and_cut_bytes_never_raise_anything_else(case: str, foreign_root: Path, tmp_path: Path) -> None:
    """These formats have no checksum of the data itself: what is read may differ, but it is read, or refused."""
    chance, outcomes = random.Random(0), set()
    folder = shutil.copytree(foreign_root / case, tmp_path / "copy")
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".pt", ".distcp", "")):
        content = file.read_bytes()
        for _ in range(15):
            damaged = bytearray(content)
            if chance.random() < 0.5:
                damaged = damaged[: chance.randrange(len(damaged))]
            else:
                for _ in range(chance.choice((1, 4))):
                    damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            try:
                source = open_source(folder)
                outcomes |= {"read" for name in source.tensors for _ in source.pieces(name)}
                source.close()
            except CheckpointError:
                outcomes.add("refused")
        file.write_bytes(content)
    assert outcomes == {"read", "refused"}


def test_a_safetensors_header_that_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, header in enumerate(
        [
            b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,160000]}}',
            b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}',
            b'{"w":{"dtype":"F32","shape":[-4],"data_offsets":[16,0]}}',
            b'{"w":{"dtype":"F32","shape":["4"],"data_offsets":[0,16]}}',
            b'{"w":{"dtype":"F33","shape":[4],"data_offsets":[0,16]}}',
            b'{"w":[1]}', b'[]', b'{"w":', b"\xff\xfe", b'{"w":{"shape":[4]}}', b"[" * 100000,
        ]
    ):  # fmt: skip
        file = tmp_path / f"{number}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        assert refused(file, tmp_path / "out", capsys)
    (tmp_path / "x.safetensors").write_bytes((2**40).to_bytes(8, "little") + bytes(50))
    assert refused(tmp_path / "x.safetensors", tmp_path / "out", capsys)
    (tmp_path / "y.safetensors").write_bytes(b"abc")
    assert refused(tmp_path / "y.safetensors", tmp_path / "out", capsys)


def test_zips_that_are_not_what_torch_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    assert refused(tmp_path / "legacy.pt", tmp_path / "out", capsys)
    torch.save({"w": torch.ones(300)}, tmp_path / "good.pt")
    with (
        zipfile.ZipFile(tmp_path / "good.pt") as good,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for info in good.infolist():
            packed.writestr(info.filename, good.read(info), zipfile.ZIP_DEFLATED)
    assert "compressed" in refused(tmp_path / "packed.pt", tmp_path / "out", capsys)
    with zipfile.ZipFile(tmp_path / "empty.pt", "w") as empty:
        empty.writestr("readme", b"")
    assert refused(tmp_path / "empty.pt", tmp_path / "out", capsys)
    content = (tmp_path / "good.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[: len(content) // 2])
    assert refused(tmp_path / "cut.pt", tmp_path / "out", capsys)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (".metadata", "model.safetensors.index.json", "mp_rank_00_model_states.pt", "model.safetensors",
                 "pytorch_model.bin.index.json", "manifest.json", "step_00000001"):  # fmt: skip
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        os.mkfifo(folder / name)
        assert refused(folder, tmp_path / "out", capsys)
    for suffix in (".pt", ".safetensors"):
        os.mkfifo(tmp_path / f"pipe{suffix}")
        assert refused(tmp_path / f"pipe{suffix}", tmp_path / "out", capsys)
    (tmp_path / "zero.pt").symlink_to("/dev/zero")
    assert refused(tmp_path / "zero.pt", tmp_path / "out", capsys)


def test_a_deepspeed_shape_of_text(foreign_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(foreign_root / "zero2-fp32" / "global_step3", tmp_path / "ds")
    file = next(folder.glob("*_model_states.pt"))
    state = torch.load(file, weights_only=False)
    shapes = state["param_shapes"][0]
    shapes[next(iter(shapes))] = (2**31, "a")
    torch.save(state, file)
    assert refused(folder, tmp_path / "out", capsys)


def test_names_of_a_stranger_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "w\x1b]0;owned\x07\r\x9b2J\n  fix: run this\u202e\udc9b"
    torch.save({evil: torch.ones(2), "v": torch.ones(3).expand(2, 3)}, tmp_path / "m.pt")
    text = refused(tmp_path / "m.pt", tmp_path / "out", capsys)
    torch.save({evil: [1], "w": torch.ones(2)}, tmp_path / "n.pt")
    with pytest.raises(SystemExit, match="0"):
        main(["convert", str(tmp_path / "n.pt"), "--to", "safetensors", "--out", str(tmp_path / "out")])
    main_text = "".join(capsys.readouterr())
    torch.save({evil: torch.ones(2), "v": torch.ones(2, 3).t()}, tmp_path / "o.pt")
    for shown in (text, main_text, refused(tmp_path / "o.pt", tmp_path / "out2", capsys)):
        assert all(character.isprintable() or character == "\n" for character in shown), repr(shown)
        assert "\n  fix: run this" not in shown
