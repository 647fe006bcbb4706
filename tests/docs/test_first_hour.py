"""examples/first_hour.sh leads from a model folder and conversations to a merged model that transformers loads.

The guide docs/finetune.md has the same commands in the same order.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.docs.test_integrations import REPO, environment
from tests.docs.test_integrations import folder as folder  # a fixture

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
@pytest.mark.dist
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
