"""Checkpoints of runs that split layers, experts or sequences are those of one process, for any layout and tool."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardkit.checkpoint.formats.convert import convert
from shardkit.checkpoint.native.manifest import CorruptCheckpoint
from shardkit.checkpoint.native.reader import CheckpointReader
from shardkit.checkpoint.native.writer import ALIGNMENT
from tests.checkpoint.axes import LAYOUTS, MODELS, SAVED_AT, SEQ, Found, layouts
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist
CHAIN: dict[str, list[str]] = {
    "layers": [
        "single", "ddp", "tp2", "zero1", "zero3", "tp2 x fsdp2", "hsdp", "cp4", "tp4", "zero2", "tp2 x cp2",
        "cp2 x zero1", "tp2 x replicas", "fsdp", "single",
    ],
    "experts": [
        "single", "ep2", "ddp", "zero1", "zero3", "ep2 x fsdp2", "hsdp", "ep4", "zero2", "ep2 x cp2", "cp2 x zero1",
        "ep2 x tp2", "ep2 x replicas", "fsdp", "single",
    ],
}  # fmt: skip
"""Each layout loads what the one before it saved; those of as many ranks follow each other."""


STEP = f"step_{SAVED_AT:08d}"


def run(legs: list[tuple[str, str, list[str]]], root: Path) -> list[Found]:
    """What each rank found, pool by pool of as many ranks."""
    found: list[Found] = []
    for world, group in itertools.groupby(legs, lambda leg: LAYOUTS[leg[1]][0]):
        found += run_ranks(world, "tests.checkpoint.axes:exchange", timeout=3000, legs=[*group], root=str(root))
    return found


def assert_same(found: list[Found]) -> None:
    """Weights and moments are to the bit what was first saved, and losses those of the run that loaded nothing."""
    expected = {model: after for of_rank in found for (model, _, source), (_, after) in of_rank.items() if not source}
    for of_rank in found:
        for (model, name, source), (differing, after) in of_rank.items():
            assert not differing, f"{model}: {source} → {name}: not what was saved: {differing}"
            assert after == pytest.approx(expected[model], rel=0, abs=1e-5), f"{model}: {source} → {name}"


Chained = tuple[str, Path, list[Found]]


@pytest.fixture(scope="module", params=CHAIN)
def chained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chained:
    """A model, a folder with a checkpoint of each layout, and what ranks found while each loaded the one before."""
    model, names = request.param, CHAIN[request.param]
    root = tmp_path_factory.mktemp("chain")
    (root / model).mkdir()
    loaded = [[], *([name] for name in names[:-1])]
    return model, root / model, run([*zip([model] * len(names), names, loaded, strict=True)], root)


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.timeout(900)
def test_a_checkpoint_goes_from_hand_to_hand(chained: Chained) -> None:
    model, _, found = chained
    assert {*CHAIN[model]} == {*layouts(model)}
    assert_same(found)


@pytest.mark.slow
@pytest.mark.deepspeed
def test_each_element_is_written_once_whatever_ranks_share(chained: Chained) -> None:
    model, folder, _ = chained
    state, _ = torch.load(folder / "state.pt")
    for name in layouts(model):
        with CheckpointReader(folder / name / STEP) as reader:
            entries = reader.manifest.tensors
        chunks = [(entry.itemsize, chunk) for entry in entries.values() for chunk in entry.chunks]
        written = sum(itemsize * chunk.length for itemsize, chunk in chunks)
        assert state.keys() <= entries.keys(), name
        assert written == sum(entry.itemsize * entry.numel for entry in entries.values()), name
        on_disk = sum(file.stat().st_size for file in (folder / name / STEP).glob("*.bin"))
        assert written <= on_disk < written + ALIGNMENT * len(chunks), name


DAMAGED = {
    "layers": ("tp4", "tp2", "model.model.layers.0.mlp.down_proj.weight"),
    "experts": ("ep4", "ep2", "model.model.layers.0.mlp.experts.down_proj"),
}
"""Model → (layout that saved, layout that loads, the tensor whose last piece is damaged)."""


@pytest.mark.slow
@pytest.mark.deepspeed
def test_a_damaged_piece_is_found_by_its_name(chained: Chained, tmp_path: Path) -> None:
    model, folder, _ = chained
    name, target, tensor = DAMAGED[model]
    path = tmp_path / model / name / STEP
    shutil.copytree(folder / name, path.parent)
    shutil.copy(folder / "state.pt", tmp_path / model)
    with CheckpointReader(path) as reader, CheckpointReader(folder / name / STEP) as intact:
        *_, chunk = reader.manifest.tensors[tensor].chunks
        file = path / reader.manifest.files[chunk.file].name
        content = bytearray(file.read_bytes())
        content[chunk.offset + 5] ^= 1
        file.write_bytes(content)
        assert [problem.split()[0] for problem in reader.problems()] == [str(file)]
        with pytest.raises(CorruptCheckpoint, match=f"{file.name} does not match its checksum .* in {tensor}"):
            reader.read(tensor)
        others = [other for other in reader.manifest.tensors if other != tensor]
        assert all(torch.equal(reader.read(other), intact.read(other)) for other in others)
    for said in run_ranks(2, "tests.checkpoint.axes:refusals", legs=[(model, target, name)], root=str(tmp_path)):
        assert str(file) in said[0] and tensor in said[0]


@pytest.mark.slow
@pytest.mark.deepspeed
def test_what_is_converted_is_what_one_process_saved(chained: Chained, tmp_path: Path) -> None:
    model, folder, _ = chained
    config = {"task": {"name": "hf_causal_lm"}, "model": {"hf": MODELS[model]["model.hf"]}, "train": {"seq_len": SEQ}}
    converted = {}
    for name in layouts(model):
        out, source = tmp_path / name / "out", tmp_path / name / "run"
        shutil.copytree(folder / name / STEP, source / "checkpoints" / STEP)
        (source / "config.yaml").write_text(json.dumps(config))
        convert(source, "safetensors", out)
        converted[name] = (out / "config.json").read_text(), load_file(out / "model.safetensors")
    said, tensors = converted["single"]
    for name, (config_json, found) in converted.items():
        assert config_json == said and found.keys() == tensors.keys(), name
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items()), name


@pytest.mark.release
@pytest.mark.deepspeed
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", CHAIN)
def test_any_layout_loads_any_other(model: str, tmp_path: Path) -> None:
    (tmp_path / model).mkdir()
    names = layouts(model)
    saved = [(model, name, ["single"] if name != "single" else []) for name in names]
    square = [(model, name, names) for name in names]
    found = run([*saved, *square], tmp_path)
    assert {(source, name) for of_rank in found for _, name, source in of_rank} >= {*itertools.product(names, names)}
    assert_same(found)
