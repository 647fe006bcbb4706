"""Without computing, training asks torch's allocator for the same blocks in the same order."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated_cuda import REPO, needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation]

HF = "task.name=hf_causal_lm"
MIXTRAL = (
    'model.hf={"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, '
    '"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 256}'
)
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "single, fp32": (1, ()),
    "single, bf16, whole blocks again": (1, ("precision.mode=bf16", "activation.policy=full")),
    "single, fp16 with loss scaling": (1, ("precision.mode=fp16", "train.grad_accum_steps=2")),
    "single, llama": (1, (HF, "model.preset=llama-debug", "precision.mode=pure_bf16")),
    "single, mixture of experts": (1, (HF, MIXTRAL)),
    "single, convolutions": (1, ("task.name=super_resolution", "model.preset=swin2sr-debug")),
    "ddp": (2, ("parallel.strategy=ddp", "precision.mode=bf16")),
    "fsdp": (2, ("parallel.strategy=fsdp", "precision.mode=bf16", "activation.policy=selective_op")),
    "fsdp, parameters on the host": (2, ("parallel.strategy=fsdp", "parallel.offload_param=cpu")),
    "zero1": (2, ("parallel.strategy=zero1", "precision.mode=bf16", HF, "model.preset=llama-debug")),
    "zero2": (2, ("parallel.strategy=zero2", "precision.mode=bf16")),
    "zero3": (2, ("parallel.strategy=zero3", "precision.mode=bf16")),
}
TEMPORARY = {
    # Blocks that CUDA's kernel takes and gives back while it runs; the emulated one computes on the host without them.
    "_chunk_cat.out": "the addresses of the pieces",
    "split_with_sizes_copy.out": "the addresses of the pieces",
    "_foreach_norm.Scalar": "partial sums of each chunk",
    "_scaled_dot_product_efficient_attention_backward": "the products of gradient and output, and an accumulator",
    "_index_put_impl_": "the indices, sorted",
    "cumsum": "the scan's state",
    "sort.stable": "keys and positions, before and after",
    "convolution": "contiguous copies",
    "convolution_backward": "contiguous copies",
    "native_layer_norm": "a contiguous copy",
    "native_layer_norm_backward": "a contiguous copy",
    "_softmax_backward_data": "a contiguous copy",
    "roll": "a contiguous copy",
    "where.self": "a scalar, moved to the device",
}
ALSO_KNOWN_AS = {"cudnn_convolution": "convolution"}
Operator = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name ("" between operators), and the sizes of the blocks that it leaves allocated and freed.

Blocks that are freed between operators are left out: NCCL's watchdog frees those of finished work when it comes by. So
are operators that allocate nothing: the computing mode has one for some pairs.
"""


def start(mode: str, ranks: int, settings: tuple[str, ...], folder: Path) -> subprocess.Popen[str]:
    command = [
        "launch", "-", "train.micro_batch_size=2", "train.max_steps=3", "train.eval_samples=0", "memory.plan=false",
        "checkpoint.at_end=false", "logging.tensorboard=false", f"run.dir={folder / 'run'}", *settings,
        "--nproc-per-node", str(ranks),
    ]  # fmt: skip
    env = {
        **os.environ, "EMUCUDA_COMPUTE": mode, "EMUCUDA_RECORD": str(folder / "record"), "EMUCUDA_DEVICES": "2",
        "OMP_NUM_THREADS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "shardkit.cli", *command], cwd=REPO, env=env, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def read(path: Path) -> tuple[list[Operator], set[str]]:
    """The operators in order, and those that had temporary blocks."""
    operators: list[Operator] = []
    temporary: set[str] = set()
    name, balance = "", collections.Counter[int]()

    def finish() -> None:
        left = tuple(sorted((+balance).elements())), tuple(sorted((-balance).elements()))
        if any(left) if name else left[0]:
            operators.append((name, *left))
        balance.clear()

    for line in path.read_text().splitlines():
        what, _, value = line.partition(" ")
        if what == "operator":
            name = value.removeprefix("aten::")
            name = ALSO_KNOWN_AS.get(name, name)
        elif what == "end":
            finish()
            name = ""
        else:
            size = int(value)
            if what == "free" and balance[size] > 0:
                temporary.add(name)
            balance[size] += 1 if what == "alloc" else -1
            if not name:
                finish()
    return operators, temporary


@pytest.mark.parametrize("case", CASES)
def test_no_compute_mode_allocates_as_computing_does(case: str, tmp_path: Path) -> None:
    ranks, settings = CASES[case]
    folders = {mode: tmp_path / mode for mode in ("1", "0")}
    for folder in folders.values():
        folder.mkdir()
    runs = {mode: start(mode, ranks, settings, folder) for mode, folder in folders.items()}
    said = {mode: run.communicate(timeout=300)[0] for mode, run in runs.items()}
    for mode, run in runs.items():
        assert run.returncode == 0, said[mode]
    for rank in range(ranks):
        computing, _ = read(folders["1"] / f"record.{rank}")
        skipping, temporary = read(folders["0"] / f"record.{rank}")
        assert len(computing) > 200
        assert skipping == computing
        assert temporary <= TEMPORARY.keys()
