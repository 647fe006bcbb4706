"""Memory and reads while a model's folder fills 4 ranks: python -m benchmarks.folder [--engines fsdp zero3 …].

A Llama of 3.2 GB (fsdp, and zero3: four ranks then take 18 GB, most of it DeepSpeed's) or 0.9 GB, in safetensors that
are holes, fills each engine through `model.init_from`.
Anonymous memory is sampled in every rank while it loads: what exceeds the memory held before is the cost of loading,
since the shards already exist then. Bytes requested are counted in the reader.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.checkpoint.formats.tensor_source import PIECE_BYTES
from shardkit.config.load import merged
from tests.ranks import run_ranks
from tests.strategies.cases import PARTITION_ALL

from .common import measure_each
from .models import llama
from .options import options

SIZES = llama(2048, 5504, depth=13, heads=16, kv_heads=16, vocab=32000, positions=256)
SMALL = {**SIZES, "num_hidden_layers": 2}
"""For engines of which 4 ranks would need 10 to 30 GB for the large one, with their own copies."""
RANKS = 4
GOALS = {"read_ratio": 1.05, "beyond_bytes": PIECE_BYTES}
LEAN = {"optim.name": "sgd", "optim.weight_decay": 0.0, "parallel.bucket_mb": 16}
"""DeepSpeed makes the optimizer's states when it starts; they are no part of the question."""
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp": (SIZES, {}),
    "hsdp": (SMALL, {"parallel.dp_replicate": 2}),
    "zero3": (
        SIZES,
        {"parallel.ds_config": merged(PARTITION_ALL, {"zero_optimization": {"sub_group_size": 5 * 10**7}}), **LEAN},
    ),
    "ddp": (SMALL, {}),
    "zero1": (SMALL, LEAN),
    "zero2": (SMALL, LEAN),
}
EVERY_S = 0.002


def make_folder(folder: Path, sizes: dict[str, Any]) -> int:
    """A folder of a Llama whose weights are holes; returns the bytes of its tensors."""
    from transformers import LlamaConfig

    from shardkit.checkpoint.formats.pretended import write_pretended_weights

    described_by = folder.with_name(f"{folder.name}-config")
    LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(described_by)
    return write_pretended_weights(described_by, folder, "fp32").n_bytes


def anonymous() -> int:
    """Bytes of this process's anonymous memory."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon")) * 1024


@contextmanager
def peak_of(peaks: dict[str, int], name: str) -> Iterator[None]:
    """Sample the anonymous memory; `found[name]` is the largest, and `found[name before]` that at the start."""
    stop, peaks[f"{name} before"] = threading.Event(), anonymous()
    peaks[name] = peaks[f"{name} before"]

    def sample() -> None:
        while not stop.is_set():
            peaks[name] = max(peaks[name], anonymous())
            time.sleep(EVERY_S)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def load(folder: str, engine: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Fill one engine on this rank; its memory, the bytes of its shard and of its state, and what all ranks read."""
    from shardkit.checkpoint.formats.start import load_weights, opening
    from shardkit.run.job import start
    from shardkit.tasks.load import build_model, load_task
    from tests.strategies.cases import count_storages

    settings = {
        "run.device": "cpu", "task.name": "hf_causal_lm", "model.init_from": folder, "parallel.strategy": engine,
        **extra,
    }  # fmt: skip
    peaks: dict[str, int] = {}
    with start(None, settings) as job:
        task = load_task(job.config)
        with peak_of(peaks, "build"):
            job.wrap(
                partial(build_model, job.config, task), block_classes=task.block_classes,
                init_parameter=task.init_parameter, drawn=False,
            )  # fmt: skip
        shard = sum(s.local.numel() * s.local.element_size() for s in job.strategy.load_targets())
        began = time.perf_counter()
        with peak_of(peaks, "load"), opening(folder, job.model) as open_source:
            loaded = load_weights(job.strategy, job.world, job.world.control_group, open_source)
        took = time.perf_counter() - began
        state = count_storages(job.strategy.state_tensors())
    return {**peaks, "shard": shard, "state": state, "bytes_read": loaded.bytes_read, "seconds": took}


def measure(engine: str, root: Path) -> dict[str, Any]:
    sizes, extra = ENGINES[engine]
    folder = root / f"{sizes['num_hidden_layers']}-layers"
    held = (
        sum(f.stat().st_size for f in folder.glob("*.safetensors")) if folder.exists() else make_folder(folder, sizes)
    )
    ranks = run_ranks(
        RANKS, "benchmarks.folder:load", folder=str(folder), engine=engine, extra=extra, timeout=540,
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return {
        "folder_bytes": held,
        "shard_bytes": max(rank["shard"] for rank in ranks),
        "state_bytes": max((rank["state"] for rank in ranks), key=lambda state: sum(state.values())),
        "beyond_bytes": max(rank["load"] - rank["load before"] for rank in ranks),
        "build_bytes": max(rank["build"] - rank["build before"] for rank in ranks),
        "read_ratio": ranks[0]["bytes_read"] / held,
        "seconds": max(rank["seconds"] for rank in ranks),
    }


def main() -> None:
    chosen = options(__doc__, engines=ENGINES).engines
    with tempfile.TemporaryDirectory() as root:
        measure_each(
            "folder", "engines", chosen, lambda engine: measure(engine, Path(root)), ranks=RANKS, goals=GOALS
        )  # fmt: skip


if __name__ == "__main__":
    main()
