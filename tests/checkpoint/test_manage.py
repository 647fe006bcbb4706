"""`shardkit checkpoint ls|verify|rm`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardkit.checkpoint.native import layout
from shardkit.checkpoint.native.manifest import _canonical, _digest
from shardkit.cli.__main__ import main
from shardkit.cli.checkpoint import app
from shardkit.errors import CheckpointError


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("strategy", "\x1b]0;owned\x07\x9b2J\u202e"),
        ("created", "a\nb"),
        ("world_size", 10**400),
        ("scalars", []),
        ("run", {}),
    ],
)
def test_a_manifest_with_a_right_digest_moves_no_cursor(
    key: str, value: Any, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved / "step_00000003" / "manifest.json"
    (saved / "step_00000009.\x1b[2J").mkdir()
    text = _canonical({**json.loads(file.read_bytes())["manifest"], key: value})
    file.write_text(f'{{"digest":"{_digest(text)}","manifest":{text}}}')
    for command in (["checkpoint", "ls", str(saved.parent)], ["checkpoint", "verify", str(saved.parent), "3"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        printed = capsys.readouterr()
        assert all(c.isprintable() or c == "\n" for c in printed.out + printed.err), printed
        assert ended.value.code in (0, 1) or printed.err.startswith("error: ")


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_dir())


def test_ls_says_what_each_is(saved: Path) -> None:
    os.truncate(saved / "step_00000001" / "rank_00000.bin", 10)
    (saved / "step_00000004.tmp").mkdir()
    (saved / "step_00000005.superseded").mkdir()
    code, output = invoke("ls", saved.parent)
    rows = {line.split()[0]: line for line in output.splitlines()}
    assert code == 0
    assert "damaged" in rows["step_00000001"] and "10 bytes" in rows["step_00000001"]
    assert "complete" in rows["step_00000002"] and "plain × 1" in rows["step_00000002"]
    assert "latest, best" in rows["step_00000003"]
    assert "unfinished" in rows["step_00000004.tmp"]
    assert "set aside" in rows["step_00000005.superseded"]


def test_steps_of_nine_digits_are_the_newest(saved: Path) -> None:
    (saved / "step_00000001").rename(saved / "step_99999999")
    (saved / "step_00000002").rename(saved / "step_100000000")
    code, output = invoke("ls", saved.parent)
    rows = output.splitlines()[1:]
    assert code == 0
    assert [row.split()[0] for row in rows] == ["step_00000003", "step_99999999", "step_100000000"]
    assert ["latest" in row for row in rows] == [False, False, True]


def test_verify_reads_every_byte(saved: Path) -> None:
    assert invoke("verify", saved.parent) == (
        0, "step_00000001: intact\nstep_00000002: intact\nstep_00000003: intact\n",
    )  # fmt: skip
    data = saved / "step_00000002" / "rank_00000.bin"
    content = bytearray(data.read_bytes())
    content[70_000] ^= 1
    data.write_bytes(content)
    code, output = invoke("verify", saved.parent)
    assert code == 1
    assert "step_00000002: damaged" in output and "model.0" in output
    assert invoke("verify", saved.parent, 3)[0] == 0


def test_rm_deletes_and_moves_latest(saved: Path) -> None:
    code, output = invoke("rm", saved.parent, 3, "step_00000001")
    assert code == 0 and "deleted" in output
    assert names(saved) == ["step_00000002"]
    assert (saved / "latest").read_text() == "step_00000002\n"


def test_rm_keeps_the_last_one_unless_forced(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="without a checkpoint"):
        invoke("rm", saved.parent, 1, 2, 3)
    assert len(layout.checkpoints(saved)) == 3
    assert invoke("rm", saved.parent, 1, 2, 3, "--force")[0] == 0
    assert names(saved) == []


@pytest.mark.parametrize("name", ["9", "../..", "/etc", "../checkpoints/step_00000001", "step_1", "latest"])
def test_rm_touches_only_checkpoints(name: str, saved: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        invoke("rm", saved.parent, name)
    assert len(layout.checkpoints(saved)) == 3
