"""Run directories of earlier versions go on at the same sample, under their own engine and under others.

`unreleased/` holds runs of commit de1545f4, after 0.2.0, stopped in the middle of an epoch, their data, and what the
same runs did there without a stop (`expected.json`). They are never recorded again: a run that no longer goes on as it
says is a defect. The history of this folder has the module `record` that made them.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from shardkit.config.load import load_config
from shardkit.config.removed import KEYS, VALUES
from shardkit.errors import ConfigError
from tests.ranks import run_ranks

RECORDED = Path(__file__).parent / "unreleased"
STEPS, STOP = 6, 3
CASES = sorted(path.parent.name for path in RECORDED.glob("*/config.yaml"))
OTHERS: dict[str, list[str]] = {
    "bytes_ddp": ["single", "zero3"],
    "bytes_fsdp": ["single", "zero2"],
    "bytes_zero2": ["single", "fsdp"],
    "bytes_zero3": ["single", "ddp"],
    "bin": ["ddp"],
    "chat_packed": ["single", "zero2"],
    "streamed": ["single"],
    "mixture": ["fsdp"],
    "lora": ["single"],
}
"""The engines under which a recorded run also goes on, `single` on one rank and the others on two."""
EXPECTED = json.loads((RECORDED / "expected.json").read_text())
TOLERANCE = 2e-5
OWN = [(name, "") for name in CASES]
OTHER = [(name, strategy) for name, strategies in OTHERS.items() for strategy in strategies]


def ranks(run: tuple[str, str]) -> int:
    """How many ranks a run goes on with."""
    name, strategy = run
    strategy = strategy or yaml.safe_load((RECORDED / name / "config.yaml").read_text())["parallel"]["strategy"]
    return 1 if strategy == "single" else 2


def go_on(folder: Path, runs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """What each run did."""
    results: dict[tuple[str, str], Any] = {}
    shutil.copytree(RECORDED, folder, dirs_exist_ok=True)
    for world in (1, 2):
        arguments: dict[str, Any] = {"folder": str(folder), "runs": [run for run in runs if ranks(run) == world]}
        results |= run_ranks(world, "tests.recorded.test_recorded:gone_on", timeout=400, **arguments)[0]
    return results


def gone_on(folder: str, runs: list[tuple[str, str]]) -> dict[tuple[str, str], list[dict[str, Any]] | str]:
    """On the ranks of these runs: the steps of each (case, engine), or the traceback of its failure."""
    from shardkit.run.job import start
    from shardkit.run.trainer import Trainer

    os.chdir(folder)
    results: dict[tuple[str, str], list[dict[str, Any]] | str] = {}
    for name, strategy in runs:
        overrides: dict[str, Any] = {"run.resume": True, "run.dir": f"resumed/{name}-{strategy}"}
        overrides |= {"parallel.strategy": strategy} if strategy else {}
        if int(os.environ["RANK"]) == 0:
            shutil.copytree(name, overrides["run.dir"])
        dist.barrier()
        try:
            with start(load_config(f"{name}/config.yaml", overrides)) as job:
                records = list(Trainer(job).recorded_steps())
            shown = ("step", "loss", "grad_norm", "val_loss")
            results[name, strategy] = [{key: record[key] for key in shown if key in record} for record in records]
        except Exception:
            results[name, strategy] = traceback.format_exc()
        gc.collect()
    return results


@pytest.fixture(scope="module")
def same_engine(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    return go_on(tmp_path_factory.mktemp("same"), OWN)


@pytest.fixture(scope="module")
def other_engine(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    return go_on(tmp_path_factory.mktemp("other"), OTHER)


def check(steps: Any, name: str) -> None:
    assert not isinstance(steps, str), steps
    assert [step["step"] for step in steps] == list(range(STOP + 1, STEPS + 1))
    for step, expected in zip(steps, EXPECTED[name], strict=True):
        assert step == pytest.approx(expected, rel=TOLERANCE), name


@pytest.mark.timeout(500)
@pytest.mark.parametrize("run", OWN, ids=[name for name, _ in OWN])
def test_a_recorded_run_goes_on(run: tuple[str, str], same_engine: dict[tuple[str, str], Any]) -> None:
    check(same_engine[run], run[0])


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("run", OTHER, ids=["-".join(run) for run in OTHER])
def test_a_recorded_run_goes_on_under_another_engine(
    run: tuple[str, str], other_engine: dict[tuple[str, str], Any]
) -> None:
    check(other_engine[run], run[0])


def test_a_wrong_sample_would_show() -> None:
    for name, steps in EXPECTED.items():
        losses = sorted(step["loss"] for step in steps)
        assert all(high - low > 10 * TOLERANCE * high for low, high in itertools.pairwise(losses)), (name, losses)


@pytest.mark.parametrize("name", CASES)
def test_a_stored_config_loads(name: str) -> None:
    assert load_config(RECORDED / name / "config.yaml").config.run.dir == name


@pytest.mark.parametrize("row", [*KEYS, *VALUES])
def test_a_removed_key_in_a_stored_config_answers_by_name(row: str, tmp_path: Path) -> None:
    stored = yaml.safe_load((RECORDED / "bytes_single" / "config.yaml").read_text())
    key, _, value = row.partition("=")
    section, _, name = key.partition(".")
    stored.setdefault(section, {})[name] = value or "on"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml")
    assert key in caught.value.cause
    assert (KEYS[row].instead if row in KEYS else VALUES[row]) in f"{caught.value.cause} {caught.value.fix}"
