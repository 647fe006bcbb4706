"""Context parallelism beside Accelerate's and DeepSpeed's own sequence parallelism, on 2 CPU ranks.

`python -m benchmarks.context_peers` trains the same small Llama on the same rows with SGD under each, and one process:
losses, the norm of the first gradient, peak tensor memory and the time of a step. Each arm is a command of its own,
since DeepSpeed's replaces a function of transformers for the whole process.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from . import bare
from .common import measure_each, output_of, stamp
from .models import llama
from .options import ONLY, chosen, options
from .overhead import rank_environ, torchrun

ROWS, SEQ, STEPS, LR, VOCAB = 2, 512, 12, 0.1, 512
BUCKET = 3_000_000
"""Elements; the model has as many."""
Step = Callable[[Any, Any], tuple[float, float]]
"""Trains on a rank's tokens and shifted targets; (its part of the loss, the norm of the gradient)."""


def make_model(attention: str = "sdpa") -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(**llama(256, 688, depth=4, heads=8, kv_heads=4, vocab=VOCAB, positions=SEQ), use_cache=False)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def rows(step: int) -> tuple[Any, Any]:
    import torch

    tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: Any, tokens: Any, targets: Any, **more: Any) -> Any:
    """The sum of cross-entropies over the number of all ranks' targets."""
    import torch.nn.functional as F

    logits = model(input_ids=tokens, **more).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (ROWS * SEQ)


def one_process() -> Step:
    import torch

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), LR)

    def step(tokens: Any, targets: Any) -> tuple[float, float]:
        loss = loss_of(model, tokens, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return step


def ours(engine: str) -> Step:
    import torch.nn.functional as F

    from shardkit.data.windows import split_rows
    from shardkit.models.packed_attention import BatchDocuments, may_split, register
    from shardkit.run.job import start

    settings = {
        "parallel.strategy": engine, "parallel.cp": 2, "run.device": "cpu", "optim.name": "sgd", "optim.lr": LR,
        "optim.weight_decay": 0.0, "optim.schedule": "constant", "train.max_norm": None, "train.seq_len": SEQ,
        "model.max_seq_len": SEQ,
        "train.micro_batch_size": ROWS,
    }  # fmt: skip
    started = start(None, settings)
    job = started.__enter__()
    job.wrap(may_split(make_model(register())))

    def loss(model: Any, batch: Any) -> Any:
        documents = BatchDocuments(batch["bounds"], batch["lengths"])
        logits = model(input_ids=batch["tokens"], position_ids=batch["positions"], documents=documents).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")

    def step(tokens: Any, targets: Any) -> tuple[float, float]:
        batch = split_rows({"tokens": tokens, "targets": targets}, job.world.rank, 2)
        result = job.step([batch], loss, lambda batch: batch["targets"].numel())
        return result.loss / 2, result.grad_norm  # the whole loss on each rank

    step.job = started  # type: ignore[attr-defined]  # it ends with its last reference
    return step


def _halves(tokens: Any, targets: Any) -> tuple[Any, Any, Any]:
    """A rank's half of the sequences, in one piece as these libraries split them, and its positions."""
    import torch
    import torch.distributed as dist

    part = slice(dist.get_rank() * SEQ // 2, (dist.get_rank() + 1) * SEQ // 2)
    return tokens[:, part], targets[:, part], torch.arange(SEQ)[part].expand(ROWS, -1)


def _ds_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 1, "steps_per_print": 2**31,
        "zero_optimization": {
            "stage": stage, "overlap_comm": False, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET,
            **({"stage3_prefetch_bucket_size": BUCKET // 10} if stage == 3 else {}),
        }, "zero_allow_untested_optimizer": True,
        "sequence_parallel_size": 2,
    }  # fmt: skip


def deepspeed(stage: int) -> Step:
    import torch

    library = bare.import_deepspeed()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    library.init_distributed("gloo", verbose=False)
    model = make_model()
    groups = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=ROWS,
        seq_length=SEQ, seq_length_is_variable=False,
    )  # fmt: skip
    engine, *_ = library.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), LR), config=_ds_config(stage), mpu=groups
    )

    def step(tokens: Any, targets: Any) -> tuple[float, float]:
        tokens, targets, positions = _halves(tokens, targets)
        loss = loss_of(engine, tokens, targets, position_ids=positions)
        engine.backward(loss)
        engine.step()
        return loss.item(), float(engine.get_global_grad_norm())

    return step


def accelerate_sp(stage: int) -> Step:
    import torch

    bare.import_deepspeed()
    model = make_model()  # before the plugin, under whose ZeRO-3 other weights would be drawn
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=SEQ, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
    )
    config = {key: value for key, value in _ds_config(stage).items() if key != "sequence_parallel_size"}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler),
    )
    engine, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), LR))

    def step(tokens: Any, targets: Any) -> tuple[float, float]:
        tokens, targets, positions = _halves(tokens, targets)
        loss = loss_of(engine, tokens, targets, position_ids=positions)
        accelerator.backward(loss)
        return loss.item(), float(engine.get_global_grad_norm())

    return step


def accelerate_cp() -> Step:
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(cp_size=2))
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), LR))

    def step(tokens: Any, targets: Any) -> tuple[float, float]:
        positions = torch.arange(SEQ).expand(ROWS, -1).contiguous()
        buffers = [tokens.contiguous(), targets.contiguous(), positions]
        with accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
        ):
            loss = loss_of(model, buffers[0], buffers[1], position_ids=positions)
            accelerator.backward(loss * 2)  # FSDP averages over the ranks
            norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item(), float(norm)

    return step


ARMS: dict[str, Callable[[], Step]] = {
    "one process": one_process,
    "shardkit, fsdp": partial(ours, "fsdp"),
    "shardkit, zero1": partial(ours, "zero1"),
    "shardkit, zero3": partial(ours, "zero3"),
    "DeepSpeed's Ulysses, ZeRO-1": partial(deepspeed, 1),
    "DeepSpeed's Ulysses, ZeRO-3": partial(deepspeed, 3),
    "Accelerate sp_size, ZeRO-1": partial(accelerate_sp, 1),
    "Accelerate sp_size, ZeRO-3": partial(accelerate_sp, 3),
    "Accelerate cp_size, FSDP2": accelerate_cp,
}


def run(name: str, out: str) -> None:
    """Body of a rank: rank 0 writes what it found."""
    import torch
    import torch.distributed as dist

    from shardkit.memory import TensorTracker

    torch.set_num_threads(1)
    if name != "one process" and not name.startswith("shardkit"):
        dist.init_process_group("gloo")
    losses, norms, seconds, spent = [], [], [], []
    with TensorTracker() if out.endswith(".peak") else torch.enable_grad() as tracker:
        step = ARMS[name]()
        for number in range(STEPS if tracker is None else 3):
            began, cpu = time.perf_counter(), time.process_time()
            loss, norm = step(*rows(number))
            seconds.append(time.perf_counter() - began)
            spent.append(time.process_time() - cpu)
            total = torch.tensor(loss)
            if dist.is_initialized():
                dist.all_reduce(total)
            losses.append(total.item())
            norms.append(norm)
    if int(os.environ.get("RANK", "0")) == 0:
        peak = None if tracker is None else tracker.peak("cpu")
        Path(out).write_text(json.dumps({"losses": losses, "norms": norms, "s": seconds, "cpu_s": spent, "peak": peak}))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # some of these libraries hang or abort when their groups go


def measure(
    name: str, module: str = "benchmarks.context_peers", ranks: int = 2, kinds: Sequence[str] = ("time", "peak")
) -> dict[str, Any]:
    """What an arm found in a command of its own, and the peak in another one: counting tensors takes time.

    `module`: its `--rank NAME FILE` is a rank of the arm. `kinds`: the ends of the names of its files.
    """
    found: dict[str, Any] = {"measured": stamp()}
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            out = Path(folder, f"out.{kind}")
            words = [module, "--rank", name, str(out)]
            argv = [sys.executable, "-m", *words] if ranks == 1 else torchrun(words, ranks)
            code, output = output_of(argv, 240, env=rank_environ())
            if code != 0 or not out.exists():
                errors = [
                    line for line in output.splitlines() if re.match(r"(\S+ *\]:)?\s*[\w.]+(Error|Exception): ", line)
                ]
                return {**found, "error": (errors or output.splitlines()[-1:] or ["it hung"])[0][:300]}
            ran = json.loads(out.read_text())
            if kind == "peak":
                found["peak"] = ran["peak"]
                continue
            wall, spent = ran.pop("s"), ran.pop("cpu_s")
            found |= {**ran, "step_s": median(wall[3:]), "processor_s": median(spent[3:])}
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run(*sys.argv[2:])
    args = options(__doc__, only=ONLY)

    def measured(name: str) -> dict[str, Any]:
        return measure(name, ranks=1 if name == "one process" else 2)

    measure_each("context_peers", "arms", chosen(ARMS, args.only), measured, settings={"tokens": SEQ, "steps": STEPS})
