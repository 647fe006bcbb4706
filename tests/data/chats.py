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


@cache
def _rules() -> str:
    """A byte-level BPE of 512 ids, trained on a few modules of the standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    modules = (Path(json.__file__).parent / "decoder.py", Path(random.__file__))
    tokenizer.train_from_iterator([path.read_text() for path in modules], trainer)
    return str(tokenizer.to_str())


def write_tokenizer(folder: Path, template: str | None = PLAIN, **settings: Any) -> Path:
    """A folder with a tokenizer of 512 ids."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_rules())
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
