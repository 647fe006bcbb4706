"""An evaluation takes the same samples whatever the ranks, and tells each source's loss."""

from __future__ import annotations

import gc
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardkit.config.load import load_config
from shardkit.errors import DataError, ShardkitError
from shardkit.tasks.hf_causal_lm import HFCausalLM
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
        assert re.search(r"ranks do not have the same data.*mixture: digest \w+ on 1 rank: 0 \(.+\); .*: 1 \(", said)
    again = settings(tmp_path, **{"run.resume": True, "train.max_steps": 5})
    assert run_ranks(2, "tests.run.test_evaluate:train", keys=again) == ["", ""]
    (tmp_path / "other.jinja").write_text(PLAIN.replace("<|im_end|>", "<|endoftext|>"))
    changed = {**again, "train.max_steps": 7, "data.chat_template": str(tmp_path / "other.jinja")}
    for said in run_ranks(2, "tests.run.test_evaluate:train", keys=changed):
        assert said.startswith(f"{DataError.__name__}: the data is not the one that the checkpoint was trained with")
    write_tokenizer(tmp_path / "tok", eos_token="<|im_end|>")
    for said in run_ranks(2, "tests.run.test_evaluate:train", keys={**again, "train.max_steps": 7}):
        assert said.startswith(f"{DataError.__name__}: the tokenizer is not the one")
