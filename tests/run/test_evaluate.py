"""An evaluation takes the same samples whatever the ranks; its texts are those of the exported model; resumed data."""

from __future__ import annotations

import gc
import json
import math
import os
import pydoc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.checkpoint.formats.convert import convert
from shardkit.config.load import load_config
from shardkit.errors import ConfigError, DataError, ShardkitError
from shardkit.report.page import run_page
from shardkit.report.read import read_run
from shardkit.tasks.hf_text import HFCausalLM
from shardkit.tasks.load import read_prompts
from tests.checkpoint.formats import hub
from tests.commands import python_m
from tests.data.chats import PLAIN, conversation, write_lines, write_tokenizer
from tests.ranks import run_ranks
from tests.strategies.cases import PARTITION_ALL


@pytest.mark.slow
def test_each_source_gets_its_loss_and_perplexity(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_tokenizer(tmp_path / "tokenizer")
    talk = [{"messages": conversation(number)} for number in range(40)]
    tasks = [{"prompt": f"{number} + 1 =", "completion": f" {number + 1}"} for number in range(30)]
    sources = [
        {"path": str(write_lines(tmp_path / "talk.jsonl", talk)), "weight": 2.0},
        {"path": str(write_lines(tmp_path / "sums.jsonl", tasks)), "name": "sums"},
    ]
    settings = [
        "task.name=hf_causal_lm", "model.preset=llama-debug", "model.hf={vocab_size: 512}", "run.device=cpu",
        f"run.dir={tmp_path}/run", f"data.tokenizer={tmp_path}/tokenizer", f"data.sources={json.dumps(sources)}",
        f"data.cache_dir={tmp_path}/cache", "data.val_fraction=0.3", "train.max_steps=2", "train.micro_batch_size=2",
        "train.seq_len=64", "parallel.strategy=ddp",
    ]  # fmt: skip
    done = python_m("shardkit.train", *settings, ranks=2, code=0)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])

    parts = HFCausalLM(load_config(None, settings).config).val_parts()
    targets = {name: sum(int((one["targets"] >= 0).sum()) for one in part) for name, part in parts.items()}
    assert set(targets) == {"talk.jsonl", "sums"} and min(targets.values()) > 0
    together = sum(n * last[f"val_loss_{name}"] for name, n in targets.items()) / sum(targets.values())
    assert last["val_loss"] == pytest.approx(together, rel=1e-6)
    assert last["val_loss_sums"] != pytest.approx(last["val_loss_talk.jsonl"], rel=1e-3)
    for key in ("", "_sums", "_talk.jsonl"):
        assert last[f"val_perplexity{key}"] == pytest.approx(math.exp(last[f"val_loss{key}"]))
    assert "validation perplexity sums" in done.stdout


CASES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel.strategy": "ddp"},
    "fsdp": {"parallel.strategy": "fsdp"},
    "zero3": {"parallel.strategy": "zero3", "parallel.ds_config": PARTITION_ALL},
    "ddp, some": {"parallel.strategy": "ddp", "train.eval_samples": 7},
    "fsdp, packed": {"parallel.strategy": "fsdp", "data.packing": "packed"},
    "ddp, some, streaming": {"parallel.strategy": "ddp", "train.eval_samples": 7, "data.streaming": True},
}


def val_losses(root: str) -> dict[str, list[float]]:
    """Each case's validation loss of the same weights with micro-batches of 1 and of 3 samples."""
    import torch.distributed as dist

    from shardkit.run.evaluate import evaluate
    from shardkit.run.job import start
    from shardkit.run.trainer import Trainer

    found = {}
    for case, settings in CASES.items():
        keys = {
            "model.vocab_size": 512, "model.d_model": 32, "model.n_layers": 1, "model.n_heads": 2,
            "train.seq_len": 96, "data.path": f"{root}/train.jsonl", "data.val_path": f"{root}/val.jsonl",
            "data.tokenizer": f"{root}/tokenizer", "data.cache_dir": f"{root}/cache", "data.tokenize_workers": 1,
            "data.workers": 0, "run.dir": f"{root}/{case}-{dist.get_world_size()}",
            "run.device": "cpu", "logging.tensorboard": False, "train.micro_batch_size": 1, **settings,
        }  # fmt: skip
        with start(None, keys) as job:
            trainer = Trainer(job)
            found[case] = []
            for micro_batch in (1, 3):
                train = job.config.train.model_copy(update={"micro_batch_size": micro_batch})
                job.loaded = replace(job.loaded, config=job.config.model_copy(update={"train": train}))
                found[case].append(evaluate(job, trainer.task, trainer.val_data)["val_loss"])
        gc.collect()
    return found


@pytest.mark.slow
def test_the_validation_loss_is_the_same_for_any_ranks_and_micro_batch(tmp_path: Path) -> None:
    """11 conversations of different lengths: neither ranks nor micro-batches divide them, nor 7 of them."""
    pytest.importorskip("transformers")
    write_tokenizer(tmp_path / "tokenizer")
    for name, numbers in (("train", range(40)), ("val", range(40, 51))):
        rows = ({"messages": conversation(number, turns=1 + number % 3)} for number in numbers)
        write_lines(tmp_path / f"{name}.jsonl", rows)
    found = {world: run_ranks(world, "tests.run.test_evaluate:val_losses", root=str(tmp_path)) for world in (1, 2, 4)}
    for case in CASES:
        losses = [loss for ranks in found.values() for rank in ranks for loss in rank[case]]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6), case
    alone = found[1][0]
    assert alone["ddp, some"][0] != pytest.approx(alone["ddp"][0], rel=1e-5), "7 samples are not 11"


def settings(root: Path, **more: Any) -> dict[str, Any]:
    return {
        "model.vocab_size": 512, "model.d_model": 32, "model.n_layers": 1, "model.n_heads": 2, "train.seq_len": 48,
        "train.max_steps": 3, "train.micro_batch_size": 2, "train.eval_samples": 4, "parallel.strategy": "ddp",
        "data.path": str(root / "chat.jsonl"), "data.tokenizer": str(root / "tok"),
        "data.cache_dir": str(root / "cache"),
        "run.dir": str(root / "run"), "run.device": "cpu", "optim.lr": 1e-2, **more,
    }  # fmt: skip


def train(keys: dict[str, Any], of_rank: list[dict[str, Any]] | None = None) -> str:
    """Train by `keys`, and by those of the rank; returns the error."""
    from shardkit.config.load import load_config
    from shardkit.run.job import start
    from shardkit.run.trainer import Trainer

    if of_rank is not None:
        keys = keys | of_rank[int(os.environ["RANK"])]
    try:
        with start(load_config(None, keys)) as job:
            Trainer(job).fit()
    except ShardkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
def test_two_ranks_tokenise_once_and_resume_refuses_other_data(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_tokenizer(tmp_path / "tok")
    write_lines(tmp_path / "chat.jsonl", ({"messages": conversation(i)} for i in range(80)))
    assert run_ranks(2, "tests.run.test_evaluate:train", keys=settings(tmp_path)) == ["", ""]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3 and losses[2] < losses[0]
    other = (tmp_path / "chat.jsonl").read_text().replace("answer 7 ", "answer 9 ")
    (tmp_path / "other.jsonl").write_text(other)
    of_rank = [{}, {"data.path": str(tmp_path / "other.jsonl")}]
    mixture = settings(tmp_path, **{"run.dir": str(tmp_path / "mixture")})
    for said in run_ranks(2, "tests.run.test_evaluate:train", keys=mixture, of_rank=of_rank):
        assert re.search(r"ranks do not have the same data.*mixture: \w+ on 1 rank: 0 \(.+\); .*: 1 \(", said)
    again = settings(tmp_path, **{"run.resume": True, "train.max_steps": 5})
    assert run_ranks(2, "tests.run.test_evaluate:train", keys=again) == ["", ""]
    (tmp_path / "other.jinja").write_text(PLAIN.replace("<|im_end|>", "<|endoftext|>"))
    changed = {**again, "train.max_steps": 7, "data.chat_template": str(tmp_path / "other.jinja")}
    for said in run_ranks(2, "tests.run.test_evaluate:train", keys=changed):
        assert said.startswith(f"{DataError.__name__}: the data is not the one that the checkpoint was trained with")
    write_tokenizer(tmp_path / "tok", eos_token="<|im_end|>")
    for said in run_ranks(2, "tests.run.test_evaluate:train", keys={**again, "train.max_steps": 7}):
        assert said.startswith(f"{DataError.__name__}: the tokenizer is not the one")


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
    shapes, again = run_ranks(2, "tests.run.test_evaluate:train_all", root=str(tmp_path))
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
