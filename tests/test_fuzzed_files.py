"""Damaged files of every format that strangers may give are taken or refused: no program, no traceback, no hang.

A wider campaign: `SHARDKIT_FUZZ=0:200 pytest tests/test_fuzzed_files.py -m slow`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardkit.cli.__main__ import main
from shardkit.errors import ShardkitError
from tests.commands import python_m
from tests.report.samples import add, plan, post_mortem, trace

PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
SEEDS = range(*map(int, os.environ.get("SHARDKIT_FUZZ", "0:4").split(":")))
Read = Callable[[], object]
VALUES = [None, True, -1, 2**70, 1e308, "", "x" * 100_000, "\x1b]0;owned\x07\u202e\ud800", "a\nb", [], {}, [[]] * 50]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with what the report of a larger one shows beside them."""
    run = tmp_path_factory.mktemp("trained") / "run"
    keys = {
        "model.preset": "debug", "train.max_steps": 2, "train.seq_len": 32, "run.dir": run, "run.device": "cpu",
        "checkpoint.every_steps": 2, "train.micro_batch_size": 2, "train.global_batch_size": 2,
    }  # fmt: skip
    python_m("shardkit.train", *(f"{key}={value}" for key, value in keys.items()), timeout=300, code=0)
    add(run, {"trace/rank0.json": trace(), "plan.json": plan(), "oom/rank1.json": post_mortem()})
    return run


def command(*arguments: object) -> Read:
    return lambda: main([str(argument) for argument in arguments])


def weights(kind: str, folder: Path) -> tuple[Path, Read]:
    """A file or folder of weights, the file in it to damage, and its conversion."""
    state = {"w": torch.ones(64, 3), "b": torch.zeros(5, dtype=torch.bfloat16)}
    source = damaged = folder / f"m.{kind}"
    if kind == "pt":
        torch.save(state, source)
    elif kind == "safetensors":
        from safetensors.torch import save_file

        save_file(state, source)
    else:
        from torch.distributed import checkpoint

        checkpoint.save({**state, "n": 3}, checkpoint_id=source, no_dist=True)
        damaged = source / ".metadata"
    return damaged, command("convert", source, "--to", "safetensors", "--out", folder / "out")


def picture(folder: Path) -> tuple[Path, Read]:
    from PIL import Image

    from shardkit.data.pictures import find_pictures, read

    Image.effect_noise((64, 48), 40).save(folder / "a.png")
    return folder / "a.png", lambda: [read(path) for path in find_pictures(str(folder))]


def mutate(content: bytes, rng: random.Random) -> bytes:
    """The bytes with one to five damages."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 5)):
        start = rng.randrange(max(len(data), 1))
        stop = min(len(data), start + rng.choice([1, 2, 4, 8, 64]))
        match rng.randrange(5):
            case 0 if start < stop:
                data[start] ^= 1 << rng.randrange(8)
            case 1:
                data[start:stop] = rng.choice([b"\xff", b"\x00", b"\x7f", b"9"]) * (stop - start)
            case 2:
                del data[start : rng.choice([stop, stop, len(data)])]
            case 3:
                data[start:start] = data[start:stop] * rng.choice([1, 9, 2000])
            case _:
                data[start:start] = rng.choice([b"[", b"{", b"-1", b"1e999", b"\\u0000", b'"', b"~", b"*"]) * 50
    return bytes(data)


def damage(run: Path, rng: random.Random) -> None:
    """Damage one to four files of a run directory: their bytes, the values of their JSON, or their kinds."""
    for _ in range(rng.randint(1, 4)):
        file = rng.choice(sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink()))
        kind = rng.choice(["bytes", "values", "values", "odd"])
        if kind == "bytes" or (kind == "values" and file.suffix not in (".json", ".jsonl")):
            file.write_bytes(mutate(file.read_bytes(), rng))
        elif kind == "values":
            with contextlib.suppress(ValueError, IndexError):
                lines = file.read_text(errors="replace").splitlines() if file.suffix == ".jsonl" else [file.read_text()]
                index = rng.randrange(len(lines))
                inner = tree = json.loads(lines[index])
                while isinstance(inner, dict | list) and inner:
                    key = rng.choice(list(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
                    if rng.random() < 0.4 or not isinstance(inner[key], dict | list):
                        inner[key] = rng.choice(VALUES)
                        break
                    inner = inner[key]
                lines[index] = json.dumps(tree)
                file.write_text("\n".join(lines) + "\n")
        else:
            file.unlink()
            match rng.randrange(4):
                case 0:
                    os.mkfifo(file)
                case 1:
                    file.symlink_to(rng.choice(["/dev/zero", "/proc/self/environ", file.name, "nowhere", ".."]))
                case 2:
                    file.mkdir()
                case _:
                    file.write_bytes(b"")


def outcome(read: Read) -> str:
    """How reading ends in a forked process: taken, refused, or the rule that it breaks."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(120)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
        os.write(writer, _in_child(read).encode()[:2000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    return f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else answer


def _in_child(read: Read) -> str:
    programs: list[str] = []
    sys.addaudithook(lambda event, args: programs.append(f"{event} {args[:1]}") if event in PROGRAMS else None)
    errors, output = io.StringIO(), io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    text = "taken"
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        try:
            read()
        except SystemExit as ended:  # 1 is the answer of `verify` that a checkpoint is damaged
            text = {0: "taken", None: "taken", 1: "taken", 2: "refused"}.get(ended.code, f"exit code {ended.code}")
        except ShardkitError as error:
            text = "refused" if "\n" not in error.cause else f"a cause of several lines: {error.cause}"
        except MemoryError:
            text = "refused"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
    shown = output.buffer.getvalue().decode(errors="surrogateescape") + errors.getvalue()
    if "Traceback (most" in errors.getvalue():
        text = f"traceback: {errors.getvalue()[-300:]}"
    if controls := sorted({char for char in shown if not char.isprintable() and char not in "\n\t"}):
        text = f"wrote {controls} to the terminal"
    return f"started {programs[0]}" if programs and "git" not in programs[0] else text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pt", "safetensors", "dcp", "png"])
def test_damaged_files_are_taken_or_refused(kind: str, tmp_path: Path) -> None:
    for seed in SEEDS:
        folder, rng = tmp_path / str(seed), random.Random(f"{kind} {seed}")
        folder.mkdir()
        file, read = picture(folder) if kind == "png" else weights(kind, folder)
        file.write_bytes(mutate(file.read_bytes(), rng))
        assert outcome(read) in ("taken", "refused"), seed


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    ["report RUN", "checkpoint ls RUN", "checkpoint verify RUN", "checkpoint rm RUN 2 --force",
     "convert RUN --to safetensors --out OUT"],
)  # fmt: skip
def test_damaged_run_directories_are_taken_or_refused(arguments: str, trained: Path, tmp_path: Path) -> None:
    for seed in SEEDS:
        run, rng = shutil.copytree(trained, tmp_path / f"run{seed}"), random.Random(f"{arguments} {seed}")
        damage(run, rng)
        folders = {"RUN": run, "OUT": tmp_path / f"out{seed}"}
        words = [folders.get(word, word) for word in arguments.split()]
        assert outcome(command(*words)) in ("taken", "refused"), seed
