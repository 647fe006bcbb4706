"""Worlds larger than the machine: a live rank among pretended ones has the peaks that it has among live ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import wide_plans
from shardkit.config.load import load_config
from shardkit.plan.client import plan
from shardkit.plan.target import choose_target
from tests.cuda.rehearsals import linked_cache, rehearsed
from tests.emulated_cuda import REPO, needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation, pytest.mark.timeout(600)]
WORLDS = str(Path(__file__).with_name("worlds.py"))
SHARDKIT = [
    sys.executable, "-m", "shardkit.train", "--config", str(REPO / "configs/quickstart.yaml"), "parallel.strategy=fsdp",
    "run.device=cuda",
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_cache(tmp_path_factory.mktemp("cache"))


def peaks(cache: Path, folder: Path, live: str, *modes: str, rank: str = "0") -> dict[str, list[str]]:
    """Each mode's peaks on a rank of four, allocated and reserved, as the program itself reads them."""
    options = ["--ranks", "4", "--live", live, "--steps", "99"]
    done, verdict = rehearsed(cache, folder, *options, command=[sys.executable, WORLDS, *modes])
    assert len(verdict["ranks"]) == len(live.split(","))
    lines = [line.split() for line in done.stderr.splitlines() if line.startswith("PEAK")]
    return {mode: sizes for _, mode, of_rank, *sizes in lines if of_rank == rank}


@pytest.mark.parametrize(
    "modes", [("talk", "ddp", "fsdp", "hsdp", "tp", "zero3"), ("bound", "hsdp", "tp")], ids=["lazy", "split"]
)
def test_among_pretended_ranks_the_peaks_are_the_same(modes: tuple[str, ...], cache: Path, tmp_path: Path) -> None:
    among_pretended = peaks(cache, tmp_path, "0", *modes)
    assert list(among_pretended) == list(modes)
    assert among_pretended == peaks(cache, tmp_path, "0,1,2,3", *modes)


def test_symmetric_memory_needs_no_pretended_rank(cache: Path, tmp_path: Path) -> None:
    options = torch.distributed.ProcessGroupNCCL.Options()
    if not hasattr(options, "use_pg_for_symm_mem_rendezvous"):
        pytest.skip("before 2.13 torch looks for the memory of every rank of the group")
    among_pretended = peaks(cache, tmp_path, "2", "symmetric", rank="2")
    assert among_pretended == peaks(cache, tmp_path, "0,1,2,3", "symmetric", rank="2")


def test_shardkits_own_ranks_have_the_same_peaks(cache: Path, tmp_path: Path) -> None:
    def rank_0(live: str) -> dict[str, Any]:
        command = [*SHARDKIT, f"run.dir={tmp_path / 'run'}"]
        _, verdict = rehearsed(cache, tmp_path, "--ranks", "4", "--live", live, command=command)
        return dict(verdict["ranks"][0])

    among_pretended, among_live = rank_0("0"), rank_0("0,1,2,3")
    host, live_host = among_pretended.pop("host_peak"), among_live.pop("host_peak")
    assert among_pretended == among_live
    sharded = among_pretended["at_update"]
    assert sharded["optimizer states"] == pytest.approx(2 * sharded["parameters"], rel=0.01)
    assert sharded["gradients"] == sharded["parameters"] > 0
    assert host == pytest.approx(live_host, rel=0.05)  # a process's memory, libraries and all: never equal to a byte


WIDE = {
    "ep8": ["model_type: mixtral, num_local_experts: 8, intermediate_size: 1024", "parallel.ep=8"],
    "tp8": ["model_type: llama, intermediate_size: 4096", "parallel.tp=8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("axis", WIDE)
def test_a_rank_of_64_that_share_layers_or_experts_takes_what_the_plan_says(
    axis: str, cache: Path, tmp_path: Path
) -> None:
    model, key = WIDE[axis]
    sizes = "hidden_size: 1024, num_hidden_layers: 2, num_attention_heads: 8, num_key_value_heads: 8, vocab_size: 8192"
    settings = [
        "task.name=hf_causal_lm", f"model.hf={{{model}, {sizes}}}", "train.seq_len=1024", "train.micro_batch_size=2",
        "train.eval_samples=0", "parallel.strategy=fsdp", key, "precision.mode=bf16", "memory.plan=false",
    ]  # fmt: skip
    command = [sys.executable, "-m", "shardkit.train", *settings, "run.device=cuda", f"run.dir={tmp_path / 'run'}"]
    _, verdict = rehearsed(cache, tmp_path, "--gpu", "h100", "--ranks", "64", command=command)
    with patch.dict(os.environ, {"EMUCUDA": "0"}):
        config = load_config(None, settings).config
        planned = plan(config, choose_target(config, 64, 8, gpu="h100", expandable=True))
    print(f"{axis}: planned {planned.peak.allocated}, rehearsed {verdict['ranks'][0]['peak_allocated']}")
    assert verdict["ranks"][0]["peak_allocated"] == pytest.approx(planned.peak.allocated, rel=0.005)
    lines = {line["source_line"] for line in verdict["assumptions"] if line["kind"] == "rows"}
    assert lines == ({"parallel.ep_imbalance=1.72"} if axis == "ep8" else set())


@pytest.mark.release
@pytest.mark.parametrize("name", ["Llama 70B, tp 8 × fsdp 32", "GLM-4.5-Air with LoRA, ep 8"])
def test_a_rank_of_a_large_model_takes_what_the_plan_says(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    peak = wide_plans.rehearsed(name)["peak_allocated"]
    monkeypatch.setenv("EMUCUDA", "0")
    assert peak == pytest.approx(wide_plans.planned(name)["peak"], rel=0.005)


@pytest.mark.slow
def test_live_ranks_that_share_layers_and_experts_assume_the_rows_that_the_others_send(
    cache: Path, tmp_path: Path
) -> None:
    """One of two ranks has the larger part of 33 rows; experts of each get rows of both."""
    heads = "num_attention_heads: 4, num_key_value_heads: 4, num_local_experts: 4"
    sizes = "hidden_size: 64, intermediate_size: 64, num_hidden_layers: 1, vocab_size: 256"
    settings = [
        "task.name=hf_causal_lm", f"model.hf={{model_type: mixtral, {sizes}, {heads}}}",
        "train.seq_len=33", "train.micro_batch_size=1", "train.eval_samples=0", "parallel.strategy=fsdp",
        "parallel.tp=2", "parallel.ep=2", "memory.plan=false",
    ]  # fmt: skip
    command = [sys.executable, "-m", "shardkit.train", *settings, "run.device=cuda", f"run.dir={tmp_path / 'run'}"]
    _, verdict = rehearsed(cache, tmp_path, "--ranks", "4", "--live", "0,1", "--time-limit", "200", command=command)
    assert [rank["steps"] for rank in verdict["ranks"]] == [3, 3]


def test_a_base_in_4_bits_is_rehearsed_with_the_digests_that_it_reads(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs shardkit[quantize]")
    command = [
        sys.executable, "-m", "shardkit.train", "--config", str(REPO / "configs/qlora.yaml"), "run.device=cuda",
        "parallel.strategy=fsdp", f"run.dir={tmp_path / 'run'}",
        # Small tensors are computed, from what bitsandbytes' kernels did not write; these are large.
        "model.hf.hidden_size=1024", "model.hf.intermediate_size=2048", "train.seq_len=256",
    ]  # fmt: skip
    _, verdict = rehearsed(cache, tmp_path, "--ranks", "2", command=command)
    assert verdict["ranks"][0]["peak_allocated"] > 0


ASKS = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.ones(4, device="cuda")
shapes = [None]
if rank % 2 == 0:
    dist.send(x, rank + 1)
    dist.recv_object_list(shapes, src=rank + 1)
else:
    dist.recv(x, rank - 1)
    dist.send_object_list([f"from {rank}"], dst=rank - 1)
messages = [dist.P2POp(dist.isend, x, (rank + 1) % world), dist.P2POp(dist.irecv, torch.empty_like(x), rank - 1)]
for work in dist.batch_isend_irecv(messages if rank else messages[:1]):
    work.wait()
print(f"GOT {rank} {shapes}\\n", end="", flush=True)  # one write: both ranks print at once
"""


def test_a_rank_that_is_asked_for_what_nobody_can_invent_becomes_live(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    done, verdict = rehearsed(cache, tmp_path, "--ranks", "512", command=[sys.executable, "asks.py"])
    assert [rank["rank"] for rank in verdict["ranks"]] == [0, 1]
    assert any("as the stages of a pipeline do" in note for note in verdict["notes"])
    assert "rehearsing again with ranks 0,1 live" in done.stderr and "GOT 0 ['from 1']" in done.stderr
