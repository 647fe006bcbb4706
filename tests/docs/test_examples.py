"""The examples that no other test runs, and the plans of pages and recipes, are as they say. (Own task: tests/run.)"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from shardkit.memory import read_jsonl
from tests.commands import python_m

REPO = Path(__file__).resolve().parents[2]
EXAMPLES = REPO / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_model_of_transformers_learns_in_ones_own_loop(strategy: str) -> None:
    pytest.importorskip("transformers")
    done = python_m("examples/transformers_model.py", strategy, ranks=0 if strategy == "single" else 2, code=0)
    (loss,) = re.findall(r"^loss ([\d.]+)", done.stdout, re.MULTILINE)
    assert float(loss) < 1.5, "starts near ln 26 = 3.26"


def test_the_ledger_accounts_for_a_plain_loop(tmp_path: Path) -> None:
    done = python_m(str(EXAMPLES / "memory_ledger.py"), ranks=2, cwd=tmp_path, code=0)
    gathers = list(read_jsonl(tmp_path / "memory.jsonl"))
    assert [step for step, _ in gathers] == [1, 2, 10, 20]
    n_params = 16 * 256 + 256 + 256 * 4 + 4
    states = [row.state for row in gathers[-1][1]]
    assert len(states) == 2
    assert all(state is not None and state["params"].device == 4 * n_params for state in states)
    assert done.stdout.count("optimizer state of each rank") == 4
    assert "max / mean" in done.stdout


def test_the_page_names_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in EXAMPLES.iterdir() if path.is_file()]
    assert [name for name in names if f"({name})" not in page] == ["README.md"]


EXAMPLE = re.compile(r"^```bash\nshardkit (plan - [^`]*?)\n```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


def plans() -> dict[str, list[str]]:
    """Command → the texts that a page shows below it; searches, whose speeds are those of a machine, are left out."""
    found: dict[str, list[str]] = {}
    for page in ("README.md", "docs/plan.md"):
        for command, shown in EXAMPLE.findall((REPO / page).read_text(encoding="utf-8")):
            if "--auto" not in command:
                found.setdefault(command.replace("\\\n", " "), []).append(shown)
    return found


@pytest.mark.slow
def test_a_plan_prints_what_the_pages_show(tmp_path: Path) -> None:
    commands = plans()
    assert sum(map(len, commands.values())) >= 2
    for command, texts in commands.items():
        words = shlex.split(command)
        printed = python_m(
            "shardkit.cli", *words, cwd=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path)}, code=None
        ).stdout
        for text in texts:
            rest = [" ".join(line.split()) for line in printed.splitlines() if line]
            for part in text.split("…\n"):  # lines between two marks of omission follow each other
                lines = [" ".join(line.split()) for line in part.splitlines() if line]
                starts = [at for at in range(len(rest)) if rest[at : at + len(lines)] == lines]
                assert starts, f"{lines}\nare not, or not in this order, in\n{printed}"
                rest = rest[starts[0] + len(lines) :]


CONFIGS = REPO / "configs"
STATED = re.compile(r"^#   (Llama [\d.]+ \d+B) on (\d) × (\w+)(?: with (.+))?: ([\d.]+) GiB$", re.MULTILINE)
LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Llama 3.2 1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recipe", ["sft_full", "sft_lora", "pretrain_packed"])
def test_the_stated_memory_is_the_planned_one(recipe: str) -> None:
    stated = STATED.findall((CONFIGS / f"{recipe}.yaml").read_text(encoding="utf-8"))
    assert {(gpus, card) for _, gpus, card, *_ in stated} >= {("8", "h100"), ("1", "rtx4090")}
    for model, gpus, card, settings, gib in stated:
        sizes = json.dumps(LLAMA | MODELS[model])
        done = python_m(
            "shardkit.cli", "plan", f"configs/{recipe}.yaml", "model.init_from=null", "model.hf_config=null",
            "data.path=null", f"model.hf={sizes}", *settings.split(), "--gpus", gpus, "--gpu", card,
        )  # fmt: skip
        assert done.returncode == 0, f"{model} on {gpus} × {card}: {done.stdout}{done.stderr}"
        (verdict,) = re.findall(r"^verdict +(?:fits|tight).*?: ([\d.]+) GiB of", done.stdout, re.MULTILINE)
        assert float(verdict) == pytest.approx(float(gib), rel=0.02), f"{model} on {gpus} × {card}"
