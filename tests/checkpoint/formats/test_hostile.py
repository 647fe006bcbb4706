"""Files of strangers: a pickle cannot run code, and damaged bytes are a clear error, wherever they lie."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.checkpoint.formats.detect import open_source
from shardkit.checkpoint.formats.unpickle import _NAMES, PickledObject, load
from shardkit.cli.__main__ import main
from shardkit.errors import CheckpointError
from shardkit.files.bounded import VARIABLE


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path, function: Callable[..., Any] = os.mkdir) -> None:
        self.path, self.function = path, function

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return self.function, (str(self.path),)


def refused(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Convert must end with exit code 2 and two lines; returns them."""
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(source), "--to", "safetensors", "--out", str(out)])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 2 and text.startswith("error: ") and "\n  fix: " in text, text
    assert not out.exists() and not list(out.parent.glob(f".{out.name}*"))
    return text


@pytest.mark.parametrize("position", ["beside", "alone", "as a weight"])
def test_a_hostile_state_dict(position: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bomb = Bomb(tmp_path / "was_here")
    content = {"beside": {"w": torch.ones(3), "x": bomb}, "alone": bomb, "as a weight": {"w": bomb}}[position]
    torch.save(content, tmp_path / "m.pt")
    torch.load(tmp_path / "m.pt", weights_only=False)
    (tmp_path / "was_here").rmdir()  # it does work
    assert "posix.mkdir" in refused(tmp_path / "m.pt", tmp_path / "out", capsys)
    assert not (tmp_path / "was_here").exists()


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("target", ["optim_states", "model_states"])
def test_a_hostile_deepspeed_folder(
    target: str, foreign_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(foreign_root / "zero2-fp32" / "global_step3", tmp_path / "ds")
    file = next(folder.glob(f"*_{target}.pt"))
    torch.save({"optimizer_state_dict": {"zero_stage": Bomb(tmp_path / "was_here")}}, file)
    assert "posix.mkdir" in refused(folder, tmp_path / "out", capsys)
    assert not (tmp_path / "was_here").exists()


@pytest.mark.dist
@pytest.mark.parametrize("position", ["instead", "inside", "in a data file"])
def test_a_hostile_dcp_folder(
    position: str, foreign_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert not (tmp_path / "was_here").exists()


def test_dcp_metadata_cannot_name_a_file_elsewhere(
    foreign_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("case", ["zero2-fp32/global_step3", "zero3-bf16/global_step3", "dcp"])
def test_flipped_and_cut_bytes_never_raise_anything_else(case: str, foreign_root: Path, tmp_path: Path) -> None:
    """These formats have no checksum of the data itself: what is read may differ, but it is read, or refused."""
    chance = random.Random(0)
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
            with suppress(CheckpointError):
                source = open_source(folder)
                for name in source.tensors:
                    for _ in source.pieces(name):
                        pass
                source.close()
        file.write_bytes(content)


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
        refused(file, tmp_path / "out", capsys)
    (tmp_path / "x.safetensors").write_bytes((2**40).to_bytes(8, "little") + bytes(50))
    refused(tmp_path / "x.safetensors", tmp_path / "out", capsys)
    (tmp_path / "y.safetensors").write_bytes(b"abc")
    refused(tmp_path / "y.safetensors", tmp_path / "out", capsys)


def test_zips_that_are_not_what_torch_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "legacy.pt", tmp_path / "out", capsys)
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
    refused(tmp_path / "empty.pt", tmp_path / "out", capsys)
    content = (tmp_path / "good.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[: len(content) // 2])
    refused(tmp_path / "cut.pt", tmp_path / "out", capsys)


def _bounded(source: Path, out: Path, answer: Path) -> None:
    """In a forked process: convert, and note how it ended, the processor time and the memory it took."""
    before = _peak_bytes()
    began = time.process_time()
    with answer.with_suffix(".err").open("w") as err:
        os.dup2(err.fileno(), 2)
        sys.stderr = err
        try:
            main(["convert", str(source), "--to", "safetensors", "--out", str(out)])
            code: object = 0
        except SystemExit as ended:
            code = ended.code
        except BaseException as error:
            code = repr(error)[:300]
    answer.write_text(json.dumps([code, time.process_time() - began, _peak_bytes() - before]))


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def refused_cheaply(source: Path, out: Path) -> str:
    """Convert refuses in two lines, within 200 MiB and a second of a quiet processor; returns the lines."""
    warm = pickle.dumps({"a": 1})
    load(warm, Path("x"))
    answer = out.with_name(f"{out.name}.answer")
    child = os.fork()
    if child == 0:
        try:
            gc.freeze()  # to collect what earlier tests left, such as a process group, can crash a forked process
            resource.setrlimit(resource.RLIMIT_CPU, (12, 12))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + 4 * 2**30,) * 2)
            signal.alarm(60)
            _bounded(source, out, answer)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"{source.name}: ended by signal {status & 127}"
    code, seconds, n_bytes = json.loads(answer.read_text())
    text = answer.with_suffix(".err").read_text()
    assert code == 2, f"{code}: {text[-500:]}"
    assert seconds < 3 and n_bytes < 200 * 2**20, f"{seconds:.1f} s, {n_bytes / 2**20:.0f} MiB: {text[:500]}"
    assert text.count("\n") == 2 and text.startswith("error: ") and "\n  fix: " in text, text[:500]
    assert len(text) < 4000 and not list(out.parent.glob(f".{out.name}*")) and not out.exists()
    return text


def archive(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED, **arrays: bytes) -> Path:
    """A zip as torch.save lays it out, of this pickle."""
    with zipfile.ZipFile(path, "w", compression) as made:
        made.writestr("archive/data.pkl", pickled)
        made.writestr("archive/byteorder", b"little")
        for key, data in arrays.items():
            made.writestr(f"archive/data/{key}", data)
    return path


_NESTED = b"\x80\x02)" + 40 * b"2\x86"
"""Forty pairs, each of the one before twice: 80 bytes that stand for 2**40 tuples."""
_DOUBLED = 26 * b"2\x86"


def _pickles() -> dict[str, bytes]:
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
        b"X\x03\x00\x00\x00cpuK\x04tQK\x00K\x04\x85K\x01\x85\x89}tR"
    )
    return {
        "memo entry 2**31 - 1, for which Python makes a list of 32 GiB": b"\x80\x02]r\xff\xff\xff\x7f.",
        "the same memo entry in digits": b"(lp2147483647\n.",
        "copies of a list that grew later": b"\x80\x02]q\x00\x85q\x010h\x00("
        + 15_000 * b"K\x01" + b"e0cbuiltins\nlist\nq\x020]("
        + 30_000 * b"h\x02h\x01R" + b"e.",
        "a key that hashes 2**40 times": b"\x80\x02}" + _NESTED[2:] + b"K\x01s.",
        "a member of a set that hashes 2**40 times": b"\x80\x04\x8f(" + _NESTED[2:] + b"\x90.",
        "a frozen set that hashes 2**40 times": b"\x80\x04(" + _NESTED[2:] + b"\x91.",
        "an argument that hashes 2**40 times": b"\x80\x02cbuiltins\nset\n(" + _NESTED[2:] + b"l\x85R.",
        "a key of 2**26 pairs beside a weight": b"\x80\x02}(X\x01\x00\x00\x00w" + tensor + b")" + _DOUBLED + b"K\x01u.",
        "keys in keys, 100 000 deep": b"\x80\x02})" + 100_000 * b"\x85" + b"K\x01s.",
        "1 000 000 empty sets": b"\x80\x04](" + 1_000_000 * b"\x8f" + b"e.",
        "1 000 000 empty dicts, dropped": b"\x80\x02" + 1_000_000 * b"}0" + b"}.",
        "50 000 classes": b"\x80\x04]\x8c\x08argparseq\x000\x8c\x09Namespaceq\x010("
        + 50_000 * b"h\x00h\x01\x93" + b"e.",
        "100 000 dimensions": b"\x80\x02}X\x01\x00\x00\x00w"
        + tensor.replace(b"K\x04\x85K\x01\x85", b"(" + 100_000 * b"M\xff\xff" + b"t(" + 100_000 * b"K\x01" + b"t")
        + b"s.",
    }  # fmt: skip


@pytest.mark.parametrize("case", sorted(_pickles()))
def test_a_small_pickle_that_asks_for_much_is_refused_cheaply(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0.1")
    refused_cheaply(archive(tmp_path / "m.pt", _pickles()[case], **{"0": bytes(16)}), tmp_path / "out")


@pytest.mark.slow
def test_a_deflated_archive_is_refused_before_it_is_inflated(tmp_path: Path) -> None:
    grown = b"\x80\x02X" + (300 * 2**20).to_bytes(4, "little") + bytes(300 * 2**20) + b"."
    file = archive(tmp_path / "pickle.pt", grown, zipfile.ZIP_DEFLATED)
    del grown
    assert file.stat().st_size < 700_000
    assert "compressed" in refused_cheaply(file, tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "order.pt", "w") as made:
        made.writestr("archive/data.pkl", b"}.")
        made.writestr("archive/byteorder", bytes(250 * 2**20), zipfile.ZIP_DEFLATED)
    assert "compressed" in refused_cheaply(tmp_path / "order.pt", tmp_path / "out")
    secret = archive(tmp_path / "secret.pt", b"}.")
    content = bytearray(secret.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1  # says that it is encrypted
    secret.write_bytes(content)
    refused_cheaply(secret, tmp_path / "out")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for name in (".metadata", "model.safetensors.index.json", "mp_rank_00_model_states.pt", "model.safetensors",
                 "pytorch_model.bin.index.json", "manifest.json", "step_00000001"):  # fmt: skip
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        os.mkfifo(folder / name)
        refused_cheaply(folder, tmp_path / "out")
    for suffix in (".pt", ".safetensors"):
        os.mkfifo(tmp_path / f"pipe{suffix}")
        refused_cheaply(tmp_path / f"pipe{suffix}", tmp_path / "out")
    (tmp_path / "zero.pt").symlink_to("/dev/zero")
    refused_cheaply(tmp_path / "zero.pt", tmp_path / "out")


def test_views_of_one_array_do_not_make_more_than_the_file_holds(tmp_path: Path) -> None:
    array = torch.zeros(300_000)
    torch.save({f"w{i}": array[i : i + 250_000] for i in range(3000)}, tmp_path / "views.pt")
    assert "more than once" in refused_cheaply(tmp_path / "views.pt", tmp_path / "out")
    header = {f"w{i}": {"dtype": "F32", "shape": [250_000], "data_offsets": [i, i + 1_000_000]} for i in range(3000)}
    text = json.dumps(header).encode()
    (tmp_path / "views.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(1_100_000))
    assert "more than once" in refused_cheaply(tmp_path / "views.safetensors", tmp_path / "out")


def test_weights_that_share_an_array_are_read(tmp_path: Path) -> None:
    fused = torch.arange(12.0).reshape(6, 2)
    torch.save({"qkv": fused, "q": fused[:2], "k": fused[2:4], "v": fused[4:], "tied": fused}, tmp_path / "fused.pt")
    source = open_source(tmp_path / "fused.pt")
    assert torch.equal(next(source.pieces("model.k")), fused[2:4].flatten()) and source.ties == {"tied": "qkv"}
    source.close()


@pytest.mark.dist
@pytest.mark.parametrize("demand", ["text as a size", "rows without columns", "one file for all", "a list as a path"])
def test_dcp_metadata_that_asks_for_much(demand: str, foreign_root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(foreign_root / "dcp", tmp_path / "dcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    key, entry = next((k, e) for k, e in metadata.state_dict_metadata.items() if len(getattr(e, "size", ())) == 2)
    if demand == "text as a size":
        entry.size = (2**31, "a")
        entry.chunks[0].sizes = (2**31, "a")
    elif demand == "rows without columns":
        entry.size, entry.chunks[0].offsets, entry.chunks[0].sizes = (2**40, 5, 3), (0, 0, 0), (2**40, 0, 2)
    elif demand == "a list as a path":
        deep: list[Any] = []
        outer = deep
        for _ in range(40):
            inner: list[Any] = []
            deep += [inner, inner]
            deep = inner
        metadata.planner_data[key] = (outer,)
    else:
        storage = metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == key)]
        big = folder / storage.relative_path
        torch.save({"x" * 2_000_000: torch.zeros(entry.size)}, big)
        storage.offset, storage.length = 0, big.stat().st_size
        for i in range(2000):
            index = type(next(iter(metadata.storage_data)))(f"copy{i}", next(iter(metadata.storage_data)).offset, 0)
            metadata.storage_data[index] = storage
            metadata.state_dict_metadata[f"copy{i}"] = entry
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refused_cheaply(folder, tmp_path / "out")


def test_dcp_tensors_that_share_one_archive_do_not_make_more_than_the_file_holds(tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    checkpoint.save({"w": torch.zeros(1000)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    ((index, storage),) = metadata.storage_data.items()
    for i in range(2000):
        metadata.state_dict_metadata[f"copy{i}"] = metadata.state_dict_metadata["w"]
        metadata.storage_data[type(index)(f"copy{i}", index.offset, 0)] = storage
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "more than once" in refused_cheaply(tmp_path / "dcp", tmp_path / "out")


@pytest.mark.dist
@pytest.mark.deepspeed
def test_a_deepspeed_shape_of_text(foreign_root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(foreign_root / "zero2-fp32" / "global_step3", tmp_path / "ds")
    file = next(folder.glob("*_model_states.pt"))
    state = torch.load(file, weights_only=False)
    shapes = state["param_shapes"][0]
    shapes[next(iter(shapes))] = (2**31, "a")
    torch.save(state, file)
    refused_cheaply(folder, tmp_path / "out")


def test_names_of_a_stranger_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "w\x1b]0;owned\x07\r\x9b2J\n  fix: run this\u202e\udc9b"
    torch.save({evil: torch.ones(2), "v": torch.ones(3).expand(2, 3)}, tmp_path / "m.pt")
    text = refused(tmp_path / "m.pt", tmp_path / "out", capsys)
    torch.save({evil: [1], "w": torch.ones(2)}, tmp_path / "n.pt")
    main_text = _converted(tmp_path / "n.pt", tmp_path / "out", capsys)
    torch.save({evil: torch.ones(2), "v": torch.ones(2, 3).t()}, tmp_path / "o.pt")
    for shown in (text, main_text, refused(tmp_path / "o.pt", tmp_path / "out2", capsys)):
        assert all(character.isprintable() or character == "\n" for character in shown), repr(shown)
        assert "\n  fix: run this" not in shown


def _converted(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(["convert", str(source), "--to", "safetensors", "--out", str(out)])
    printed = capsys.readouterr()
    return printed.out + printed.err
