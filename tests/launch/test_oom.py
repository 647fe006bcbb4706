"""What the launcher says of ranks that ran out of memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shardkit.errors import OutOfMemoryError
from shardkit.launch.failures import exit_codes
from shardkit.launch.failures.failure import (
    Failure,
    exit_code_of,
    explain,
    memory_words,
    read,
    read_post_mortems,
)
from tests.launch.test_failure import recorded

GIB = 2**30


def left(run_dir: Path, rank: int, when: float = 100.0, kind: str = "device", **more: Any) -> None:
    changes = [("activation.policy=full", 18 * GIB), ("parallel.strategy=fsdp", 2 * GIB), ("x=1", None), ("y=1", None)]
    record = {
        "schema": 1, "kind": kind, "time": when, "rank": rank, "host": f"n{rank}", "step": 20,
        "memory": {"limit": 64 * GIB, "free": 2 * GIB, "missing": 4 * GIB},
        "row": {"host_mem": {"rss": 20 * GIB, "children_rss": 10 * GIB}},
        "advice": [{"change": c, "saving_bytes": s, "cost": "slower", "why": "w"} for c, s in changes],
        **more,
    }  # fmt: skip
    (run_dir / "oom").mkdir(exist_ok=True)
    (run_dir / "oom" / f"rank{rank}.json").write_text(json.dumps(record))


def test_the_best_changes_take_the_place_of_the_fix(tmp_path: Path) -> None:
    left(tmp_path, 1)
    failures = read([recorded(tmp_path, rank, OutOfMemoryError(f"rank {rank} ran out", "set a=b")) for rank in (1, 2)])
    assert exit_code_of(failures) == exit_codes.OUT_OF_MEMORY
    shown = explain(failures, "LOGS", memory=memory_words(failures, read_post_mortems(tmp_path, 50)))
    assert shown.splitlines() == [
        "error: rank 1 ran out",
        "  what would help, and what it costs:",
        "    activation.policy=full  saves 18.0 GiB: slower",
        "    parallel.strategy=fsdp  saves 2.0 GiB (not enough alone): slower",
        "    x=1                     saves memory: slower",
        f"  post-mortem: {tmp_path}/oom/rank1.json",
        "  out of memory as well: rank(s) 2",
        "  logs: LOGS",
    ]


def test_without_a_file_the_ranks_own_fix_is_shown(tmp_path: Path) -> None:
    failures = read([recorded(tmp_path, 1, OutOfMemoryError("rank 1 ran out", "set a=b"))])
    shown = explain(failures, "LOGS", memory=memory_words(failures, read_post_mortems(tmp_path, 50)))
    assert shown.splitlines() == ["error: rank 1 ran out", "  fix: set a=b", "  logs: LOGS"]


def test_files_of_earlier_attempts_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    left(tmp_path, 0, when=49.9)
    left(tmp_path, 1, when=50.0)
    left(tmp_path, 2, schema=99)
    (tmp_path / "oom/rank3.json").write_text('{"schema": 1, "time": 60')
    (tmp_path / "oom/rank4.json").write_text("[]")
    (tmp_path / "oom/rank1.json.part7").write_text("draft")
    assert set(read_post_mortems(tmp_path, 50)) == {1}
    assert read_post_mortems(tmp_path / "elsewhere", 0) == {}


def test_a_killed_rank_is_explained_by_what_it_saw_coming(tmp_path: Path) -> None:
    left(tmp_path, 1, kind="host-risk")
    killed = Failure(1, -9, message=exit_codes.describe(-9))
    shown = explain([killed], "LOGS", 1, memory_words([killed], read_post_mortems(tmp_path, 50)))
    assert "out of host memory: the kernel killed 1 process" in shown
    assert re.search(r"step 20: 62.0 GiB of 64.0 GiB on n1; rank 1 held 20.0 GiB, .* 10.0 GiB", shown)
    assert "activation.policy=full" in shown and "dmesg" not in shown


def test_a_neighbour_may_have_seen_it_coming(tmp_path: Path) -> None:
    left(tmp_path, 0, kind="host-risk")
    killed = Failure(1, 137)
    assert "rank 0 held" in memory_words([killed], read_post_mortems(tmp_path, 50))[1][0]


def test_a_killed_rank_without_a_word_keeps_the_general_advice(tmp_path: Path) -> None:
    killed = Failure(1, -9, message=exit_codes.describe(-9))
    assert "dmesg" in explain([killed], "LOGS", memory=memory_words([killed], read_post_mortems(tmp_path, 50)))
    left(tmp_path, 0, kind="device")
    assert memory_words([Failure(1, -9)], read_post_mortems(tmp_path, 50)) == {}
