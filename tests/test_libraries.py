"""What other libraries keep private is there, and where it is gone costs a part and no run."""

from __future__ import annotations

import builtins
import configparser
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.config import libraries
from shardkit.config.libraries import NO_ISSUE, PLACES, TESTED, Feature, NameGone, Private
from tests.ranks import REPO


def features() -> list[Feature]:
    """The tables, once every module that adds to one is imported: the last place's are those of its whole package."""
    package = importlib.import_module(PLACES[-1].rpartition(".")[0])
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    found = {
        id(thing): thing
        for place in PLACES
        for thing in vars(importlib.import_module(place)).values()
        if isinstance(thing, Feature)
    }
    return list(found.values())


def names() -> list[Private]:
    return [name for feature in features() for name in feature.names]


def table() -> str:
    """The features in a table in Markdown: the names that each needs, and what would make them unnecessary."""
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}  # (feature, upstream) → module or class → its names
    for name in sorted({*names()}, key=lambda name: (name.feature, name.path)):
        _, _, address = name.upstream.partition("https://github.com/")
        upstream = f"[{re.sub(r'/(issues|pull)/', '#', address)}]({name.upstream})" if address else ""
        owner, _, last = name.path.rpartition(".")
        until = f" (until {name.until})" if name.until else f" (from {name.since})" if name.since else ""
        cells.setdefault((name.feature, upstream), {}).setdefault(owner, []).append(f"`{last}`{until}")
    rows = ["| Lost without them | Names | Upstream |", "|---|---|---|"]
    for (feature, upstream), owners in cells.items():
        shown = "; ".join(f"`{owner}`: {', '.join(lasts)}" for owner, lasts in owners.items())
        rows.append(f"| {feature} | {shown} | {upstream} |")
    return "\n".join(rows)


def test_every_name_is_there() -> None:
    """Run on the oldest and the newest supported versions, too (test_versions.py)."""
    gone = [name for name in names() if name.needed() and not name.exists()]
    assert not gone, "\n".join(f"{name.description()}: {name.feature} is lost" for name in gone)


def test_the_documentation_has_the_table() -> None:
    page = (REPO / "docs" / "adr" / "009-private-names.md").read_text()
    assert table() in page, "run python -m tests.test_libraries"


def test_the_oldest_tested_version_is_the_one_that_setup_cfg_allows() -> None:
    parser = configparser.ConfigParser()
    parser.read(REPO / "setup.cfg")
    lines = parser["options"]["install_requires"] + parser["options.extras_require"]["hf"]
    for library, (oldest, newest) in TESTED.items():
        bound = re.search(rf"^{library}>=([\d.]+)", lines, re.MULTILINE)
        assert bound is not None, library
        assert oldest.startswith(bound[1]), library
        assert [int(n) for n in oldest.split(".")] < [int(n) for n in newest.split(".")]


def test_a_name_that_is_gone_stands_for_itself_until_it_is_used(caplog: pytest.LogCaptureFixture) -> None:
    feature = Feature("counting stars")
    gone = feature.take("torch.utils._sky.Star", NO_ISSUE)

    class Sun(gone):
        pass

    assert not isinstance(builtins.object(), gone)
    with pytest.raises(NameGone, match=r"torch \S+ has no torch.utils._sky.Star, which counting stars needs"):
        Sun(1)
    assert not feature.works()
    assert not feature.works()
    assert [m for m in caplog.messages if "counting stars is off: torch" in m] == caplog.messages[-1:]
    assert len(caplog.messages) == 1


GONE = {
    "tracker": "torch.distributed.tensor._sharding_prop:ShardingPropagator:_propagate_tensor_meta_non_cached",
    "planner": "torch.testing._internal.distributed.fake_pg::FakeStore",
}
# Python runs this file before anything else, in ranks and in the planner's process alike.
SITE = """
import importlib, os, sys
if sys.argv[:1] and os.environ.get("GONE"):
    module, owner, name = os.environ["GONE"].split(":")
    module = importlib.import_module(module)
    delattr(getattr(module, owner) if owner else module, name)
"""
TINY = [
    "model.preset=debug", "train.max_steps=3", "train.micro_batch_size=1", "train.seq_len=16", "run.device=cpu",
    "memory.trace_step=2", "memory.cap=4GiB", "memory.plan=true", "checkpoint.at_end=false",
]  # fmt: skip


def run_without(tmp_path: Path, gone: str, ranks: int) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}", "GONE": GONE[gone], "OMP_NUM_THREADS": "1"}
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *start, "-m", "tests.run.patient", *TINY, f"run.dir={tmp_path / 'run'}"]
    if ranks > 1:
        command.append("parallel.strategy=ddp")
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_without_what_tracing_needs(tmp_path: Path, ranks: int) -> None:
    done = run_without(tmp_path, "tracker", ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "_propagate_tensor_meta_non_cached" in line]
    version = libraries.installed("torch")
    for what in ("memory.trace_step is off", "memory.cap is off", "this run is not planned"):
        assert sum(what in line and f"torch {version} has no " in line for line in lines) == 1, (what, done.stderr)
    assert len(lines) == 3
    assert not (tmp_path / "run" / "trace").exists()
    assert not (tmp_path / "run" / "plan.json").exists()


@pytest.mark.slow
def test_training_goes_on_without_what_planning_needs(tmp_path: Path) -> None:
    done = run_without(tmp_path, "planner", 1)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "FakeStore" in line]
    assert len(lines) == 1 and "this run is not planned: torch" in lines[0], done.stderr
    assert (tmp_path / "run" / "trace" / "rank0.json").exists(), "tracing does not need it"


if __name__ == "__main__":
    page = REPO / "docs" / "adr" / "009-private-names.md"
    head = page.read_text().partition("| Lost without them |")[0]
    page.write_text(head + table() + "\n")


@pytest.mark.slow
def test_what_libraries_say_to_each_other_is_not_shown() -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    code = "from shardkit.config import libraries; libraries.quiet(); import torch, torchao, torchao.quantization"
    clean = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env=clean, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
