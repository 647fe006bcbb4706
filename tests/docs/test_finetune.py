"""docs/finetune.md: its commands lead from a model folder and conversations to folders that transformers loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.data.chats import conversation, write_lines, write_tokenizer
from tests.docs.test_integrations import REPO, environment, run
from tests.docs.test_integrations import folder as folder  # a fixture
from tests.texts import write_program

PAGE = (REPO / "docs" / "finetune.md").read_text(encoding="utf-8")
BASH = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SHORT = {
    "max_steps": 3, "seq_len": 64, "global_batch_size": 2, "eval_every": 2, "sample_prompts": ["ask 1"],
    "sample_tokens": 8,
}  # fmt: skip


def prepare(folder: Path) -> None:
    """A model folder, conversations, and the recipes with a few small steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    base = write_tokenizer(folder / "models" / "base")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_attention_heads=2, eos_token_id=0, **sizes))
    model.save_pretrained(base)
    write_lines(folder / "data" / "conversations.jsonl", ({"messages": conversation(n)} for n in range(60)))
    shutil.copytree(REPO / "configs", folder / "configs")
    for name in ("sft_full", "sft_lora", "pretrain_packed"):
        recipe = folder / "configs" / f"{name}.yaml"
        config = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        config["train"] |= SHORT
        config["optim"]["warmup_steps"] = 1
        config["run"]["device"] = "cpu"
        recipe.write_text(yaml.safe_dump(config), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_guide_ends_with_folders_that_transformers_loads(folder: Path) -> None:
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prepare(folder)
    plan, train, resume, report, convert = (
        script.replace("--nproc-per-node 8", "--nproc-per-node 2") for script in BASH
    )
    assert "fits" in run(plan, folder)
    run(train, folder)
    assert "resum" in run(resume, folder)
    run(train.replace("sft_lora", "sft_full"), folder)
    run(report, folder)
    run(convert, folder)
    ran = folder / "runs" / "sft_lora"
    written = [json.loads(line) for line in (ran / "samples.jsonl").read_text().splitlines()]
    assert [(one["step"], one["prompt"]) for one in written] == [(2, "ask 1"), (3, "ask 1")]
    assert (ran / "report.html").stat().st_size > 0
    tokenizer = AutoTokenizer.from_pretrained(folder / "served")
    messages = [{"role": "user", "content": "ask 7"}]
    tokens = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True, add_generation_prompt=True)
    for name in ("served", "served-full"):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        logits = model(**tokens).logits
        assert logits.shape[-1] == 512 and torch.isfinite(logits).all()
    assert (folder / "lora" / "adapter_config.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_is_pretrained_on_a_tokenised_corpus(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_program(tmp_path / "bin" / "shardkit", f'#!/bin/sh\nexec "{sys.executable}" -m shardkit.cli "$@"\n')
    prepare(tmp_path)
    (tmp_path / "texts").mkdir()
    for module in ("decoder", "encoder", "scanner"):
        shutil.copy(Path(json.__file__).with_name(f"{module}.py"), tmp_path / "texts" / f"{module}.txt")
    run("shardkit tokenize texts corpus --tokenizer models/base", tmp_path)
    given = "model.hf_config=models/base data.path=corpus data.tokenizer=models/base train.micro_batch_size=1"
    said = run(f"python -m shardkit.train --config configs/pretrain_packed.yaml {given}", tmp_path)
    assert "% full" in said and "step 3/3" in said


SCRIPT = REPO / "examples" / "first_hour.sh"
COMMANDS = re.findall(r"^((?:shardkit|python) \S+).*", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)


def test_it_takes_at_most_ten_commands_and_the_guide_has_them_in_this_order() -> None:
    assert len(COMMANDS) <= 10
    mine = [command.split()[1] for command in COMMANDS if command.startswith("shardkit ")]
    guide = (REPO / "docs" / "finetune.md").read_text(encoding="utf-8")
    page = re.findall(r"^shardkit (\S+)", guide.partition("## 1.")[2], re.MULTILINE)
    assert mine == ["plan", "launch", "launch", "report", "convert"]
    assert page[: len(mine)] == mine


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_hour_ends_with_a_model_that_transformers_loads(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    process = subprocess.Popen(
        ["bash", str(SCRIPT), str(tmp_path / "hour")], env=environment(folder), text=True, cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=500)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, said
    assert "verdict    fits" in said and "(exit code 75)" in said
    run = tmp_path / "hour" / "runs" / "first_hour"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == [*range(1, 41)], "each step once, over both starts"
    assert metrics[-1]["loss"] < 0.8 * metrics[0]["loss"]
    assert said.count("resuming from runs/first_hour/checkpoints/step_") == 1
    assert said.count("stopped by SIGTERM after step ") == said.count("to continue: shardkit launch recipe.yaml ") == 1
    noise = [word for word in ("saved and stopped", "torchao", "pytree", "[WARNING]", "it/s]") if word in said]
    assert not noise
    assert (run / "report.html").stat().st_size > 0
    last = said.strip().splitlines()[-1]
    assert re.search(r"\d", last), f"the merged model continues a sum: {last}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hour"], "nothing is written elsewhere"
