"""Worlds larger than the machine: a live rank among pretended ones has the peaks that it has among live ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
