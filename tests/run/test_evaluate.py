"""An evaluation over several sources tells each one's loss."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from shardkit.config.load import load_config
from shardkit.tasks.hf_causal_lm import HFCausalLM
from tests.commands import python_m
from tests.data.chats import conversation, write_lines, write_tokenizer


@pytest.mark.dist
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
    done = python_m("shardkit.train", *settings, ranks=2)
    assert done.returncode == 0, done.stderr
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])

    parts = HFCausalLM(load_config(None, settings).config).val_parts()
    targets = {name: sum(int((one["targets"] >= 0).sum()) for one in part) for name, part in parts.items()}  # type: ignore[attr-defined]
    assert set(targets) == {"talk.jsonl", "sums"} and min(targets.values()) > 0
    together = sum(n * last[f"val_loss_{name}"] for name, n in targets.items()) / sum(targets.values())
    assert last["val_loss"] == pytest.approx(together, rel=1e-6)
    assert last["val_loss_sums"] != pytest.approx(last["val_loss_talk.jsonl"], rel=1e-3)
    for key in ("", "_sums", "_talk.jsonl"):
        assert last[f"val_perplexity{key}"] == pytest.approx(math.exp(last[f"val_loss{key}"]))
    assert "validation perplexity sums" in done.stdout
