"""What `benchmarks.sft` trains on: conversations about Python's standard library, a tokenizer and a small Llama."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .models import llama

VOCABULARY = 4096
LONGEST = 512  # tokens of a conversation; longer ones are left out, so that nobody truncates
ENDED, PADDING = "<|im_end|>", "<|pad|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES = llama(256, 704, depth=4, heads=4, kv_heads=2, positions=1024, tie_word_embeddings=False)


def conversations() -> Iterator[dict[str, Any]]:
    """{"messages": [user, assistant]}: what a function of the standard library is called with, and its docstring."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if {"site-packages", "test", "tests", "idlelib"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):  # files that test the tokenizer of Python itself
            continue
        module = ".".join(parts).removesuffix(".py")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                question = f"Describe {module}.{node.name}({ast.unparse(node.args)})."
                yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": text}]}


def write(folder: Path) -> tuple[Path, Path]:
    """(the model's folder with its tokenizer, the conversations as JSON lines), made anew."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    every = list(conversations())
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PADDING, "<|im_start|>", ENDED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator((m["content"] for conversation in every for m in conversation["messages"]), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=ENDED, pad_token=PADDING)
    tokenizer.chat_template = TEMPLATE
    model_dir = folder / "model"
    tokenizer.save_pretrained(model_dir)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, **SIZES,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model_dir)

    texts = tokenizer.apply_chat_template([conversation["messages"] for conversation in every], tokenize=False)
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    data = folder / "conversations.jsonl"
    with data.open("w") as stream:
        for conversation, length in zip(every, lengths, strict=True):
            if length <= LONGEST:
                stream.write(json.dumps(conversation) + "\n")
    return model_dir, data


def write_adapter(model_dir: Path, folder: Path, settings: Sequence[str]) -> None:
    """Initial LoRA weights as peft saves them: those that shardkit draws, after a step that changes nothing.

    Args:
        settings: shardkit's keys of the adapter.
    """
    run = folder.parent / "initial"
    step = ["train.max_steps=1", "train.seq_len=64", "train.eval_samples=0", "optim.lr=0"]
    shardkit = [sys.executable, "-m", "shardkit.cli"]
    trained = [
        sys.executable, "-m", "shardkit.train", "task.name=hf_causal_lm", f"model.init_from={model_dir}",
        "run.device=cpu", f"run.dir={run}", "parallel.strategy=single", *step, *settings,
    ]  # fmt: skip
    subprocess.run(trained, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*shardkit, "convert", str(run), "--to", "peft", "--out", str(folder)], check=True)
