"""Write what `first_hour.sh` starts from: a tiny Llama folder and a file of conversations.

    python examples/first_hour.py FOLDER

The model has two layers, 512 tokens, and a few seconds of pretraining on sums as plain text; the conversations ask for
sums. A real start is a folder that `save_pretrained` wrote, and conversations of your own. Needs transformers and
tokenizers, and nothing from the network.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from pathlib import Path

for library in ("torchao", "torch.utils._pytree"):  # their warnings while transformers loads concern no user of it
    logging.getLogger(library).setLevel(logging.ERROR)
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which transformers imports, warns where it has to guess

# ruff: noqa: E402
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Sums and differences, as a user asks for them and an assistant answers."""
    rng = random.Random(0)
    found = []
    for _ in range(count):
        a, b = rng.randrange(50), rng.randrange(50)
        sign, result = rng.choice([("+", a + b), ("-", a - b)])
        question = {"role": "user", "content": f"What is {a} {sign} {b}?"}
        found.append([question, {"role": "assistant", "content": f"{a} {sign} {b} = {result}"}])
    return found


def write_tokenizer(folder: Path, texts: list[str]) -> PreTrainedTokenizerFast:
    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    rules.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    rules.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="<|pad|>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str], steps: int = 100) -> None:
    """Train on whole texts, 32 a step: the weights of a folder are worth something."""
    rows = tokenizer(texts, padding=True, return_tensors="pt")
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        batch = torch.arange(step * 32, step * 32 + 32) % len(texts)
        loss = model(rows["input_ids"][batch], attention_mask=rows["attention_mask"][batch], labels=labels[batch]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main(folder: Path) -> None:
    """Write FOLDER/models/tiny-llama and FOLDER/data/conversations.jsonl."""
    chats = conversations(300)
    texts = [" ".join(message["content"] for message in chat) for chat in conversations(2000)]
    data = folder / "data" / "conversations.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    torch.manual_seed(0)
    disable_progress_bar()
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    pretrain(model, write_tokenizer(folder / "models" / "tiny-llama", texts), texts)
    model.save_pretrained(folder / "models" / "tiny-llama")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
