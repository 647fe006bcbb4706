"""`shardkit checkpoint ls|verify|rm`."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
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


ODD: list[Any] = [
    None, True, -1, 2**70, 10**400, 1e308, "", "x", "\x1b]0;owned\x07\x9b2J\u202e\ud800", "a\nb", [], {}, ...,
]  # fmt: skip


def odd_manifests(body: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(place, what stands there) for every place and odd value; of long lists and objects the first entries."""
    yield from ((at, odd) for odd in ODD if at or odd is not ...)
    keys = list(body)[:12] if isinstance(body, dict) else range(min(len(body), 2)) if isinstance(body, list) else ()
    for key in keys:
        yield from odd_manifests(body[key], (*at, key))


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, pytest.param(250, marks=pytest.mark.slow)])
def test_ls_of_odd_manifests_with_right_digests(count: int, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved / "step_00000003" / "manifest.json"
    manifest = json.loads(file.read_bytes())["manifest"]
    (saved / "step_00000009.\x1b[2J").mkdir()
    chance = random.Random(0)
    cases = list(odd_manifests(manifest))
    for at, odd in [(("run", "val_loss"), odd) for odd in ODD] + chance.sample(cases, count):
        body = copy.deepcopy(manifest)
        inner = body
        for key in at[:-1]:
            inner = inner[key]
        if not at:
            body = odd
        elif odd is ...:
            del inner[at[-1]]
        else:
            inner[at[-1]] = odd
        text = _canonical(body)
        file.write_text(f'{{"digest":"{_digest(text)}","manifest":{text}}}')
        for command in (["checkpoint", "ls", str(saved.parent)], ["checkpoint", "verify", str(saved.parent), "3"]):
            with pytest.raises(SystemExit) as ended:
                main(command)
            printed = capsys.readouterr()
            shown = printed.out + printed.err
            assert ended.value.code in (0, 1, 2) and all(c.isprintable() or c == "\n" for c in shown), (at, odd, shown)
            assert ended.value.code != 2 or printed.err.startswith("error: "), (at, odd, printed)


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


def test_a_directory_without_checkpoints_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=folder.name):
            invoke("ls", folder)
