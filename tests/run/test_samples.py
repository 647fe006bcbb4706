"""Texts at an evaluation are those of the model as others would load it, under every engine."""

from __future__ import annotations

import json
import pydoc
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.checkpoint.formats.convert import convert
from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.report.page import run_page
from shardkit.report.read import read_run
from shardkit.tasks.hf_causal_lm import HFCausalLM
from shardkit.tasks.load import read_prompts
from tests.checkpoint.formats import hub
from tests.ranks import run_ranks
from tests.strategies.cases import PARTITION_ALL

PROMPTS = ["import os", "def main(args):", "class"]
BUDGET = 5
TEXT = str(Path(pydoc.__file__))
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": {"parallel.strategy": "fsdp"},
    "zero3": {"parallel.strategy": "zero3", "parallel.ds_config": PARTITION_ALL},
    "lora": {"parallel.strategy": "fsdp", "adapter.type": "lora", "data.packing": "packed", "data.path": TEXT},
    "ddp": {"parallel.strategy": "ddp", "model.loss_chunk_size": 0, "train.sample_temperature": 1.0},
}


def train_all(root: str) -> list[tuple[int, ...]]:
    """Two steps under each engine, an evaluation after each; the shapes that were asked for logits."""
    shapes: set[tuple[int, ...]] = set()
    whole = HFCausalLM.next_logits

    def noting(self: HFCausalLM, model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = whole(self, model, tokens, positions)
        shapes.add((*tokens.shape, *logits.shape))
        return logits

    HFCausalLM.next_logits = noting
    try:
        common = {
            "train.sample_prompts": PROMPTS, "train.sample_tokens": BUDGET, "train.max_steps": 2, "train.seq_len": 24,
            "train.eval_every": 1, "optim.lr": 1e-2, "train.micro_batch_size": 1, "logging.tensorboard": True,
        }  # fmt: skip
        hub.train_all([(f"{root}/llama", {**common, **extra}) for extra in ENGINES.values()], root)
    finally:
        HFCausalLM.next_logits = whole
    return sorted(shapes)


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_engine_writes_what_the_exported_model_writes(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hub.write_tokens(tmp_path)
    hub.make_folder(tmp_path / "llama", "llama")
    shapes, again = run_ranks(2, "tests.run.test_samples:train_all", root=str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "llama")
    longest = max(len(tokenizer(prompt).input_ids) for prompt in PROMPTS)
    assert shapes == again == [(1, longest + BUDGET, 1, 300)], "a micro-batch of one shape, logits of one position"
    for index, engine in enumerate(("fsdp", "zero3", "lora")):
        run = tmp_path / f"run-{index}"
        found = samples_of(run)
        assert [(s["step"], s["prompt"]) for s in found] == [(step, p) for step in (1, 2) for p in PROMPTS]
        convert(run, "safetensors", tmp_path / engine, merge=engine == "lora")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / engine)
        for sample in found[len(PROMPTS) :]:
            ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids
            whole = model.generate(ids, do_sample=False, max_new_tokens=BUDGET, temperature=None)
            new = [token for token in whole[0, ids.shape[1] :].tolist() if token != tokenizer.eos_token_id]
            assert sample["text"] == tokenizer.decode(new) and sample["tokens"] == len(new), engine
    drawn = [sample["text"] for sample in samples_of(tmp_path / "run-3")]
    assert drawn != [sample["text"] for sample in samples_of(tmp_path / "run-0")]

    events = EventAccumulator(str(tmp_path / "run-0" / "tensorboard"))
    events.Reload()
    assert "samples/0/text_summary" in events.Tags()["tensors"]
    page = run_page(read_run(tmp_path / "run-0"), tmp_path / "report.html")
    assert "def main(args):" in page and "Step 2" in page


def test_prompts_that_cannot_be_continued_are_refused() -> None:
    settings = {"train.sample_prompts": ["a" * 30], "train.sample_tokens": 8, "train.seq_len": 32}
    with pytest.raises(ConfigError, match=r"sample_prompts\[0\] has 30 tokens.*\n  fix: shorten"):
        read_prompts(load_config(None, settings).config, HFCausalLM)
    with pytest.raises(ConfigError, match=r"has no next_logits"):
        read_prompts(load_config(None, settings).config, object())
    fitting = load_config(None, {**settings, "train.seq_len": 38}).config
    prompts = read_prompts(fitting, HFCausalLM)
    assert prompts is not None and prompts.ids == ([97] * 30,) and prompts.decode([104, 105, 300]) == "hi"
