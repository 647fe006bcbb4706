"""CONTRIBUTING.md: each of its examples works."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkit.config import capability
from shardkit.config.schema import ParallelConfig
from shardkit.data import rows
from shardkit.data.rows import BadRow, Piece, RowFormat
from shardkit.errors import ConfigError, DataError
from shardkit.launch.script import Script
from shardkit.launch.spec import JobSpec
from shardkit.telemetry import catalog
from tests import generated
from tests.data.test_text import opened
from tests.ranks import run_ranks
from tests.texts import write_program

REPO = Path(__file__).resolve().parents[2]
TEXT = (REPO / "CONTRIBUTING.md").read_text()


def example(title: str) -> str:
    """The code in a section of the page."""
    section = TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return section.partition("```python\n")[2].partition("```")[0]


def names_of(title: str, **known: Any) -> dict[str, Any]:
    """The names that a section's example defines, given those that it uses."""
    names = dict(known)
    exec(example(title), names)
    return names


def all_reduced() -> list[tuple[float, float]]:
    """On two ranks: losses and gradient norms under the example's engine, which takes the place of ddp."""
    import torch
    import torch.distributed as dist

    from shardkit.strategies import build
    from shardkit.strategies.single import Single
    from tests.strategies import cases

    engine = names_of("Add a strategy", Single=Single, torch=torch, dist=dist)["AllReduce"]
    build._engine = lambda config, world: engine(config, world)
    return cases.curves(["ddp"], "adamw_clipped")["ddp"]


def test_a_strategy_trains_like_one_process() -> None:
    want = run_ranks(1, "tests.strategies.cases:curves", names=["single"], optimizer="adamw_clipped")[0]["single"]
    for curve in run_ranks(2, "tests.docs.test_contributing:all_reduced"):
        for figures, expected in zip(curve, want, strict=True):
            assert figures == pytest.approx(expected, rel=1e-4)


def measured(engines: list[str], folder: str) -> dict[str, list[tuple[float, float]]]:
    """The example's figure and the norm in each line of metrics.jsonl, by engine."""
    from dataclasses import replace

    from shardkit.run import job
    from shardkit.strategies.base import StepRequest, Strategy, Update
    from shardkit.strategies.build import make_strategy
    from shardkit.strategies.step import total_norm
    from tests.run import gradients

    figures = names_of("Add a figure of a step, or an option of one", total_norm=total_norm)["measured"]

    def measuring(*args: Any) -> Strategy:
        strategy = make_strategy(*args)
        step = strategy.step

        def measured_step(request: StepRequest) -> Update:
            before = figures(strategy, request)
            return replace(step(request), figures=before)

        vars(strategy)["step"] = measured_step
        return strategy

    job.make_strategy = measuring
    ended = gradients.ends(
        {engine: {"train.ema_decay": 0.5, "checkpoint.every_steps": None} for engine in engines}, folder, "fine"
    )
    return {
        engine: [(line["grad_norm_bias"], line["grad_norm"]) for line in run["lines"]] for engine, run in ended.items()
    }


def test_a_figure_is_recorded_under_every_engine(tmp_path: Path) -> None:
    engines = ["ddp", "fsdp", "zero1", "zero2", "zero2+optimizer", "zero3"]
    recorded = run_ranks(2, "tests.docs.test_contributing:measured", engines=engines, folder=str(tmp_path))[0]
    want = recorded["ddp"]
    assert len(want) == 8 and all(0 < bias < norm for bias, norm in want)
    for engine, figures in recorded.items():
        for pair, expected in zip(figures, want, strict=True):
            assert pair == pytest.approx(expected, rel=1e-4), engine


def test_a_strategy_dependent_key_is_refused_by_its_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "extended_schema.py").write_text(
        "from typing import Annotated, Literal\n"
        "from shardkit.config.schema import ParallelConfig as Section, RunConfig\n"
        "from shardkit.config.schema import Capability\n"
        f"{example('Add a config key')}\n"
        "class Extended(RunConfig):\n    parallel: ParallelConfig = ParallelConfig()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    extended = importlib.import_module("extended_schema")
    entries = capability.declared("parallel", extended.ParallelConfig)
    [declared] = [entry for entry in entries if entry.key not in ParallelConfig.model_fields]
    monkeypatch.setattr(capability, "DECLARED", [*capability.DECLARED, declared])
    settings = {"gather_dtype": "bf16", "strategy": "zero3"}

    def check(**parallel: Any) -> None:
        config = extended.Extended.model_validate({"parallel": parallel})
        capability.check(config, device="cuda", world_size=2, local_world_size=2)

    check(**settings)
    with pytest.raises(ConfigError) as caught:
        check(**settings | {"strategy": "ddp"})
    assert "parallel.gather_dtype=bf16 does not work with parallel.strategy=ddp: parameters" in caught.value.cause
    assert caught.value.fix == "remove parallel.gather_dtype"


def refused_vocabularies() -> str:
    """On two ranks: the error of the example's check for tokenizers that differ."""
    from shardkit.errors import DataError
    from shardkit.run.job import start

    check = names_of("Add a check", DataError=DataError)["check_same_vocabulary"]
    with start(None, {"run.device": "cpu"}) as job:
        check(job.world, 32_000)
        with pytest.raises(DataError) as caught:
            check(job.world, 32_000 + job.world.rank)
        return caught.value.cause


def test_a_check_ends_every_rank_with_the_same_words() -> None:
    words = "ranks have tokenizers of different sizes: 32000 on rank 0, 32001 on rank 1"
    assert run_ranks(2, "tests.docs.test_contributing:refused_vocabularies") == [words, words]


def test_a_checkpoint_format_is_two_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    import torch

    from shardkit.checkpoint.formats import detect
    from shardkit.checkpoint.formats.convert import convert
    from shardkit.checkpoint.formats.tensor_source import file_source, logical, mapped
    from shardkit.errors import CheckpointError

    names = names_of(
        "Add a checkpoint format", np=np, torch=torch, CheckpointError=CheckpointError, file_source=file_source,
        logical=logical, mapped=mapped,
    )  # fmt: skip
    monkeypatch.setattr(detect, "FOLDERS", (*detect.FOLDERS, (names["is_npy"], names["open_npy"])))
    folder, out = tmp_path / "arrays", tmp_path / "out"
    folder.mkdir()
    arrays = {"head.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "head.bias": np.ones(2, np.float16)}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    assert convert(folder, "torch", out).kind == "npy"
    tensors = torch.load(next(out.glob("*.pt*")), weights_only=True)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "head.weight": torch.float32, "head.bias": torch.float16,
    }  # fmt: skip
    assert all(np.array_equal(tensors[name].numpy(), array) for name, array in arrays.items())
    np.save(folder / "head.weight.npy", np.asfortranarray(arrays["head.weight"]))
    with pytest.raises(CheckpointError, match="is in Fortran order"):
        detect.open_source(folder)


MPIRUN = """#!/bin/bash
# mpirun -np N --map-by RULE PROGRAM...: the program once per rank, with Open MPI's variables
n=$2
shift 4
for ((rank = 0; rank < n; rank++)); do
  OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=$n OMPI_COMM_WORLD_LOCAL_RANK=$rank \
    OMPI_COMM_WORLD_LOCAL_SIZE=$n "$@"
done
"""
RANK = """
from shardkit.launch.ranks.env import detect
env = detect()
print(env.source, env.rank, env.world_size)
"""


def test_a_clusters_script_starts_ranks_that_know_their_number(tmp_path: Path) -> None:
    import shlex

    render = names_of("Add a cluster", shlex=shlex)["render_pbs"]
    program, mpirun = tmp_path / "it's train.py", tmp_path / "bin" / "mpirun"
    program.write_text(RANK)
    write_program(mpirun, MPIRUN)
    text = render(JobSpec(None, "run", 2, python=sys.executable, cwd=str(REPO), script=Script((str(program),))))
    assert "#PBS -l select=1:mpiprocs=2:ngpus=0\n" in text
    environ = {"PATH": f"{mpirun.parent}:/usr/bin:/bin", "PYTHONPATH": str(REPO)}
    done = subprocess.run(["bash", "-c", text], env=environ, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["mpi 0 2", "mpi 1 2"], done.stderr


def test_a_metric_is_a_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = eval(example("Add a metric"), {"Metric": catalog.Metric})
    monkeypatch.setattr(catalog, "METRICS", (*catalog.METRICS, metric))
    row = "| `weight_norm` |  | global 2-norm of the weights after this step | steps without an evaluation | "
    assert f"{row}`shardkit_weight_norm` (gauge) |" in generated.metrics_table()


def test_a_row_format_is_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_of("Add a row format", RowFormat=RowFormat, Piece=Piece, BadRow=BadRow, Path=Path)
    monkeypatch.setattr(rows, "FORMATS", (*rows.FORMATS, names["Stanzas"]()))
    path = tmp_path / "sums.stanzas"
    path.write_text("prompt: 2 + 2 =\ncompletion: 4\n\nshort\n\nprompt: 1 + 2 =\ncompletion: 3\n")
    for streaming in (False, True):
        data = opened(tmp_path, path, max_bad_rows=0.5, val_path=str(path), streaming=streaming).dataset("train")
        prompts = [data[i]["tokens"].tolist() for i in range(len(data))]
        assert len([tokens for tokens in prompts if len(tokens) > 3]) == 2
    with pytest.raises(DataError, match=r"sums.stanzas:2: no line with a name and a colon"):
        opened(tmp_path, path)
