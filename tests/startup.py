"""The cost of starting: fresh interpreters that import shardkit, and bare typer applications to compare with."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

REPO = Path(__file__).resolve().parent.parent
SHARDKIT_HELP = (
    "import sys; from shardkit.cli.__main__ import main as m; sys.argv = ['shardkit', '--help']; sys.exit(m())"
)
SUBMIT_HELP = SHARDKIT_HELP.replace("'--help'", "'submit', '--help'")
PLAIN_APP = """
import sys
import typer
app = typer.Typer(rich_markup_mode=None)
@app.command()
def one(directory: str, force: bool = False) -> None: "Do nothing."
@app.command()
def two() -> None: "Do nothing."
@app.command()
def three() -> None: "Do nothing."
sys.argv = ["bare", "--help"]
app()
"""
PLAIN_COMMAND = PLAIN_APP.replace('"bare", "--help"', '"bare", "one", "--help"')


def cpu_seconds(code: str, environ: dict[str, str]) -> float:
    """CPU time of a fresh interpreter that runs `code`, which a busy machine changes little."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code], env=environ, cwd=REPO, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def import_ms(rounds: int) -> tuple[float, float]:
    """Median and minimum of the ms of CPU time that `import shardkit` adds to an interpreter's start."""
    with tempfile.TemporaryDirectory() as caches:
        # Byte code is cached as for an installed package, whatever this checkout's environment says.
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environ |= {"PYTHONPATH": str(REPO), "PYTHONPYCACHEPREFIX": caches}
        cpu_seconds("import shardkit", environ)
        added = [cpu_seconds("import shardkit", environ) - cpu_seconds("pass", environ) for _ in range(rounds)]
    return median(added) * 1e3, min(added) * 1e3
