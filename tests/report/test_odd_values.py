"""Run directories that another program damaged or filled with odd values: a page, or two lines that say why not."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.cli.__main__ import main
from tests.report.samples import add, plan, post_mortem, trace, write_run

ODD: list[Any] = [
    None, True, -1, 0, 2**70, -(2**70), 10**400, 1e308, float("nan"), float("inf"), -float("inf"), "", "x", "5",
    "\x1b]0;owned\x07\x9b2J\u202e", "\ud800", "a\nb", [], [[]], [1, None, "x"], {}, {"a": {"b": []}}, "x" * 5000,
]  # fmt: skip


def _whole(path: Path) -> Path:
    write_run(path, gpu=True)
    add(path, {"trace/rank0.json": trace(0), "plan.json": plan(), "oom/rank1.json": post_mortem()})
    launch = path / "logs" / "20260101-000000-node0-1" / "x" / "attempt_0" / "1"
    launch.mkdir(parents=True)
    own = {"rank": 1, "exit_code": 1, "when": 1.7e9, "message": "lost", "trace": "", "fix": "", "is_error": False}
    launch.joinpath("error.json").write_text(
        json.dumps({"message": {"message": "m", "extraInfo": {}}, "shardkit": own})
    )
    other = launch.parent / "0"
    other.mkdir()
    other.joinpath("error.json").write_text(json.dumps({"message": {"message": "m", "extraInfo": {"timestamp": "17"}}}))
    starts: list[dict[str, Any]] = [
        {"event": "start", "job": "1", "restart": 0, "step": 0, "nodes": "n"},
        {"event": "end", "job": "1", "restart": 0, "step": 3, "reason": "saved after USR2"},
        {"event": "restart", "step": 4, "node": "n", "by": 7, "reason": "lost", "lost_peer": False},
        {"event": "start", "job": "1", "restart": 1, "step": 3, "nodes": "n"},
    ]
    (path / "logs" / "restarts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    return path


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield at
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    ):
        yield from _places(inner, (*at, key))


def _replaced(value: Any, at: tuple[Any, ...], odd: Any) -> Any:
    if not at:
        return odd
    changed = copy.deepcopy(value)
    inner = changed
    for key in at[:-1]:
        inner = inner[key]
    if odd is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = odd
    return changed


def _damage(file: Path, data: st.DataObject) -> None:
    content = file.read_bytes()
    if data.draw(st.integers(0, 5)) == 0:
        at = data.draw(st.integers(0, len(content) - 1))
        cut = data.draw(st.sampled_from(["cut", "byte", "pipe", "folder"]))
        if cut in ("pipe", "folder"):
            file.unlink()
            os.mkfifo(file) if cut == "pipe" else file.mkdir()
        else:
            file.write_bytes(content[:at] if cut == "cut" else content[:at] + b"\xff" + content[at + 1 :])
        return
    lines = [content.decode()] if file.suffix == ".json" else content.decode().splitlines()
    if file.suffix == ".yaml":
        lines = [content.decode().partition("\n")[2]]
    number = data.draw(st.sampled_from([0, len(lines) // 2, len(lines) - 1]))
    value = json.loads(lines[number])
    at = data.draw(st.sampled_from(list(_places(value))))
    odd = data.draw(st.sampled_from([*ODD, ...] if at else ODD))
    lines[number] = json.dumps(_replaced(value, at, odd))
    file.write_text("\n".join(lines) + "\n")


def _said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends well, or with an error of two lines; what it prints moves no cursor."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    assert all(character.isprintable() or character == "\n" for character in said.out + said.err), repr(said)
    assert ended.value.code in (0, None) or (ended.value.code == 2 and said.err.startswith("error: ")), said.err


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _whole(tmp_path_factory.mktemp("odd") / "run")


def _check(whole: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject, times: int) -> None:
    copied = whole.with_name("copy")
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(whole, copied)
    files = sorted(path for path in copied.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".yaml"))
    for file in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=times, unique=True)):
        _damage(file, data)
    _said(["report", str(copied)], capsys)
    _said(["report", str(copied), str(whole)], capsys)


EASY = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@settings(EASY, max_examples=12)
@given(data=st.data())
def test_a_report_of_odd_values(whole: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject) -> None:
    _check(whole, capsys, data, 1)


@pytest.mark.release
@pytest.mark.timeout(3600)
@settings(EASY, max_examples=1500)
@given(data=st.data())
def test_reports_of_many_odd_values(whole: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject) -> None:
    _check(whole, capsys, data, 3)
