"""Plans from other tools' files against real runs of the Trainer, Accelerate and DeepSpeed in loops of their own.

The list stands here before anything is measured, and every case stays in it. `python -m benchmarks.other_loops` runs
the cases on CPUs, `--emulated` (in the environment of `make test-cuda`) those on emulated cards that compute nothing. A
result is on disk as soon as it is known; what is measured is not run again unless `--again` asks for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .common import REPO, RESULTS, environment, write_json
from .options import LIMIT, Option, options

GOALS = {"cpu": {"allocated": 0.03}, "emulated": {"allocated": 0.01, "reserved": 0.05}}
CARD = "h100"
TIME_LIMIT_S = 240
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024,
        "max_position_embeddings": 512,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4,
        "vocab_size": 2048, "n_positions": 512,
    },
    "bert": {
        "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 256, "intermediate_size": 1024,
        "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 2048, "max_position_embeddings": 512,
    },
    "llama-110m": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "gpt2-124m": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
        "vocab_size": 50257, "n_positions": 1024,
    },
}  # fmt: skip
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none",
        "target_modules": ["q_proj", "v_proj"]}  # fmt: skip
_AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
_SMALL = {"reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
_BF16 = {"bf16": {"enabled": True}}
_CHECKPOINTED = {"gradient_checkpointing": True}
_ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}}
_ACCUMULATED = {"gradient_accumulation_steps": 2}


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    """A DeepSpeed file of the Trainer, with buckets that fit the small models."""
    third = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {**_AUTO, "zero_optimization": {"stage": stage, **_SMALL, **third, **more}, "bf16": {"enabled": "auto"}}


def _plain(stage: int, micro: int = 2, **more: Any) -> dict[str, Any]:
    """A DeepSpeed file of a loop without the Trainer."""
    third = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": micro, "zero_optimization": {"stage": stage, **_SMALL, **third},
        **_ADAMW, **more,
    }  # fmt: skip


def _accelerate(kind: str, **more: Any) -> dict[str, Any]:
    return {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "num_machines": 1, **more}


def _fsdp2(**more: Any) -> dict[str, Any]:
    given = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True}
    return _accelerate("FSDP", mixed_precision="bf16", fsdp_config={**given, **more})


@dataclass(frozen=True)
class Loop:
    """A job: `trainer` has the Trainer's arguments, `accelerate` and `deepspeed` those tools' files.

    A loop of Accelerate or DeepSpeed has no `trainer`, a micro-batch of 2, and AdamW.
    """

    name: str
    model: str
    ranks: int
    trainer: dict[str, Any] | None = None
    accelerate: dict[str, Any] | None = None
    deepspeed: dict[str, Any] | None = None
    changed: dict[str, Any] = field(default_factory=dict)
    """Keys of the model's config."""
    peft: dict[str, Any] | None = None
    on: str = "cpu"

    @property
    def seq_len(self) -> int:
        return 128 if self.on == "cpu" else 512

    def files(self, folder: Path) -> list[str]:
        """Write the job's files and the model's config, as their user has them; returns the names for `--from`."""
        small = 2 if self.on == "cpu" else 4
        arguments = None if self.trainer is None else {
            "output_dir": str(folder / "out"), "per_device_train_batch_size": small,
            **({"use_cpu": True} if self.on == "cpu" else {}), **self.trainer,
        }  # fmt: skip
        found = {"args.json": arguments, "accelerate.yaml": self.accelerate, "ds_config.json": self.deepspeed}
        if self.deepspeed is not None and arguments is not None:
            arguments["deepspeed"] = str(folder / "ds_config.json")
        (folder / "config.json").write_text(json.dumps({**SIZES[self.model], **self.changed}))
        if self.peft is not None:
            (folder / "adapter_config.json").write_text(json.dumps(self.peft))
        for name, values in found.items():
            if values is not None:
                (folder / name).write_text(json.dumps(values))
        return [str(folder / name) for name, values in found.items() if values is not None]


def _loops() -> list[Loop]:
    on_cpu = [
        Loop("trainer, bf16, checkpointing", "llama", 1, {"bf16": True, **_CHECKPOINTED}),
        Loop("trainer, accumulation", "llama", 1, {"gradient_accumulation_steps": 4}, changed={"vocab_size": 8192}),
        Loop("trainer, bf16 weights", "llama", 1, {"bf16": True}, changed={"dtype": "bfloat16"}),
        Loop("trainer, AdamW by parameter", "llama", 1, {"optim": "adamw_torch"}),
        Loop("trainer, Adafactor", "llama", 1, {"optim": "adafactor"}),
        Loop("trainer, SGD", "gpt2", 1, {"optim": "sgd"}),
        Loop("trainer, DDP", "llama", 2, {}),
        Loop("trainer, DDP, checkpointing", "llama", 2, _CHECKPOINTED),
        Loop("trainer, DDP, bf16, accumulation", "gpt2", 2, {"bf16": True, **_ACCUMULATED}),
        Loop("trainer, ZeRO-1", "llama", 2, {}, deepspeed=_zero(1)),
        Loop("trainer, ZeRO-2", "llama", 2, {}, deepspeed=_zero(2)),
        Loop("trainer, ZeRO-2, bf16", "llama", 2, {"bf16": True}, deepspeed=_zero(2)),
        Loop("trainer, ZeRO-2, bf16, accumulation", "gpt2", 2, {"bf16": True, **_ACCUMULATED}, deepspeed=_zero(2)),
        Loop("trainer, ZeRO-3", "llama", 2, {}, deepspeed=_zero(3)),
        Loop("trainer, ZeRO-3, bf16, checkpointing", "llama", 2, {"bf16": True, **_CHECKPOINTED}, deepspeed=_zero(3)),
        Loop("trainer, masked words, DDP", "bert", 2, {}),
        Loop("trainer, masked words, ZeRO-2, bf16", "bert", 2, {"bf16": True}, deepspeed=_zero(2)),
        Loop("trainer, LoRA", "llama", 1, {}, peft=LORA),
        Loop("trainer, LoRA, DDP", "llama", 2, {}, peft=LORA),
        Loop("trainer, LoRA, ZeRO-2", "llama", 2, {}, deepspeed=_zero(2), peft=LORA),
        Loop("trainer, LoRA, ZeRO-3", "llama", 2, {}, deepspeed=_zero(3), peft=LORA),
        Loop("accelerate, DDP", "llama", 2, accelerate=_accelerate("MULTI_CPU", mixed_precision="no", use_cpu=True)),
        Loop(
            "accelerate, DDP, bf16", "gpt2", 2, accelerate=_accelerate("MULTI_CPU", mixed_precision="bf16",
            use_cpu=True),
        ),
        Loop("accelerate, one process, bf16", "llama", 1, accelerate=_accelerate("NO", mixed_precision="bf16",
             use_cpu=True)),
        Loop("deepspeed, ZeRO-1", "llama", 2, deepspeed=_plain(1)),
        Loop("deepspeed, ZeRO-2, bf16, accumulation", "llama", 2, deepspeed=_plain(2, **_BF16, **_ACCUMULATED)),
        Loop("deepspeed, ZeRO-2, clipping", "gpt2", 2, deepspeed=_plain(2, gradient_clipping=1.0)),
        Loop("deepspeed, ZeRO-3", "llama", 2, deepspeed=_plain(3)),
        Loop("deepspeed, ZeRO-3, bf16", "gpt2", 2, deepspeed=_plain(3, **_BF16)),
    ]  # fmt: skip
    half = {"bf16": True}
    on_a_card = [
        Loop("trainer, bf16", "llama-110m", 1, half),
        Loop("trainer, fp32, checkpointing", "gpt2-124m", 1, _CHECKPOINTED),
        Loop("trainer, DDP, bf16", "llama-110m", 2, half),
        Loop("trainer, DDP, fp32, accumulation", "gpt2-124m", 2, _ACCUMULATED),
        Loop("trainer, FSDP2, bf16", "llama-110m", 2, {**half, "fsdp": True}),
        Loop("trainer, FSDP2, fp32", "llama-110m", 2, {"fsdp": True}),
        Loop(
            "trainer, FSDP2, bf16, checkpointing", "llama-110m", 2,
            {**half, "fsdp": True, "fsdp_config": {"activation_checkpointing": True}},
        ),
        Loop(
            "trainer, FSDP2, bf16, kept", "llama-110m", 2,
            {**half, "fsdp": True, "fsdp_config": {"reshard_after_forward": False}},
        ),
        Loop("trainer, FSDP2, bf16, tied", "gpt2-124m", 2, {**half, "fsdp": True}),
        Loop("trainer, ZeRO-1, bf16", "llama-110m", 2, half, deepspeed=_zero(1)),
        Loop("trainer, ZeRO-2, bf16", "llama-110m", 2, half, deepspeed=_zero(2)),
        Loop("trainer, ZeRO-2, fp32, accumulation", "gpt2-124m", 2, _ACCUMULATED, deepspeed=_zero(2)),
        Loop("trainer, ZeRO-3, bf16", "llama-110m", 2, half, deepspeed=_zero(3)),
        Loop(
            "trainer, ZeRO-3, bf16, checkpointing", "gpt2-124m", 2, {**half, **_CHECKPOINTED}, deepspeed=_zero(3)
        ),
        Loop("trainer, LoRA, DDP, bf16", "llama-110m", 2, half, peft=LORA),
        Loop("trainer, LoRA, FSDP2, bf16", "llama-110m", 2, {**half, "fsdp": True}, peft=LORA),
        Loop("trainer, LoRA, ZeRO-2, bf16", "llama-110m", 2, half, deepspeed=_zero(2), peft=LORA),
        Loop("trainer, LoRA, ZeRO-3, bf16", "llama-110m", 2, half, deepspeed=_zero(3), peft=LORA),
        Loop("accelerate, DDP, bf16", "llama-110m", 2, accelerate=_accelerate("MULTI_GPU", mixed_precision="bf16")),
        Loop("accelerate, FSDP2, bf16", "llama-110m", 2, accelerate=_fsdp2()),
        Loop(
            "accelerate, FSDP2, bf16, loaded by rank 0", "llama-110m", 2,
            accelerate=_fsdp2(fsdp_cpu_ram_efficient_loading=True),
        ),
        Loop(
            "accelerate, ZeRO-3, bf16", "llama-110m", 2, accelerate=_accelerate("DEEPSPEED", mixed_precision="bf16",
            deepspeed_config={"zero_stage": 3, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}),
        ),
        Loop("deepspeed, ZeRO-1, bf16", "llama-110m", 2, deepspeed=_plain(1, **_BF16)),
        Loop("deepspeed, ZeRO-2, bf16, accumulation", "gpt2-124m", 2, deepspeed=_plain(2, **_BF16, **_ACCUMULATED)),
        Loop("deepspeed, ZeRO-3, bf16", "llama-110m", 2, deepspeed=_plain(3, **_BF16)),
    ]  # fmt: skip
    return [*on_cpu, *(Loop(**{**vars(one), "on": "emulated"}) for one in on_a_card)]


LOOPS = _loops()


class Jobs:
    """Processes that have the libraries imported and fork the ranks of jobs, one for each kind of job."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, int], subprocess.Popen[str]] = {}

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            assert server.stdin is not None
            server.stdin.close()  # it ends
            server.wait()

    def measure(self, loop: Loop, folder: Path) -> dict[str, Any]:
        """Peaks of a real run on the rank that takes the most, in bytes, or the last words of one that failed."""
        loop.files(folder)
        asked = {"seq_len": loop.seq_len, "tool": _tool(loop), "masked": loop.model == "bert", "peft": loop.peft,
                 "on": loop.on}  # fmt: skip
        (folder / "asked.json").write_text(json.dumps(asked))
        server = self._server(loop)
        assert server.stdin is not None
        began = time.perf_counter()
        server.stdin.write(json.dumps({"folder": str(folder), "limit_s": TIME_LIMIT_S}) + "\n")
        server.stdin.flush()
        ended = _ended(server)
        words = (folder / "said").read_text(errors="replace").splitlines()
        peaks = [json.loads(line) for line in words if line.startswith('{"allocated"')]
        if ended or len(peaks) < loop.ranks:
            said = [line.strip() for line in words if "Error" in line]
            return {"failed": ended or (said[-1] if said else "it said nothing")[:300]}
        most = {key: max(one[key] for one in peaks) for key in peaks[0]}
        return {**most, "seconds": round(time.perf_counter() - began, 1)}

    def _server(self, loop: Loop) -> subprocess.Popen[str]:
        kind = loop.on, loop.ranks
        if kind not in self._servers:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.other_loops_run", str(loop.ranks)]
            self._servers[kind] = subprocess.Popen(
                command, cwd=REPO, env=_environment(loop), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            _ended(self._servers[kind])
        return self._servers[kind]


def _ended(server: subprocess.Popen[str]) -> str:
    """Wait for the server's next answer."""
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith('{"ended"'):
            ended: str = json.loads(line)["ended"]
            return ended
    raise RuntimeError(f"the process of the jobs ended with {server.wait()}")


def _tool(loop: Loop) -> str:
    if loop.trainer is not None:
        return "trainer"
    return "accelerate" if loop.accelerate is not None else "deepspeed"


def _environment(loop: Loop) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    python = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    quiet = {"OMP_NUM_THREADS": "1", "DEEPSPEED_LOG_LEVEL": "error", "HF_HUB_OFFLINE": "1", "PATH": path}
    if loop.on == "cpu":
        device = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    else:
        from shardkit.hardware.cards import GPUS

        from .gpu.child import emulated_card

        device = emulated_card(GPUS[CARD], expandable=False)  # torch's default: their launchers set nothing
        device["EMUCUDA_DEVICES"] = str(loop.ranks)
    return {**os.environ, "PYTHONPATH": python, **quiet, **device}


def predict(loop: Loop, folder: Path) -> dict[str, Any]:
    """Peaks that `shardkit plan --from` predicts, or the reason why it does not."""
    from shardkit.errors import ShardkitError
    from shardkit.foreign.translate import read_job
    from shardkit.plan.client import plan
    from shardkit.plan.target import choose_target

    names = loop.files(folder)
    more = {} if loop.peft is None else {"peft": str(folder / "adapter_config.json")}
    said = [f"train.seq_len={loop.seq_len}"]
    said += ["train.micro_batch_size=2"] if _tool(loop) == "accelerate" else []
    try:
        job = read_job(names, str(folder), loop.ranks, **more)
        config = job.load(said if loop.on == "emulated" or loop.trainer or loop.accelerate else [*said, _CPU]).config
        card = None if loop.on == "cpu" else CARD
        target = choose_target(config, loop.ranks, loop.ranks, card, expandable=job.expandable)
        estimate = plan(config, target, loop=job.loop)
    except (ShardkitError, TypeError) as error:
        return {"failed": str(error)[:300]}
    peak = estimate.peak
    return {"allocated": peak.allocated, "reserved": peak.reserved, "phase": peak.phase}


_CPU = "run.device=cpu"


def place(on: str) -> Path:
    return (RESULTS if on == "cpu" else RESULTS / "emulated") / "other_loops.json"


def main() -> None:
    args = options(
        __doc__,
        emulated=Option(False, "the cases on emulated cards"),
        only=Option("", "cases whose names contain this"),
        again=Option(False, "measure again what is recorded"),
        predict=Option(False, "predict all again, measure nothing"),
        measure=Option(False, "predict nothing"),
        limit=LIMIT,
    )
    on = "emulated" if args.emulated else "cpu"
    path = place(on)
    held: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    end = time.monotonic() + args.limit
    with Jobs() as jobs:
        for loop in LOOPS:
            if loop.on != on or args.only not in loop.name or time.monotonic() > end:
                continue
            found = held["cases"].setdefault(loop.name, {"model": loop.model, "ranks": loop.ranks})
            measures = not args.predict and (args.again or "allocated" not in found.get("measured", {}))
            predicts = args.predict or (not args.measure and "allocated" not in found.get("predicted", {}))
            with tempfile.TemporaryDirectory() as folder:
                if measures:
                    found["measured"] = jobs.measure(loop, Path(folder))
                    held["measured_at"] = environment()
                if predicts:
                    found["predicted"] = predict(loop, Path(folder))
            if measures or predicts:
                held["environment"] = environment()
                write_json(path, held)
                print(f"{loop.name:45s} {loop.model:11s} {loop.ranks}  {_errors(found)}", flush=True)


def _errors(found: dict[str, Any]) -> str:
    for kind in ("measured", "predicted"):
        if "failed" in found.get(kind, {"failed": "not run"}):
            return f"{kind}: {found.get(kind, {}).get('failed', 'not run')}"
    shown = [
        f"{key} {100 * (found['predicted'][key] / found['measured'][key] - 1):+7.3f} %"
        for key in ("allocated", "reserved")
        if found["measured"].get(key)
    ]
    return "  ".join(shown) + f"  in {found['predicted']['phase']}"


if __name__ == "__main__":
    main()
