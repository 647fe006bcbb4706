"""What Prometheus reads is what was gathered, in its own format."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import ConfigError
from shardkit.telemetry.catalog import METRICS
from shardkit.telemetry.prometheus import MetricsServer
from tests.memory.samples import gpu_row
from tests.ranks import run_ranks
from tests.texts import write_numbers

# A line of the text format 0.0.4: name, labels with escaped values, value.
SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)+)\})? (\S+)')


def scrape(url: str) -> dict[tuple[str, str], float]:
    """(metric, labels as they stand) → value; every metric must have its HELP and TYPE before it."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = answer.read().decode()
    assert text.endswith("\n")
    found, described = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            described.add(line.split()[2])
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] in described
            found[match[1], match[2] or ""] = float(match[3])
    return found


def test_ranks_and_categories_are_labels() -> None:
    with closing(MetricsServer("127.0.0.1", 0)) as server:
        server.update({"step": 7, "grad_norm": float("inf")}, [gpu_row(0), gpu_row(1, 5 * 2**30, "node2")])
        found = scrape(server.url)
    assert found["shardkit_step", ""] == 7
    assert found["shardkit_grad_norm", ""] == float("inf")
    assert found["shardkit_rank_device_peak_allocated_bytes", 'host="node2",rank="1"'] == 5 * 2**30
    assert found["shardkit_rank_host_peak_rss_bytes", 'host="node1",rank="0"'] == 2 * 2**30
    assert found["shardkit_rank_state_bytes", 'category="optimizer",host="node1",place="host",rank="0"'] == 2**31
    assert found["shardkit_rank_phase_peak_bytes", 'host="node2",kind="allocated",phase="update",rank="1"'] == 5 * 2**30
    assert found["shardkit_rank_alloc_retries_total", 'host="node1",rank="0"'] == 2


def test_a_missing_library_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"logging\.prometheus_port=9400 needs prometheus_client") as error:
        MetricsServer("127.0.0.1", 9400)
    assert "pip install 'shardkit[prometheus]'" in error.value.fix


def settings(folder: Path, **extra: Any) -> list[str]:
    values = {
        "data.path": write_numbers(folder / "text"), "data.cache_dir": folder / "cache", "run.dir": folder / "run",
        "run.device": "cpu",
        "train.max_steps": 3, "train.seq_len": 32, "train.micro_batch_size": 4, "train.eval_samples": 0,
        "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 2, "memory.interval": 1,
        "logging.tensorboard": "false", "checkpoint.at_end": "false", "parallel.strategy": "ddp",
    }  # fmt: skip
    return [f"{k}={v}" for k, v in {**values, **{k.replace("__", "."): v for k, v in extra.items()}}.items()]


def scraped_steps(overrides: list[str], run_dir: str) -> list[dict[str, float]]:
    """What the endpoint says after each step of a real run; rank 0's."""
    import torch.distributed as dist

    from shardkit.config.load import load_config
    from shardkit.run.job import start
    from shardkit.run.trainer import Trainer

    found = []
    with start(load_config(None, overrides)) as job:
        for _ in Trainer(job).recorded_steps():
            if dist.get_rank() == 0:
                url = Path(run_dir, "logs", "prometheus.txt").read_text().strip()
                found.append({f"{name} {labels}".strip(): value for (name, labels), value in scrape(url).items()})
    return found


def test_a_run_is_scraped_while_it_trains(tmp_path: Path) -> None:
    args = settings(tmp_path, logging__prometheus_port=0)
    first, second = run_ranks(
        2, "tests.telemetry.test_prometheus:scraped_steps", overrides=args, run_dir=str(tmp_path / "run")
    )
    assert second == []
    assert not (tmp_path / "run" / "logs" / "prometheus.txt").exists()  # nobody answers any more
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gathers = [json.loads(line) for line in (tmp_path / "run" / "memory.jsonl").read_text().splitlines()]
    assert {key for step in steps for key in step} <= {metric.key for metric in METRICS}, "each is declared"
    assert {name for answer in first for name in answer if " " not in name} == {
        f"shardkit_{metric.prometheus}" for metric in METRICS if metric.prometheus and metric.key in steps[-1]
    }
    assert len(first) == len(steps) == len(gathers) == 3
    for answer, step, gather in zip(first, steps, gathers, strict=True):
        assert answer["shardkit_loss"] == step["loss"]
        for row in gather["ranks"]:
            host, rank = f'host="{row["host"]}"', f'rank="{row["rank"]}"'
            assert answer[f"shardkit_rank_host_peak_rss_bytes {host},{rank}"] == row["host_mem"]["peak_rss"]
            held = row["state"]["optimizer"]["device"]
            assert answer[f'shardkit_rank_state_bytes category="optimizer",{host},place="device",{rank}'] == held > 0


def test_a_taken_port_stops_every_rank(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        args = settings(tmp_path, logging__prometheus_port=taken.getsockname()[1])
        assert run_ranks(2, "shardkit.train:main", argv=args, timeout=60) == [2, 2]
