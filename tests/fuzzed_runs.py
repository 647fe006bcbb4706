"""Damaged run directories of strangers, for `tests.fuzzed_files`."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardkit.report.profile.account import CATEGORIES
from shardkit.report.profile.chrome_trace import OUTSIDE, PHASES
from shardkit.report.profile.show import SCHEMA
from tests.memory.samples import MIB
from tests.report import samples
from tests.report.test_script import launched

SCALARS: tuple[Any, ...] = (
    None, True, False, 0, -1, 0.5, -1e308, 2**63 - 1, -(2**63), 2**200, 10**400, "", "٣", "²", "1e9", "9" * 5000,
    "\x1b]0;owned\x07\x1b[2J", "<script>alert(1)</script>", "\ud800", "a" * 100_000, "../../../etc/passwd",
    "/proc/self/environ", "\u202egnp", "line\nline", [], {}, [[]], {"": None}, [None] * 5000, {"step": 1},
)  # fmt: skip
"""Values that take the place of one in a file of JSON."""
TEXTS = (
    "NaN", "-Infinity", "1e999", "1" * 6000, "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, '"\\ud800"',
    "[" * 200_000, "[" + "{}," * 100_000 + "{}]",
)  # fmt: skip
"""Text that takes the place of a value: JSON that `json.dumps` does not write."""
NAMES = (
    "rank²3.json", "rank٣.json", "rank-1.json", "rank99999999999999999999.json", "rank.json", "\x1b[2Jrank.json",
    "step_٣", "step_99999999999999999999", "step_-1", "step_00000001\n", "\x1b]0;x\x07", "slurm-²_1.out", "a\nb",
    "rank1_summary.json", "slurm-9.out", "step_00000002", "step_00000002.corrupt", ".part", "x" * 200,
    "20260101-110000-node٣-7",
)  # fmt: skip
_PLACE = "replaced by this text"


def write(run: Path, trained: Path) -> Path:
    """A run directory with the files that commands read: a trained run's, traces, post-mortems, logs and more."""
    shutil.copytree(trained, run)
    made = samples.write_run(run.with_name("made"), gpu=True)
    for name in ("metrics.jsonl", "memory.jsonl", "env.json"):
        (made / name).replace(run / name)
    shutil.rmtree(made)
    samples.add(
        run,
        {
            "trace/rank0.json": samples.trace(0), "trace/rank1.json": samples.trace(1), "plan.json": samples.plan(),
            "oom/rank1.json": samples.post_mortem(), "profile/rank0_summary.json": summary(0),
            "profile/rank1_summary.json": summary(1),
        },
    )  # fmt: skip
    samples.lines(run / "samples.jsonl", [{"step": 10, "prompt": "a", "text": "b"}])
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "slurm-1.out").write_text("step 1\nstep 2\n")
    samples.lines(run / "logs" / "restarts.jsonl", list(_starts()))
    attempt = launched(run, "110000", failed=True) / "shardkit_x" / "attempt_0"
    entry = {"rank": 1, "exit_code": 1, "when": 5.0, "message": "ValueError: boom", "trace": "Traceback", "node": "n1"}
    (attempt / "0" / "error.json").write_text(json.dumps({"shardkit": entry}))
    torch_entry = {"message": "RuntimeError", "extraInfo": {"py_callstack": "Traceback", "timestamp": "5"}}
    (attempt / "1" / "error.json").write_text(json.dumps({"message": torch_entry}))
    return run


def _starts() -> Iterator[dict[str, Any]]:
    for restart in range(2):
        common = {"time": "2026-01-02T03:04:05+0000", "job": "7", "restart": restart, "step": restart}
        yield {"event": "start", **common, "nodes": "n1"}
        yield {"event": "end", **common, "reason": "preempted", "refused": False}
    yield {"event": "restart", "step": 1, "node": "n1", "by": 5, "reason": "rank 1 failed", "lost_peer": False}


def summary(rank: int) -> dict[str, Any]:
    """A profile's summary, as `shardkit profile` reads it."""
    live = [{"op": "aten::mm", "phase": "forward", "category": "params", "bytes": MIB}]
    phases = (*PHASES, OUTSIDE)
    return {
        "schema": SCHEMA, "rank": rank, "world_size": 2, "device": "cpu", "steps": [3, 4],
        "settings": {"parallel.strategy": "ddp"}, "files": {"trace": f"rank{rank}_trace.json.gz"},
        "peak": {"bytes": 3 * MIB, "phase": "forward", "step": 3, "live": live,
                 "categories": dict.fromkeys(CATEGORIES, MIB)},
        "allocations": [{**live[0], "count": 2.0, "largest": MIB, "where": ""}],
        "ops": {phase: [{"op": "aten::mm", "count": 2.0, "self_us": 5.0, "device_us": 0.0}] for phase in phases},
        "phases": {phase: {"ms": 2.5} for phase in phases},
    }  # fmt: skip


def damage(run: Path, rng: random.Random, mutate: Any) -> None:
    """Damage one to four of the directory's files: their bytes, their JSON, their kinds or their names."""
    for _ in range(rng.randint(1, 4)):
        files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
        file = rng.choice(files)
        kind = rng.choice(["bytes", "json", "json", "json", "text", "text", "odd", "name"])
        if kind == "bytes":
            file.write_bytes(mutate(file.read_bytes(), rng))
        elif kind in ("json", "text") and file.suffix in (".json", ".jsonl", ".yaml"):
            _damage_json(file, rng, SCALARS if kind == "json" else TEXTS)
        elif kind == "odd":
            _make_odd(rng.choice([file, file.parent, file.parent]) if file.parent != run else file, rng)
        else:
            copy = rng.choice([file, file.parent]) if file.parent != run else file
            with suppress(OSError):
                copy.rename(copy.with_name(rng.choice(NAMES)))


def _damage_json(file: Path, rng: random.Random, values: Sequence[Any]) -> None:
    """Replace or remove values in a file of JSON, of JSON lines, or in a config, which JSON is too."""
    content = file.read_text(errors="replace")
    lines = content.splitlines() if file.suffix == ".jsonl" else [content]
    if file.suffix == ".yaml":
        import yaml

        with suppress(yaml.YAMLError):
            lines = [json.dumps(yaml.safe_load(content))]
    if not lines:
        return
    index = rng.randrange(len(lines))
    try:
        tree = json.loads(lines[index])
    except (ValueError, RecursionError):
        return
    for _ in range(rng.randint(1, 3)):
        spots = list(_spots(tree))
        if not spots:
            break
        parent, key = rng.choice(spots)
        action = rng.randrange(6)
        if action == 0:
            del parent[key]
            continue
        new = rng.choice(values)
        if isinstance(parent, dict) and action == 1 and isinstance(new, str):
            parent[new] = parent.pop(key)
        else:
            parent[key] = f"{_PLACE} {values.index(new)}" if values is TEXTS else new
    text = json.dumps(tree)
    for number, raw in enumerate(TEXTS if values is TEXTS else ()):
        text = text.replace(f'"{_PLACE} {number}"', raw)
    lines[index] = text
    file.write_text("\n".join(lines * rng.choice([1, 1, 1, 5])) + "\n")


def _spots(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each place of a value in a tree: its container, and its key or index."""
    pairs: Any = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, content in list(pairs):
        yield tree, key
        yield from _spots(content)


def _make_odd(path: Path, rng: random.Random) -> None:
    """Put something else in the path's place: a pipe, a socket, a link, a folder, or a file of holes."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    kind = rng.choice(["pipe", "socket", "link", "folder", "holes", "empty"])
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            here = os.open(path.parent, os.O_RDONLY)
            bound.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
    elif kind == "link":
        path.symlink_to(rng.choice(["/dev/zero", "/proc/self/environ", path, "nowhere", "..", "/", "/dev/stdin"]))
    elif kind == "folder":
        path.mkdir()
    elif kind == "holes":
        with path.open("wb") as file:
            file.truncate(rng.choice([1 << 20, 1 << 34]))
    else:
        path.write_bytes(b"")
