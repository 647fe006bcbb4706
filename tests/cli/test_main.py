from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardkit import __version__
from shardkit.cli import __main__, progress
from shardkit.cli.progress import Waiting
from shardkit.config import removed
from shardkit.config.schema import DataConfig
from shardkit.data.store import Documents
from shardkit.data.tokenize import open_source
from shardkit.data.tokenizer import load_tokenizer
from shardkit.errors import ConfigError
from tests.commands import Done, environment, python_m
from tests.data.chats import conversation, write_lines, write_tokenizer
from tests.texts import write_files

REPO = Path(__file__).resolve().parents[2]


def shardkit(*args: object) -> int:
    """Exit code of the command, run in this process."""
    with pytest.raises(SystemExit) as caught:
        __main__.main([str(arg) for arg in args])
    code = caught.value.code
    return code if isinstance(code, int) else int(code is not None)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the installed package's folder with one config and one template."""
    files = {"configs/a.yaml": "train: {}\n", "slurm/a.sbatch": "#!/bin/bash\n", "slurm/.hidden": ""}
    package = write_files(tmp_path / "package", files)
    monkeypatch.setattr(__main__, "PACKAGE", package)
    return package


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert shardkit("--version") == 0
    assert capsys.readouterr().out == f"shardkit {__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert shardkit("-h") == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("init", "schema", "capability", "--debug"))


def test_init_copies_configs_and_templates(package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "my job"
    assert shardkit("init", target) == 0
    files = {path.name: path.read_text() for path in target.rglob("*.*")}
    assert files == {"a.yaml": "train: {}\n", "a.sbatch": "#!/bin/bash\n"}
    assert capsys.readouterr().out.splitlines() == [str(target / "configs/a.yaml"), str(target / "slurm/a.sbatch")]


def test_init_refuses_to_overwrite_and_writes_nothing(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slurm").mkdir()
    mine = tmp_path / "slurm/a.sbatch"
    mine.write_text("mine")
    assert shardkit("init", tmp_path) == 2
    error = capsys.readouterr().err
    assert f"error: {mine} would be overwritten\n  fix: " in error
    assert "--force" in error
    assert mine.read_text() == "mine"
    assert not (tmp_path / "configs").exists()
    assert shardkit("init", "--force", tmp_path) == 0
    assert mine.read_text() == "#!/bin/bash\n"


@pytest.mark.parametrize("name", [*removed.COMMANDS, "checkpoint former"])
def test_a_removed_command_or_option_names_what_to_use_instead(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(removed.COMMANDS, name, instead := removed.COMMANDS.get(name, "use plan"))
    assert shardkit(*name.split(), "x") == 2
    assert capsys.readouterr().err == f"error: shardkit {name} was removed\n  fix: {instead}\n"


def fail(*_: object) -> None:
    raise ConfigError("train.max_steps=0", "set it to at least 1")


def test_debug_adds_the_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(__main__, "copy_templates", fail)
    monkeypatch.setenv("SHARDKIT_DEBUG", "0")  # restored afterwards, whatever --debug sets
    assert shardkit("--debug", "init", tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert "in fail" in error
    assert error.endswith("error: train.max_steps=0\n  fix: set it to at least 1\n")
    assert os.environ["SHARDKIT_DEBUG"] == "1"


def test_a_bug_keeps_its_traceback() -> None:
    code = "from shardkit.cli import __main__ as cli; cli.copy_templates = lambda *_: 1 / 0; cli.main(['init', 'x'])"
    process = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert process.returncode == 1
    assert "ZeroDivisionError" in process.stderr


HELP = "import sys; from shardkit.cli.__main__ import main as m; sys.argv = ['shardkit', {}'--help']; sys.exit(m())"
BARE = """
import sys
import typer
app = typer.Typer(rich_markup_mode=None)
@app.command()
def one(directory: str, force: bool = False) -> None: "Do nothing."
@app.command()
def two() -> None: "Do nothing."
sys.argv = ["bare", {}"--help"]
app()
"""


@pytest.mark.parametrize(
    ("code", "bare"), [(HELP.format(""), BARE.format("")), (HELP.format("'submit', "), BARE.format('"one", '))]
)
def test_help_imports_little_beside_a_bare_typer_app(code: str, bare: str) -> None:
    """A command that imports more starts later."""
    modules = modules_at_exit(code) - modules_at_exit(bare)
    local = {name for name in modules if name.partition(".")[0] == "shardkit"}
    foreign = {name.partition(".")[0] for name in modules - local} - sys.stdlib_module_names
    assert not foreign
    assert 0 < len(local) <= 30 and len(modules - local) <= 40, sorted(modules)


def modules_at_exit(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded when `code` ends."""
    noted = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    ended = subprocess.run([sys.executable, "-c", noted + code], cwd=REPO, capture_output=True, text=True, check=True)
    return set(ended.stderr.split())


@pytest.mark.parametrize(
    "words",
    ["shardkit.cli schema", "shardkit.cli capability", "shardkit.train --help", "shardkit.train --print-config"],
)
def test_a_reader_that_has_left_is_no_traceback(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", *words.split()]
        process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=REPO, timeout=120)
    finally:
        os.close(writer)
    assert process.stderr == "" and process.returncode in (0, 1)


def tokenize(folder: Path, source: str, tokenizer: str, *more: str) -> Done:
    return python_m("shardkit.cli", "tokenize", str(folder / source), str(folder / "out"), "--tokenizer",
                    str(folder / tokenizer), *more)  # fmt: skip


@pytest.mark.slow
def test_a_corpus_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_tokenizer(tmp_path / "tok")
    write_lines(tmp_path / "bad.jsonl", [{"messages": conversation(0)}, '{"messages": ['])
    process = tokenize(tmp_path, "bad.jsonl", "tok")
    assert process.returncode == 2
    assert "bad.jsonl:2: not JSON" in process.stderr and process.stderr.count("\n") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "tok"]

    process = tokenize(tmp_path, "bad.jsonl", "tok", "data.max_bad_rows=0.5", "data.loss_on=all")
    assert process.returncode == 0, process.stderr
    assert "1 of 2 rows left out" in process.stdout
    store, manifest = open_source(DataConfig(max_bad_rows=0.5), load_tokenizer(tmp_path / "tok"), str(tmp_path / "out"))
    assert len(Documents([store])) == manifest["n_documents"] == 1


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
ZERO3: dict[str, Any] = {
    "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 16,
}  # fmt: skip
JOBS: dict[str, tuple[dict[str, Any], str, float]] = {
    "zero3": ({**ZERO3, "train_micro_batch_size_per_gpu": 1}, "fits", 60.0),
    "zero3 that does not fit": ({**ZERO3, "train_micro_batch_size_per_gpu": 8}, "does not fit", 60.0),
}
"""Of each file: the job, its verdict, and the CPU seconds in which it comes."""


def test_a_slow_command_says_what_it_does_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    lines: list[str] = []
    first, later = threading.Event(), threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        (later if line.startswith("planning changes") else first).set()

    with Waiting("tracing", say) as waiting:
        assert first.wait(30)
        now += 61
        waiting.now("planning changes")
        assert later.wait(30)
    assert lines[0] == "tracing (0 s)" and lines[-1] == "planning changes (61 s)"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", JOBS)
def test_a_plan_of_8b_from_a_file_tells_its_progress_and_has_a_verdict_in_time(name: str, tmp_path: Path) -> None:
    """The time is measured in CPU seconds of all its processes, of which two cores give at least one a second."""
    pytest.importorskip("transformers")
    pytest.importorskip("deepspeed")
    job, verdict, cpu_s = JOBS[name]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "job.json").write_text(json.dumps(job))
    plan = [
        "plan", "--from", "job.json", "--model", "model", "--gpus", "8", "--gpu", "h100", "train.seq_len=2048",
        "--no-advice",
    ]  # fmt: skip
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.run(
        [sys.executable, "-m", "shardkit.cli", *plan], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=380,
    )  # fmt: skip
    after, took = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    assert process.returncode == {"fits": 0, "does not fit": 4}[verdict], process.stderr
    assert f"verdict    {verdict}" in process.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < cpu_s
    first, *_ = process.stderr.splitlines()
    assert first.startswith("planning job.json: tracing one step (")
    assert int(first.rpartition("(")[2].split()[0]) < took / 2
