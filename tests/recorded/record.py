"""Run directories of earlier versions: how they were made, and how they go on under the present code.

`python -m tests.recorded.record FOLDER` trains each of CASES twice, without a stop and stopped in the middle of an
epoch, and leaves the stopped run directories, their data and what the other run did after the stop (`expected.json`).
`unreleased/` holds those of commit de1545f4, after 0.2.0. They are never recorded again: a run that no longer goes on
as it says is a defect.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "unreleased"
STEPS, STOP = 6, 3
_LLAMA = {
    "model_type": "llama", "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
    "vocab_size": 512, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 3,
}  # fmt: skip
_COMMON: dict[str, Any] = {
    "run.device": "cpu", "data.cache_dir": "cache", "train.max_steps": STEPS, "train.seq_len": 24,
    "train.global_batch_size": 4, "train.micro_batch_size": 1, "train.eval_samples": 4, "train.eval_every": 2,
    "optim.lr": 1e-2, "optim.warmup_steps": 2, "checkpoint.every_steps": STOP, "checkpoint.keep_last": 1,
    "logging.tensorboard": False, "parallel.strategy": "single",
}  # fmt: skip
_BYTES = {
    "task.name": "causal_lm", "model.d_model": 4, "model.n_layers": 1, "model.n_heads": 1, "model.max_seq_len": 24,
    "model.tie_weights": True, "data.path": "inputs/text",
}  # fmt: skip
_TEXT = {"task.name": "hf_causal_lm", "model.hf": _LLAMA, "data.tokenizer": "inputs/model"}
_CHAT = {**_TEXT, "data.path": "inputs/chats.jsonl", "train.seq_len": 48}
_PICTURES = {"train.seq_len": None, "data.cache_dir": None, "data.crops_per_image": 2}
_SGD = {"optim.name": "sgd", "optim.lr": 0.1}  # small checkpoints where the data are what matters
_VIT = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}

CASES: dict[str, dict[str, Any]] = {
    "bytes_single": {**_BYTES, "model.dropout": 0.1},
    "bytes_ddp": {**_BYTES, "parallel.strategy": "ddp", "data.workers": 1},
    "bytes_fsdp": {**_BYTES, "parallel.strategy": "fsdp", "train.ema_decay": 0.5},
    "bytes_zero2": {**_BYTES, "parallel.strategy": "zero2"},
    "bytes_zero3": {**_BYTES, "parallel.strategy": "zero3"},
    "bin": {**_BYTES, **_SGD, "data.path": "inputs/tokens.bin", "data.val_fraction": 0.2},
    "chat_packed": {**_CHAT, "parallel.strategy": "fsdp", "data.packing": "packed", "train.seq_len": 96},
    "chat_padding_free": {**_CHAT, **_SGD, "data.packing": "padding_free", "train.micro_batch_size": 2},
    "chat_split": {
        **_CHAT, **_SGD, "data.path": "inputs/prompts.jsonl", "data.long_samples": "split", "train.seq_len": 12,
    },
    "streamed": {**_CHAT, "parallel.strategy": "ddp", "data.streaming": True, "data.val_path": "inputs/prompts.jsonl"},
    "parquet": {**_TEXT, **_SGD, "data.path": "inputs/texts.parquet", "data.columns": {"text": "body"}},
    "corpus": {**_CHAT, **_SGD, "data.path": "inputs/corpus", "data.tokenizer": None},
    "mixture": {
        **_CHAT, **_SGD, "data.path": None,
        "data.sources": [{"path": "inputs/chats.jsonl", "weight": 0.5}, {"path": "inputs/prompts.jsonl", "weight": 2}],
        "data.packing": "packed", "train.seq_len": 96,
    },
    "lora": {**_CHAT, "model.hf": {}, "model.init_from": "inputs/model", "parallel.strategy": "fsdp",
             "adapter.type": "lora", "adapter.r": 2},
    "masked": {
        **_SGD, "task.name": "hf_masked_lm", "data.path": "inputs/text",
        "model.hf": {"model_type": "bert", "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1,
                     "num_attention_heads": 1, "vocab_size": 257, "max_position_embeddings": 24},
    },
    "vit": {**_PICTURES, **_SGD, "task.name": "image_classification", "model.preset": "vit-debug", "model.hf": _VIT},
    "swin2sr": {
        **_PICTURES, **_SGD, "task.name": "super_resolution", "model.preset": "swin2sr-debug", "data.crop_size": 16,
        "model.hf": {"embed_dim": 4, "depths": [1], "num_heads": [1]},
    },
}  # fmt: skip
RANKS = {name: 1 if keys.get("parallel.strategy", "single") == "single" else 2 for name, keys in CASES.items()}

OTHERS: dict[str, list[str]] = {
    "bytes_ddp": ["single", "zero3"],
    "bytes_fsdp": ["single", "zero2"],
    "bytes_zero2": ["single", "fsdp"],
    "bytes_zero3": ["single", "ddp"],
    "bin": ["ddp"],
    "chat_packed": ["single", "zero2"],
    "streamed": ["single"],
    "mixture": ["fsdp"],
    "lora": ["single"],
}
"""The engines under which a recorded run also goes on, `single` on one rank and the others on two."""


def write_inputs(folder: Path) -> None:
    """The data of all cases."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.data.chats import conversation, write_lines, write_tokenizer
    from tests.texts import write_files

    texts = {f"{i}.txt": f"number {i} comes before number {i + 1}\n" * 4 for i in range(20)}
    write_files(folder / "text", texts)
    write_lines(folder / "chats.jsonl", ({"messages": conversation(n, 1 + n % 2)} for n in range(40)))
    write_lines(
        folder / "prompts.jsonl",
        ({"prompt": f"ask {n}", "completion": f"answer {n}" + " word" * (n % 9)} for n in range(30)),
    )
    pq.write_table(pa.table({"body": [f"row {n}" + f" has {n * n}" * (n % 5) for n in range(60)]}),
                   folder / "texts.parquet")  # fmt: skip
    np.random.default_rng(0).integers(0, 256, 1000).astype("uint16").tofile(folder / "tokens.bin")
    write_tokenizer(folder / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**_LLAMA)).save_pretrained(folder / "model")


class Stopped(Exception):
    """Stands for a kill: none of the trainer's own code runs after it but `finally`."""


def train(config: Any, stop_after: int | None = None) -> list[dict[str, Any]]:
    """The steps that a run takes now: what the loss, the gradients and the order of the data show of each."""
    from shardkit.run.job import start
    from shardkit.run.trainer import Trainer

    steps = []
    try:
        with start(config) as job:
            for record in Trainer(job).recorded_steps():
                steps.append({key: record[key] for key in ("step", "loss", "grad_norm", "val_loss") if key in record})
                if record["step"] == stop_after:
                    raise Stopped
    except Stopped:
        pass
    gc.collect()
    return steps


def record(folder: str, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """On the ranks of these cases: each one's steps after the stop, whose run directory stays."""
    from shardkit.config.load import load_config

    os.chdir(folder)
    expected = {}
    for name in names:
        keys = {key: value for key, value in (_COMMON | CASES[name]).items() if value is not None}
        steps = train(load_config(None, keys | {"run.dir": f"uninterrupted/{name}"}))
        train(load_config(None, keys | {"run.dir": name}), STOP + 1)  # a step's record precedes its save
        expected[name] = steps[STOP:]
    return expected


def go_on(folder: str, runs: list[tuple[str, str]]) -> dict[tuple[str, str], list[dict[str, Any]] | str]:
    """On the ranks of these runs: the steps of each (case, engine), or the traceback of its failure."""
    from shardkit.config.load import load_config

    os.chdir(folder)
    results: dict[tuple[str, str], list[dict[str, Any]] | str] = {}
    for name, strategy in runs:
        overrides: dict[str, Any] = {"run.resume": True, "run.dir": f"resumed/{name}-{strategy}"}
        if int(os.environ["RANK"]) == 0:
            shutil.copytree(name, overrides["run.dir"])
        import torch.distributed as dist

        dist.barrier()
        if strategy:
            overrides["parallel.strategy"] = strategy
        try:
            results[name, strategy] = train(load_config(f"{name}/config.yaml", overrides))
        except Exception:
            results[name, strategy] = traceback.format_exc()
    return results


def main(folder: Path) -> None:
    """Record everything into a new folder."""
    from tests.commands import python_m
    from tests.ranks import run_ranks

    write_inputs(folder / "inputs")
    python_m("shardkit.data.tokenize", "inputs/chats.jsonl", "inputs/corpus", "inputs/model", cwd=folder, code=0)
    expected = {}
    for world in (1, 2):
        names = [name for name, ranks in RANKS.items() if ranks == world]
        target = "tests.recorded.record:record"
        expected |= run_ranks(world, target, timeout=900, folder=str(folder), names=names)[0]
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    for surplus in ("uninterrupted", "cache"):
        shutil.rmtree(folder / surplus)
    for path in folder.glob("*/memory.jsonl"):  # no run reads it
        if path.parent.name != "bytes_ddp":
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
