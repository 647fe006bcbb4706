"""Whole proofs: a program of two ranks and the same with one process, started as a user starts them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkit.prove.runs import RecordedRun, one_process
from shardkit.prove.verdict import WORDS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")
PROGRAM = """
import shutil, sys
import torch, torch.distributed as dist, torch.distributed.fsdp
from torch.utils.data import DataLoader, DistributedSampler

bug = sys.argv[1] if len(sys.argv) > 1 else ""
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if bug == "seed" else 0)
rows = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.tensor(i % 4)) for i in range(256)]
sampler = DistributedSampler(rows, world, rank, seed=1) if bug != "rows" else None
loader = iter(DataLoader(rows, 4, sampler=sampler))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(16, 4))
if bug == "sharded":  # one group, whose parameters stay gathered from the forward to the backward
    net = torch.distributed.fsdp.fully_shard(model)
elif bug == "nameless":
    net = torch.distributed.fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
else:
    net = model if bug in ("reduce", "seed") else torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (world if bug == "rate" else 1))
if bug == "disk":
    shutil.disk_usage = lambda path: type("Usage", (), {"free": 1000})
if bug == "fails":
    raise ValueError("no such corpus")
for step in range(8):
    for micro in range(2):
        x, y = next(loader)
        if bug == "last":
            optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y) / 2
        (loss * world if bug == "scale" else loss).backward()
    if net is model and bug != "sharded":  # DDP would send rank 0's weights to all
        for p in list(model.parameters())[: -1 if bug == "reduce" else None]:
            dist.all_reduce(p.grad)
            p.grad /= world
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step == (1 if bug == "fused half" else 3):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if bug == "zero":
            state["3.weight"][2:] = 0
        if bug.startswith("fused"):  # under names that the modules do not have
            state = {"fused": torch.cat([state["0.weight"].flatten(), state["3.weight"].flatten()])}
        if bug == "fused half" and world > 1:
            state["fused"][10:] = 0
        torch.save({"model": state}, "weights.pt")
"""

SAVES = ("zero", "fused", "fused half")


def prove(folder: Path, bug: str, *options: str) -> tuple[int, dict[str, Any], str]:
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", *filter(None, [bug])]
    return run_prove(folder, command, *options, *(["--until", "save"] if bug in SAVES else []))


def run_prove(folder: Path, command: list[str], *options: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "shardkit.cli", "prove", "--json", "verdict.json", *options, "--", *command],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if "cannot be kept from the machine" in done.stderr:
        pytest.skip("needs namespaces and overlays")
    assert (folder / "verdict.json").exists(), done.stdout + done.stderr
    return done.returncode, json.loads((folder / "verdict.json").read_text()), done.stdout + done.stderr


@pytest.mark.dist
@pytest.mark.parametrize(("bug", "code", "word"), [
    ("", 0, None), ("last", 4, "micro-batches"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("reduce", 4, "not summed"), ("fails", 8, None), ("rows", 9, "rows"), ("scale", 4, "factor"),
        ("seed", 4, "copies differ"), ("zero", 4, "saved"), ("rate", 0, None), ("sharded", 0, None),
        ("fused", 0, None), ("fused half", 4, "saved"),
        ("disk", 2, None), ("nameless", 2, None),
    ]),
])  # fmt: skip
def test_a_program_and_its_defects(tmp_path: Path, bug: str, code: int, word: str | None) -> None:
    exit_code, verdict, output = prove(tmp_path, bug)
    assert (exit_code, verdict["exit_code"], verdict["word"]) == (code, code, word), output
    assert word is None or word in WORDS
    assert not (tmp_path / "weights.pt").exists()  # its writes are thrown away
    if bug == "last":
        assert "=> only the last micro-batch of a step counts" in output
        assert verdict["weights"]["rank 0 micro-batch 1"] == pytest.approx(
            {"parallel": 0, "one process": 0.25}, abs=1e-4
        )
    if bug == "scale":
        assert verdict["factor"] == pytest.approx(2) and "the number of ranks" in output
    if bug == "reduce":
        assert verdict["parameter"] == "3.bias"
    if bug == "rate":
        assert "the learning rate is 0.02 on the ranks, and 0.01 in one process: it stepped with the ranks'" in output
    if bug == "disk":
        assert "the records need 18.2 KiB of disk, and" in output and "has 1.0 KiB free" in output
    if bug == "nameless":
        assert "use_orig_params=True" in output
    if bug == "fused":
        assert "weights.pt as one process saves it" in output
    if bug == "fails":
        assert "ValueError: no such corpus" in output


BAD = """
import sys
import torch, torch.distributed as dist

kind = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
name = {"ranks": f"head{dist.get_rank()}", "other": "head"}.get(kind, "proj")
model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4)})
model.forward = lambda x: model[name](x)
net = model if kind == "ranks" else torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    net(torch.randn(2, 4)).square().mean().backward()
    if kind != "never":
        optimizer.step()
if kind == "never":
    print("no GPU is here")
"""


@pytest.mark.dist
@pytest.mark.parametrize(("words", "options", "code", "cause", "fix"), [
    (["nowhere.py"], [], 8, "can't open file", "run the command without a proof, and mend it; its output: with --keep"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (["bad.py", "never"], [], 2, "call; it printed last: no GPU is here", "name a command that trains with torch"),
        (["bad.py", "ranks"], [], 7, "the ranks have no parameter in common", "a program of the same modules for"),
        (["bad.py", "proj"], ["other"], 2, "head.weight: nearest of the ranks' is proj.weight", "--against 'COMMAND'"),
        (["bad.py", "proj"], ["nowhere"], 8, "FAILED: the program of --against", "name a program of one process"),
    ]),
])  # fmt: skip
def test_bad_input_is_told_in_a_line_of_cause_and_one_of_fix(
    tmp_path: Path, words: list[str], options: list[str], code: int, cause: str, fix: str
) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    against = [str(tmp_path / "nowhere.py")] if options == ["nowhere"] else ["bad.py", *options]
    named = ["--against", shlex.join([*run, "1", *against])] if options else []
    exit_code, verdict, output = run_prove(tmp_path, [*run, "2", *words], *named)
    assert (exit_code, verdict["exit_code"]) == (code, code), output
    lines = [line for line in output.splitlines() if not line.startswith("proving: ")]
    assert cause in lines[0] and fix in lines[-1] and len(lines) <= 6, output


@pytest.mark.slow
@pytest.mark.dist
def test_what_is_expected_and_what_is_kept(tmp_path: Path) -> None:
    for bug, code in (("", 0), ("rows", 4)):
        folder = tmp_path / f"run{code}"
        folder.mkdir()
        exit_code, verdict, output = prove(folder, bug, "--expect", "same", "--keep", "kept")
        assert exit_code == code and verdict["exit_code"] == {0: 0, 4: 9}[code], output
        assert (folder / "kept" / "run1" / "records" / "step1.rank1.json").exists()
        assert not (folder / "kept" / "run1" / "root").exists()


TORCHRUN = """Traceback (most recent call last):
  File "/env/bin/torchrun", line 6, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
"""


@pytest.mark.parametrize(("log", "error"), [
    ("", "it printed nothing"),
    ('[rank1]: Traceback (most recent call last):\n[rank1]:   File "/home/me/train.py", line 17, in <module>\n'
     '[rank1]:   File "/env/lib/python3.11/site-packages/torch/x.py", line 3, in f\n[rank1]: ValueError: no corpus\n',
     "ValueError: no corpus (train.py:17)"),
    ("[W1129 socket.cpp] The client error\n/bin/python: can't open file '/x/train.py': [Errno 2]\n",
     "/bin/python: can't open file '/x/train.py': [Errno 2]"),
    ("usage: train.py\ntrain.py: error: unrecognized arguments: --layres\n",
     "train.py: error: unrecognized arguments: --layres"),
    ("loss 3.1\nE1129 10:00:00 7866 api.py:1002] failed (exitcode: -11) local_rank: 0\n", "failed (exitcode: -11)"),
])  # fmt: skip
def test_a_programs_own_error_comes_before_its_launchers(log: str, error: str) -> None:
    for ending in ("", TORCHRUN) if log else ("",):
        assert RecordedRun(Path(), (), 1, log + ending).error() == error


@pytest.mark.parametrize(("function", "is_of_recorder"), [("rows_of", True), ("watched", False)])
def test_an_error_of_the_recorder_is_not_the_programs(function: str, is_of_recorder: bool) -> None:
    log = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 17, in <module>\n'
        f'  File "/tmp/run/inject/shardkit_proof.py", line 3, in {function}\nIndexError: slice()\n'
    )
    run = RecordedRun(Path(), (), 1, log)
    assert (run.error(), run.is_of_recorder) == ("IndexError: slice() (train.py:17)", is_of_recorder)


UNSHARED = (
    "parallel.tp=1 parallel.cp=1 parallel.ep=1 parallel.dp_replicate=1 parallel.dp_shard=1 parallel.tp_sequence=false"
)


@pytest.mark.parametrize(("command", "alone"), [
    ("python train.py", None),
    ("torchrun --nproc-per-node 4 train.py parallel.tp=2", "torchrun --nproc-per-node 1 train.py parallel.tp=2"),
    ("torchrun --nproc-per-node=4 -m shardkit.train --config tp.yaml",
     f"torchrun --nproc-per-node=1 -m shardkit.train --config tp.yaml {UNSHARED}"),
])  # fmt: skip
def test_one_process_shares_nothing_with_others(command: str, alone: str | None) -> None:
    assert one_process(command.split()) == (alone and alone.split())


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("config", ["tp.yaml", "moe.yaml"])
def test_ranks_that_share_layers_or_experts_need_no_other_program_to_compare_with(tmp_path: Path, config: str) -> None:
    train = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardkit.train"]
    sizes = ["--config", str(CONFIGS / config), "train.seq_len=32", "run.device=cpu"]
    exit_code, _, output = run_prove(tmp_path, [sys.executable, *train, *sizes])
    assert exit_code == 0, output


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_shardkits_strategies_compute_the_gradients_and_weights_of_one_process(tmp_path: Path, strategy: str) -> None:
    train = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardkit.train", "--config", QUICKSTART]
    sizes = ["train.max_steps=20", "train.micro_batch_size=4", "train.seq_len=32", "run.device=cpu"]
    exit_code, _, output = run_prove(tmp_path, [sys.executable, *train, f"parallel.strategy={strategy}", *sizes])
    assert exit_code == 0, output
