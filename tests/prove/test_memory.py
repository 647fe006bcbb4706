"""The memory that a proof's recorder takes beside the program: some pieces of the model, however many there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.prove.runs import INJECT

N_LAYERS, PIECE_MIB = 16, 4
PROGRAM = f"""
import json, re, sys, threading
sys.path.insert(0, {str(INJECT)!r})
import torch
from shardkit_proof import ProofRecorder

torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range({N_LAYERS})))
for p in model.parameters():
    p.grad = torch.randn_like(p)
taken, samples = {{}}, []

def anonymous():  # not the pages of files that are mapped, which the kernel drops when it wants to
    with open("/proc/self/status") as file:
        return int(re.search(r"RssAnon:\\s+(\\d+)", file.read())[1]) / 1024

def measure(name, function, *arguments):
    before, ended = anonymous(), threading.Event()
    samples = [before]
    def sample():
        while not ended.wait(0.001):
            samples.append(anonymous())
    thread = threading.Thread(target=sample)
    thread.start()
    returned = function(*arguments)
    ended.set()
    thread.join()
    taken[name] = max(samples) - before
    return returned

ranks, process, above = sys.argv[1], sys.argv[2], int(sys.argv[3])
recorder = ProofRecorder(ranks, {{"steps": [{{"name": f"step{{n}}"}} for n in (1, 2, 3)], "sampled_above": above}})
recorder.roots = [model]
measure("the weights at the start", recorder._start)
measure("gradients before clipping", recorder.before_clipping)
measure("gradients", recorder.before_step, None)
measure("weights", recorder.end_step)

steps = [{{"name": "step1", "weights": 0, "gradients": 1, "shares": True}}]
steps += [{{"name": "moved1", "weights": 0, "moved": True}}]
recorder = ProofRecorder(process, {{"steps": steps, "parallel": ranks, "sampled_above": above}})
recorder.roots = [model]
measure("the ranks' weights", recorder._start)
write = measure("gradients before a backward", recorder._share)
for p in model.parameters():
    p.grad += 1
recorder.record["backwards"].append(measure("gradients after it", write))
measure("the ranks' gradients", recorder.before_step, None)
measure("weights moved by an ulp", recorder.end_step)
print(json.dumps(taken))
"""


@pytest.mark.parametrize("sampled_above", [2**23, pytest.param(2**16, marks=pytest.mark.slow)])
def test_a_recorder_takes_some_pieces_of_a_model_and_no_more(tmp_path: Path, sampled_above: int) -> None:
    for name in ("ranks", "process"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-c", PROGRAM, *(str(tmp_path / name) for name in ("ranks", "process"))]
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back at once
    done = subprocess.run([*command, str(sampled_above)], env=environ, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    taken = json.loads(done.stdout)
    # Of 64 MiB: a copy of a piece, and what moves it by an ulp.
    assert max(taken.values()) < 4 * PIECE_MIB, taken
