"""Small folders as Hugging Face publishes them, and runs that begin with them."""

from __future__ import annotations

import gc
import pydoc
from pathlib import Path
from typing import Any

import torch

from shardkit.run.job import start
from shardkit.run.trainer import Trainer

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"


def make_tokenizer(folder: Path) -> Any:
    """A BPE tokenizer of 300 tokens, trained on the standard library's text, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([Path(pydoc.__file__).read_text()], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_folder(folder: Path, kind: str) -> Any:
    """A model's folder, in shards; returns the model.

    Args:
        kind: `llama` (tied embeddings, bf16, a tokenizer), `qwen3` (a head of its own, a tokenizer), `mixtral` (experts
            that transformers 5 fuses), or `gpt2-base` (saved without its head, so no name has the prefix
            `transformer.`).
    """
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2-base":
        config = transformers.GPT2Config(
            vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
        )
    elif kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False)
    else:
        config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if kind == "llama":
        model.to(torch.bfloat16)
        model.generation_config.temperature, model.generation_config.do_sample = 0.5, True
    saved = model.transformer if kind == "gpt2-base" else model
    saved.save_pretrained(folder, **({"max_shard_size": "20KB"} if kind in ("llama", "mixtral") else {}))
    if kind in ("llama", "qwen3"):
        make_tokenizer(folder)
    if kind == "llama":
        (folder / "LICENSE").write_text("for tests\n")
    return model


def settings(folder: str, root: str, **extra: Any) -> dict[str, Any]:
    return {
        "run.device": "cpu", "run.dir": f"{root}/run", "task.name": "hf_causal_lm", "model.init_from": folder,
        "data.path": f"{root}/tokens.bin", "train.max_steps": 1, "train.micro_batch_size": 2, "train.seq_len": 16,
        "train.eval_samples": 4, "optim.lr": 0.0, "optim.weight_decay": 0.0, "logging.tensorboard": False, **extra,
    }  # fmt: skip


def write_tokens(root: Path) -> None:
    """A corpus of token ids below 300."""
    ids = torch.randint(0, 300, (2000,), generator=torch.Generator().manual_seed(0))
    (root / "tokens.bin").write_bytes(ids.to(torch.uint16).numpy().tobytes())


def train_all(cases: list[tuple[str, dict[str, Any]]], root: str) -> list[tuple[float, int]]:
    """A step of each (folder, settings), each in a run directory of its own; the losses, and the bytes read.

    Buckets and messages are so small that tensors are cut into several.
    """
    from shardkit.checkpoint import node_reads
    from shardkit.checkpoint.formats import start as loading

    out, whole, read = [], loading.load_weights, []
    sizes = loading.BUCKET_BYTES, node_reads.MESSAGE_BYTES
    loading.BUCKET_BYTES, node_reads.MESSAGE_BYTES = 2**14, 2**12

    def counted(*args: Any) -> Any:
        read.append(whole(*args))
        return read[-1]

    loading.load_weights = counted
    try:
        for index, (folder, extra) in enumerate(cases):
            with start(None, settings(folder, root, **{"run.dir": f"{root}/run-{index}", **extra})) as job:
                loss = list(Trainer(job).recorded_steps())[-1]["loss"]
                out.append((loss, read[-1].bytes_read))
            gc.collect()
    finally:
        loading.load_weights = whole
        loading.BUCKET_BYTES, node_reads.MESSAGE_BYTES = sizes
    return out
