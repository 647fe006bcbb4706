"""Small tokenizers, chat templates and data sets of conversations for tests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
PLAIN = (
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}"
    "{{ '<|im_start|>' ~ message.role ~ '\n' }}{{ message.content ~ '<|im_end|>' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML."""
MARKED = PLAIN.replace(
    "{{ message.content ~ '<|im_end|>' }}",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content ~ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content ~ '<|im_end|>' }}{% endif %}",
)
"""The same text, with the assistant's parts marked."""


KINDS = ("byte_level", "byte_level_prefix", "metaspace", "metaspace_unigram", "prepend")
"""Kinds of tokenizers: GPT-2's and Llama 3's; RoBERTa's, which trims offsets; newer and older Llama 2's; T5's."""


@cache
def _rules(kind: str = "byte_level") -> str:
    """A tokenizer of at most 512 ids, trained on a few modules of the standard library."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    unigram = kind == "metaspace_unigram"
    tokenizer = Tokenizer(models.Unigram() if unigram else models.BPE(byte_fallback=kind in ("metaspace", "prepend")))
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    special, alphabet = SPECIAL, list[str]()
    if kind.startswith("byte_level"):
        prefix = kind == "byte_level_prefix"
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if prefix:
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    elif kind == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        special = [*SPECIAL, *bytes_]
    else:
        scheme = "always" if unigram else "first"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        special = SPECIAL if unigram else [*SPECIAL, *bytes_]
    keys: dict[str, Any] = {"vocab_size": 512, "special_tokens": special, "initial_alphabet": alphabet}
    trainer: Any = trainers.BpeTrainer(show_progress=False, **keys)
    if unigram:
        trainer = trainers.UnigramTrainer(show_progress=False, unk_token=SPECIAL[3], **keys)
    modules = (Path(json.__file__).parent / "decoder.py", Path(random.__file__))
    texts = [path.read_text() for path in modules]
    tokenizer.train_from_iterator([line for text in texts for line in text.splitlines(kind == "prepend")], trainer)
    return str(tokenizer.to_str())


def write_tokenizer(folder: Path, template: str | None = PLAIN, kind: str = "byte_level", **settings: Any) -> Path:
    """A folder with a tokenizer of at most 512 ids, one of `KINDS`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_rules(kind))
    keys = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "pad_token": SPECIAL[3], **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def conversation(number: int, turns: int = 1) -> list[dict[str, str]]:
    """A conversation with its number in every message."""
    messages = [{"role": "system", "content": f"be brief in {number}"}] if number % 2 else []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"ask {number} for turn {turn}"})
        messages.append({"role": "assistant", "content": f"answer {number} " + "word " * (number % 7) + f"end {turn}"})
    return messages


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """JSON lines; text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
