"""A rehearsed program's writes are thrown away, and it reaches no network; the records alone are real."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.rehearse.rehearsal import REFUSED, SANDBOX, summary


def run(folder: Path, code: str, *args: object, **settings: object) -> subprocess.CompletedProcess[str]:
    """Python code in a sandbox, whose folder is given."""
    (folder / "records").mkdir(parents=True)
    paths = {"folder": str(folder), "records": str(folder / "records"), "refusal": str(folder / "refusal")}
    (folder / "sandbox.json").write_text(json.dumps({"overlay": True, "network": False, **paths, **settings}))
    command = [sys.executable, "-I", "-S", str(SANDBOX), str(folder / "sandbox.json"), sys.executable, "-c", code]
    done = subprocess.run([*command, *map(str, args)], capture_output=True, text=True, timeout=60)
    if done.returncode == REFUSED:
        pytest.skip(f"needs namespaces and overlays: {(folder / 'refusal').read_text()}")
    return done


WRITES = """
import os, pathlib, shutil, sys
files, records = map(pathlib.Path, sys.argv[1:])
(files / "model.pt").write_text("zeros")
shutil.rmtree(files / "checkpoint-1")
(files / "checkpoint-2").mkdir()
(files / "checkpoint-2" / "model.pt").write_text("zeros")
(records / "1.json").write_text("{}")
assert (files / "model.pt").read_text() == "zeros" and not (files / "checkpoint-1").exists()
print(os.getuid(), os.getcwd())
"""


def test_what_a_program_overwrites_and_deletes_is_as_before(tmp_path: Path) -> None:
    files = tmp_path / "files"
    (files / "checkpoint-1").mkdir(parents=True)
    (files / "checkpoint-1" / "model.pt").write_text("trained")
    (files / "model.pt").write_text("trained")
    done = run(tmp_path / "rehearsal", WRITES, files, tmp_path / "rehearsal" / "records")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(os.getuid()), os.getcwd()]
    assert {str(path.relative_to(files)) for path in files.rglob("*")} == {
        "model.pt", "checkpoint-1", "checkpoint-1/model.pt",
    }  # fmt: skip
    assert (files / "model.pt").read_text() == (files / "checkpoint-1" / "model.pt").read_text() == "trained"
    assert (tmp_path / "rehearsal" / "records" / "1.json").read_text() == "{}"
    told = summary(tmp_path / "rehearsal")
    assert f"would have been overwritten: {files / 'model.pt'}" in told
    assert f"would have been deleted: {files / 'checkpoint-1'}" in told


CONNECTS = """
import socket, sys
with socket.socket() as server:
    server.bind(("127.0.0.1", 0)); server.listen()
    socket.create_connection(server.getsockname()).close()
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20)
except OSError as error:
    sys.exit(f"refused: {error}")
"""


def test_a_program_has_a_network_of_its_own_only(tmp_path: Path) -> None:
    with socket.socket() as outside:
        outside.bind(("127.0.0.1", 0))
        outside.listen()
        port = outside.getsockname()[1]
        assert "refused: " in run(tmp_path / "off", CONNECTS, port).stderr
        assert run(tmp_path / "on", CONNECTS, port, network=True).returncode == 0


def test_a_program_may_write_where_that_is_allowed(tmp_path: Path) -> None:
    code = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('new')"
    assert run(tmp_path / "rehearsal", code, tmp_path / "file", overlay=False, network=True).returncode == 0
    assert (tmp_path / "file").read_text() == "new"
    assert summary(tmp_path / "rehearsal") == []


def test_the_exit_code_is_the_programs(tmp_path: Path) -> None:
    assert run(tmp_path / "rehearsal", "import sys; sys.exit(9)").returncode == 9


SWEEPS = """
import subprocess
from shardkit.launch.local import processes
child = subprocess.Popen(["sleep", "60"])
print(processes.sweep(0.0) == [child.pid], child.wait())
"""


def test_what_a_program_started_is_killed_by_whoever_comes_late_too() -> None:
    done = subprocess.run([sys.executable, "-c", SWEEPS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "-9"], done.stderr
