"""How many files of shardkit one follows on a road: those of which a function runs, counted in a child process.

Run with `-s` to see the files. A change that lowers a road lowers its limit here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import environment
from tests.data.chats import conversation, write_lines, write_tokenizer
from tests.ranks import REPO

COUNT = """
import json, os, sys, threading
repo, out, last = sys.argv[1:4]
ran = set()

importing = threading.local()  # what runs while a module is imported (class bodies, tables) is no step of a road

def profile(frame, event, argument):
    code = frame.f_code
    if code.co_name == "<module>" and event in ("call", "return"):
        importing.depth = getattr(importing, "depth", 0) + (1 if event == "call" else -1)
    if event != "call" or not code.co_filename.startswith((repo + "/shardkit/", repo + "/launch/")):
        return
    if getattr(importing, "depth", 0) == 0:
        ran.add(os.path.realpath(code.co_filename).removeprefix(repo + "/"))
    if last and code.co_name == "forward" and code.co_filename.endswith(last):
        end()

def end():
    sys.setprofile(None)
    with open(out, "w") as stream:
        json.dump(sorted(ran), stream)
    os._exit(0)

def record():
    threading.setprofile(profile)
    sys.setprofile(profile)
"""
PLAN = """
from shardkit.cli.__main__ import main
try:
    main(["plan", "-", "parallel.strategy=fsdp", "model.preset=debug", "run.device=cpu", "--gpus", "2"])
except SystemExit as ended:
    assert ended.code == 0, ended.code
"""
ROWS = """
from shardkit.config.load import load_config
from shardkit.tasks.load import load_task
settings = ["data.path=chats.jsonl", "data.tokenizer=tokenizer", "train.seq_len=32", "model.vocab_size=512",
            "data.tokenize_workers=1", "data.cache_dir=cache"]
task = load_task(load_config(None, settings).config)
record()
data = task.dataset("train")
getattr(task, "collate", lambda samples: samples)([data[0], data[1]])
"""
FSDP = """
from shardkit.train import main
main(["model.preset=debug", "parallel.strategy=fsdp", "run.device=cpu", "run.dir=run", "train.max_steps=1",
      "logging.tensorboard=false"])
"""
ROADS = {
    "plan: main to its verdict": (f"record()\n{PLAN}end()\n", "", 20),
    "a row of JSON lines to a batch": (f"{ROWS}end()\n", "", 11),
    "main to the first forward of fsdp": (f"record()\n{FSDP}", "models/transformer.py", 61),
}
"""Road → its program, the module whose first `forward` ends it, and the most files.

The 61st file of fsdp's road is `parallel/runs.py`: a rank's part of a tensor that two axes of a mesh cut is no range.
"""


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
def test_a_road_runs_through_few_files(road: str, tmp_path: Path) -> None:
    program, last, limit = ROADS[road]
    write_lines(tmp_path / "chats.jsonl", ({"messages": conversation(number)} for number in range(60)))
    write_tokenizer(tmp_path / "tokenizer")
    words = [sys.executable, "-c", COUNT + program, str(REPO), str(tmp_path / "files.json"), last]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment({"PYTHONPATH": str(REPO)}), capture_output=True, text=True
    )
    assert (tmp_path / "files.json").exists(), done.stderr
    files = json.loads((tmp_path / "files.json").read_text())
    print(f"\n{road}: {len(files)} files", *files, sep="\n  ")
    assert 0 < len(files) <= limit, files
