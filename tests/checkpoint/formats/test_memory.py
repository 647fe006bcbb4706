"""A conversion, and a run that begins with a folder, hold a piece of a tensor at a time, whatever the model's size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import folder
from tests.ranks import REPO, run_ranks

N_TENSORS, TENSOR_MIB, SHARD_MIB = 5, 28, 40

MEASURE = '''
import json, sys
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from benchmarks.folder import peak_of
from shardkit.checkpoint.formats.convert import convert

torch.set_num_threads(1)
root, (count, mib, shard) = Path(sys.argv[1]), map(int, sys.argv[2:])


def growth(source, to, **options):
    """MiB of anonymous memory: pages of mapped files are the kernel's to drop."""
    peaks = {}
    with peak_of(peaks, "convert"):
        convert(root / source, to, root / f"{source}-{to}", max_shard_size=f"{shard}MiB", **options)
    return (peaks["convert"] - peaks["convert before"]) / 2**20


torch.save({"w": torch.ones(1000)}, root / "warm.pt")
for to in ("safetensors", "torch", "shardkit"):  # imports and thread pools
    convert(root / "warm.pt", to, root / f"warm-{to}")
state = {f"layer{i}.weight": torch.full((mib * 256, 1024), float(i)) for i in range(count)}
torch.save(state, root / "plain.pt")
dcp.save({"model": state}, checkpoint_id=root / "dcp", no_dist=True)
del state
grown = {
    "torch to safetensors": growth("plain.pt", "safetensors"),
    "torch to bf16": growth("dcp", "safetensors", dtype="bf16"),
    "dcp to shardkit": growth("dcp", "shardkit"),
    "shardkit to torch": growth("dcp-shardkit", "torch"),
    "safetensors to torch": growth("plain.pt-safetensors", "torch"),
}
(root / "grown.json").write_text(json.dumps(grown))
'''


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    sizes = map(str, (N_TENSORS, TENSOR_MIB, SHARD_MIB))
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(tmp_path), *sizes]
    freed_at_once = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # else glibc keeps some of it, as chance has it
    subprocess.run(command, cwd=REPO, env=freed_at_once, check=True, timeout=200)
    grown = json.loads((tmp_path / "grown.json").read_text())
    shards = len(list((tmp_path / "plain.pt-safetensors").glob("*.safetensors")))
    assert shards == N_TENSORS, "the model is several times a shard"
    assert max(grown.values()) < SHARD_MIB, grown


SIZES = {**folder.SIZES, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 2, "vocab_size": 8000}
"""59 MB."""
CHUNK = 2 * 2**20


def load_in_chunks(engine: str, extra: dict[str, Any], folders: list[str]) -> dict[str, Any]:
    """Fill an engine from each folder, reading a quarter of `CHUNK` at once; the figures of the last one.

    What the first time costs (imports, threads, connections) is no part of them.
    """
    from shardkit.checkpoint.formats import start

    start.BUCKET_BYTES = CHUNK // 4
    return [folder.load(path, engine, extra) for path in folders][-1]


@pytest.mark.slow
@pytest.mark.parametrize("engine", list(folder.ENGINES))
def test_loading_a_folder_holds_one_chunk_beyond_the_shard(engine: str, tmp_path: Path) -> None:
    folder.make_folder(tmp_path / "tiny", {**SIZES, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 500})
    n_bytes = folder.make_folder(tmp_path / "model", SIZES)
    assert n_bytes > 25 * CHUNK
    ranks = run_ranks(
        4, "tests.checkpoint.formats.test_memory:load_in_chunks", engine=engine, extra=folder.ENGINES[engine][1],
        folders=[str(tmp_path / "tiny"), str(tmp_path / "model")], env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    beyond = [rank["load"] - rank["load before"] for rank in ranks]
    assert max(beyond) <= CHUNK, f"MiB beyond the shard: {[one / 2**20 for one in beyond]}"
