"""The command people run: what it trains, writes, prints and refuses."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands import environment, python_m
from tests.launch import jobs
from tests.texts import write_numbers

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small corpus in a directory of its own."""
    return write_numbers(tmp_path / "text", 40)


def settings(tmp_path: Path, text: Path, **extra: Any) -> list[str]:
    values = {
        "data.path": text, "data.cache_dir": tmp_path / "cache", "run.dir": tmp_path / "run", "run.device": "cpu",
        "train.max_steps": 6, "train.seq_len": 32, "train.micro_batch_size": 4, "train.eval_samples": 16,
        "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 2, "memory.interval": 3,
    }  # fmt: skip
    return [f"{k}={v}" for k, v in {**values, **{k.replace("__", "."): v for k, v in extra.items()}}.items()]


def run(args: list[str], ranks: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    return python_m("shardkit.train", *args, ranks=ranks, **more)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_run_writes_what_the_reference_promises(ranks: int, tmp_path: Path, text: Path) -> None:
    done = run(settings(tmp_path, text), ranks, code=0)
    assert "destroy_process_group" not in done.stderr
    folder = tmp_path / "run"
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["d_model"] == 32
    steps = lines(folder / "metrics.jsonl")
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    assert set(steps[0]) >= {"loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "data_wait_s"}
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[0]["tokens"] == 32 * 4 * max(1, ranks)
    assert "val_loss" in steps[-1]
    memory = lines(folder / "memory.jsonl")
    assert [m["step"] for m in memory] == [1, 3, 6]
    assert [r["rank"] for r in memory[-1]["ranks"]] == list(range(max(1, ranks)))
    assert json.loads((folder / "env.json").read_text())["packages"]["torch"]
    assert list((folder / "tensorboard").iterdir())
    assert re.search(
        r"^blocks: 2 Block in blocks; \d+% of the parameters belong to no block: ", done.stdout, re.MULTILINE
    )
    assert "validation loss" in done.stdout and "unigram cross entropy" in done.stdout
    for name in ("metrics.jsonl", "memory.jsonl", "config.yaml", "checkpoints/ (", f"shardkit report {folder}"):
        assert name in done.stdout, "the files written are listed"


def test_a_users_own_task_trains(tmp_path: Path) -> None:
    run(
        ["--config", "examples/my_task.yaml", "parallel.strategy=fsdp", f"run.dir={tmp_path}/run", "run.device=cpu",
         "train.max_steps=12"],
        ranks=2, env={"PYTHONPATH": f"{REPO}/examples"}, code=0,
    )  # fmt: skip
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 12 and steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize("strategy", ["single", "zero2"])
def test_the_own_loop_example_learns(strategy: str) -> None:
    done = python_m("examples/own_loop.py", strategy, ranks=0 if strategy == "single" else 2, code=0)
    loss = float(re.search(r"loss ([\d.]+)", done.stdout).group(1))
    assert loss < 1.2, "starts near ln 4 = 1.386"


def test_print_config_shows_where_values_come_from(tmp_path: Path) -> None:
    done = run(["--config", "configs/quickstart.yaml", "optim.lr=0.01", "--print-config"], code=0)
    assert re.search(r"lr: 0.01 +# command line", done.stdout)
    assert re.search(r"strategy: ddp +# .*quickstart.yaml", done.stdout)
    assert "# default" in done.stdout
    assert yaml.safe_load(done.stdout)["optim"]["lr"] == 0.01


def user_error(done: subprocess.CompletedProcess[str], *said: str) -> None:
    """One line of cause, one of fix, exit code 2, no traceback."""
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    fixes = [line for line in done.stderr.splitlines() if line.startswith("  fix: ")]
    assert len(errors) == 1 and len(fixes) == 1, done.stderr
    for words in said:
        assert words in done.stderr, done.stderr


def rank_0_of_two(port: str) -> dict[str, str]:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def test_a_port_in_use_is_named_and_ranks_that_never_come_end_the_wait(tmp_path: Path, text: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        user_error(run(settings(tmp_path, text), env=rank_0_of_two(port)), port, "in use")
    with socket.socket() as held:  # bound, but not listened to: the store may have the port, and nobody else
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
        user_error(run(settings(tmp_path, text, run__init_timeout_s=2), env=rank_0_of_two(port)), "init_timeout_s")


ENDED_WHILE_IT_ENDS = '''
import atexit, os, signal

class Task:
    """Has too few rows, and its process gets SIGTERM while the interpreter exits."""
    def __init__(self, config): atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    def build_model(self): return None
    def dataset(self, split): return [0]
    def n_targets(self, batch): return 1
    def loss(self, model, batch): return 0
'''


@pytest.mark.slow
def test_a_rank_that_torchrun_ends_while_it_exits_keeps_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "ending_task.py").write_text(ENDED_WHILE_IT_ENDS)
    argv = ["-m", "shardkit.train", "task.factory=ending_task:Task", f"run.dir={tmp_path}/run", "run.device=cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *argv],
        cwd=REPO, env=environment({"PYTHONPATH": str(tmp_path)}), capture_output=True, text=True,
    )  # fmt: skip
    assert re.search(r"exitcode  : 2 \(pid", done.stderr), done.stderr


def test_ctrl_c_stops_quietly(tmp_path: Path, text: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "shardkit.train", *settings(tmp_path, text, train__max_steps=100000, logging__every=1)],
        cwd=REPO, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A test run in the background ignores Ctrl-C, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    jobs.until_line(process, "step 3/")
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=100)  # of stdout, too: the run prints as long as there is room in the pipe
    assert process.returncode == 130
    assert "Traceback" not in rest and "destroy_process_group" not in rest


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    args = jobs.settings(
        tmp_path / "run", "wait", task__factory="tests.run.test_watchdog:Lagging", train__max_steps=4,
        parallel__strategy="fsdp",  # its forward waits for the slow rank's parameters on every rank
    )  # fmt: skip
    # Between the limit and 2: of two ranks, and with what the machine adds to both.
    assert re.search(r"slow: rank 1@\S+ is busy for 1\.[2-9]\d × the median", run(args, ranks=2, code=0).stdout)


RAGGED_TASK = '''
import torch
from torch import nn

class Task:
    """14 ragged samples, so that a global batch of 12 leaves 2 for the epoch's last step."""
    def __init__(self, config): pass
    def build_model(self): return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    def dataset(self, split):
        g = torch.Generator().manual_seed(3)
        return [(torch.randn(6, generator=g), 1 + i % 5) for i in range(14)] if split == "train" else None
    def n_targets(self, batch): return int(batch[1].sum())
    def loss(self, model, batch):
        x, weight = batch
        return (weight * (model(x).squeeze(-1) - x.sum(-1)).square()).sum()
'''


def test_a_short_last_batch_gives_the_same_losses_on_any_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "ragged_task.py").write_text(RAGGED_TASK)
    curves = []
    for ranks in (0, 2, 3):
        args = ["task.factory=ragged_task:Task", f"run.dir={tmp_path}/run{ranks}", "run.device=cpu",
                "train.max_steps=5",
                "train.micro_batch_size=2", "train.global_batch_size=12", "optim.lr=0.05"]  # fmt: skip
        run(args, ranks=ranks, env={"PYTHONPATH": str(tmp_path)}, code=0)
        steps = lines(tmp_path / f"run{ranks}" / "metrics.jsonl")
        curves.append(([s["loss"] for s in steps], [s["tokens"] for s in steps]))
    losses, tokens = curves[0]
    assert tokens[1] < tokens[0] / 2, "every second step is the epoch's short one"
    for other, other_tokens in curves[1:]:
        assert other_tokens == tokens
        assert other == pytest.approx(losses, abs=1e-5)


def test_parameters_that_do_not_move_are_an_error(tmp_path: Path, text: Path) -> None:
    (tmp_path / "stuck_task.py").write_text(RAGGED_TASK.replace("return (weight *", "return 0.0 * (weight *"))
    args = ["task.factory=stuck_task:Task", f"run.dir={tmp_path}/run", "run.device=cpu", "train.max_steps=2",
            "train.micro_batch_size=2", "optim.name=sgd", "optim.weight_decay=0"]  # fmt: skip
    done = run(args, env={"PYTHONPATH": str(tmp_path)}, code=1)
    assert "no parameter changed in the first step" in done.stderr


CONFIG_RANKS = {"quickstart": 2, "ddp": 2, "fsdp": 2, "hsdp": 4, "long": 4, "moe": 4, "tp": 4, "zero1": 2, "zero2": 2,
                "zero3": 2, "zero3_offload": 2, "single_gpu_offload": 0}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CONFIG_RANKS))
def test_every_ready_made_config_trains(name: str, tmp_path: Path, text: Path) -> None:
    of_tasks = {"bert", "gpt2", "swin2sr", "vit"}  # trained by tests/tasks/test_models.py
    of_guide = {"sft_full", "sft_lora", "pretrain_packed"}  # trained by tests/docs/test_finetune.py
    of_adapters = {"qlora"}  # trained by tests/tasks/test_quantized.py
    names = {p.stem for p in (REPO / "configs").glob("*.yaml")}
    assert names == set(CONFIG_RANKS) | of_tasks | of_guide | of_adapters
    small = ["train.seq_len=64", "train.micro_batch_size=2", "train.max_steps=3", "run.device=cpu"]
    if name != "moe":  # which names a small model of transformers
        small.append("model.preset=debug")
    small += [
        f"run.dir={tmp_path}/run",
        f"data.path={text}",
        f"data.cache_dir={tmp_path}/cache",
        "train.eval_samples=16",
    ]
    run(["--config", f"configs/{name}.yaml", *small, "train.global_batch_size=null", "train.grad_accum_steps=1"],
        ranks=CONFIG_RANKS[name], timeout=280, code=0)  # fmt: skip
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 3
