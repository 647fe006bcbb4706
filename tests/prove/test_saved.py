"""Saved files hold the weights that the ranks had in memory, or the verdict names the tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from shardkit.prove.saved import compare, findings

MEMORY = {
    "layers.0.weight": torch.randn(6, 4),
    "layers.0.lora_A.default.weight": torch.randn(2, 4),
    "head.bias": torch.randn(3),
}
TRAINED = {"layers.0.weight", "layers.0.lora_A.default.weight", "head.bias"}  # fmt: skip
State = dict[str, torch.Tensor]


def torch_file(folder: Path, state: State) -> None:
    torch.save({"model": {f"module.{name}": tensor for name, tensor in state.items()}, "step": 3}, folder / "ck.pt")


def safetensors_shards(folder: Path, state: State) -> None:
    from safetensors.torch import save_file

    for number, (name, tensor) in enumerate(state.items()):  # peft leaves out the adapter's name
        save_file({name.replace(".default", ""): tensor.contiguous()}, folder / f"model-{number}.safetensors")


def distributed_checkpoint(folder: Path, state: State) -> None:
    checkpoint.save({"model": state}, checkpoint_id=folder / "dcp", no_dist=True)


def half_dtensors(folder: Path, state: State) -> None:
    """The file of a rank that saved its parts and did not gather them; a process of its own has the group."""
    torch.save(state, folder / "plain")
    program = """if True:
        import sys, torch
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor, Shard, init_device_mesh
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        part = lambda t: DTensor.from_local(t.chunk(2)[0], mesh, [Shard(0)], shape=t.shape, stride=t.stride())
        plain = torch.load(sys.argv[1] + "/plain")
        torch.save({name: part(tensor) for name, tensor in plain.items()}, sys.argv[1] + "/ck.pt")
    """
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)


def changed(state: State, change: str) -> State:
    state = {name: tensor.clone() for name, tensor in state.items()}
    if change == "half":
        state["layers.0.weight"] = state["layers.0.weight"].chunk(2)[0]
    if change == "zeros":
        state["layers.0.weight"][3:] = 0
    if change == "missing":
        del state["head.bias"]
    if change == "average":
        state = {name: tensor * 0.9 for name, tensor in state.items()}
    return state


def by_ranks(folder: Path, states: list[State]) -> None:
    for rank, state in enumerate(states):
        torch.save(state, folder / f"part{rank}.pt")


def halves(state: State, dim: int) -> list[State]:
    cut = {"layers.0.weight": state["layers.0.weight"].chunk(2, dim)}
    return [{name: cut.get(name, (t, t))[rank] for name, t in state.items()} for rank in range(2)]


@pytest.mark.parametrize(("states", "words"), [
    ([{"head.bias": MEMORY["head.bias"]}, {k: t for k, t in MEMORY.items() if k != "head.bias"}], ""),  # stages
    (halves(MEMORY, 0), ""), (halves(MEMORY, 1), ""), (halves(MEMORY, 1)[:1] * 2 + halves(MEMORY, 1)[1:] * 2, ""),
    ([{"head.bias": MEMORY["head.bias"]}, {"layers.0.weight": MEMORY["layers.0.weight"]}], "not in the file"),
    ([halves(MEMORY, 0)[0], {**halves(MEMORY, 0)[1], "head.bias": torch.zeros(3)}], "are zero"),
    (halves(MEMORY, 0)[::-1], None),
])  # fmt: skip
def test_files_of_single_ranks_are_judged_together(tmp_path: Path, states: list[State], words: str | None) -> None:
    """Stages and shards; of parts that do not fit in the order of the ranks nobody knows the places."""
    upper = tmp_path / "upper" / "0"
    upper.mkdir(parents=True)
    (tmp_path / "overlays.json").write_text(json.dumps({"overlays": ["/home/me"], "read_only": []}))
    by_ranks(upper, states)
    found, unread = findings(tmp_path, MEMORY, TRAINED)
    assert len(found) == (words is not None) and bool(unread) == (words is None)
    for finding in found:
        assert bool(finding.wrong) == bool(words) and all(str(words) in each for _, each in finding.wrong)


@pytest.mark.parametrize("write", [torch_file, safetensors_shards, distributed_checkpoint])
@pytest.mark.parametrize(("change", "words"), [
    ("", ""), ("half", "saved as (3, 4)"), ("zeros", "are zero"), ("missing", "not in the file"),
    ("average", "foreign"),
])  # fmt: skip
def test_saved_weights(tmp_path: Path, write: Callable[[Path, State], None], change: str, words: str) -> None:
    upper = tmp_path / "upper" / "0" / "runs"
    upper.mkdir(parents=True)
    (tmp_path / "overlays.json").write_text(json.dumps({"overlays": ["/home/me"], "read_only": []}))
    write(upper, changed(MEMORY, change))
    (finding,), unread = findings(tmp_path, MEMORY, TRAINED)
    assert finding.path.startswith("/home/me/runs") and not unread
    if words == "foreign":
        assert finding.is_foreign
    else:
        assert not finding.is_foreign and all(words in each for _, each in finding.wrong)
        assert bool(finding.wrong) == bool(change)


def test_a_file_of_parts_is_read_as_what_it_holds(tmp_path: Path) -> None:
    upper = tmp_path / "upper" / "0"
    upper.mkdir(parents=True)
    (tmp_path / "overlays.json").write_text(json.dumps({"overlays": ["/home/me"], "read_only": []}))
    half_dtensors(upper, MEMORY)
    (finding,), unread = findings(tmp_path, MEMORY, TRAINED)
    assert not unread and ("layers.0.weight", "saved as (3, 4), in memory (6, 4)") in finding.wrong


@pytest.mark.parametrize("write", [torch_file, safetensors_shards, distributed_checkpoint])
@pytest.mark.parametrize(("change", "words"), [
    ("", ""), ("half", "saved as (3, 4), by one process as (6, 4)"), ("zeros", "other numbers"),
    ("missing", "where one process has it"), ("rounding", ""), ("average", "other numbers"),
])  # fmt: skip
def test_saved_files_of_one_process(
    tmp_path: Path, write: Callable[[Path, State], None], change: str, words: str
) -> None:
    """Under names that no module of the program has."""
    near = {name: tensor * (1 + 1e-7) for name, tensor in MEMORY.items()}
    for folder, tensors in (("ranks", near if change == "rounding" else changed(MEMORY, change)), ("process", MEMORY)):
        upper = tmp_path / folder / "upper" / "0" / "runs"
        upper.mkdir(parents=True)
        (tmp_path / folder / "overlays.json").write_text(json.dumps({"overlays": ["/home/me"], "read_only": []}))
        write(upper, {f"fused.{name}": tensor for name, tensor in tensors.items()})
    (finding,), notes = compare(tmp_path / "ranks", tmp_path / "process", lambda name: True, [])
    assert finding.path.startswith("/home/me/runs") and not notes
    assert bool(finding.wrong) == bool(words) and all(words in each for _, each in finding.wrong)
    (finding,), _ = compare(tmp_path / "ranks", tmp_path / "process", lambda name: False, [])
    assert bool(finding.wrong) == (change in ("half", "missing"))
    assert bool(finding.unsure) == (change in ("zeros", "average"))


def test_files_that_the_ranks_do_not_save_and_ends_of_optimizers(tmp_path: Path) -> None:
    for folder in ("ranks", "process"):
        upper = tmp_path / folder / "upper" / "0"
        upper.mkdir(parents=True)
        (tmp_path / folder / "overlays.json").write_text(json.dumps({"overlays": ["/home/me"], "read_only": []}))
        moments = {"state": {0: {"exp_avg": torch.randn(3)}}, "optimizer": {"exp_avg": torch.randn(3)}}
        torch.save({"w": torch.ones(2), **moments}, upper / "weights.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "process" / "upper" / "0" / "adapter.pt")
    (finding,), notes = compare(tmp_path / "ranks", tmp_path / "process", lambda name: True, [])
    assert not finding.wrong and notes == ["one process saves /home/me/adapter.pt, and the ranks do not"]
