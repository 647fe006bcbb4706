"""How long `shardkit [submit] --help` and `import shardkit` take: python -m benchmarks.startup [--pairs N].

Each is timed in whole processes, alternating with its baseline in one run: a typer app with the same number of empty
commands (plain, like ours, and with typer's default rich output), and an interpreter that does nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .common import REPO, in_turns, median_ci, paired_ratio, publish
from .options import Option, options

SHARDKIT_HELP = (
    "import sys; from shardkit.cli.__main__ import main as m; sys.argv = ['shardkit', '--help']; sys.exit(m())"
)
SUBMIT_HELP = SHARDKIT_HELP.replace("'--help'", "'submit', '--help'")
BARE_APP = """
import sys
import typer
app = typer.Typer({options})
@app.command()
def one(directory: str, force: bool = False) -> None: "Do nothing."
@app.command()
def two() -> None: "Do nothing."
@app.command()
def three() -> None: "Do nothing."
sys.argv = ["bare", "--help"]
app()
"""
PLAIN_APP = BARE_APP.format(options="rich_markup_mode=None")
RICH_APP = BARE_APP.format(options="")
PLAIN_COMMAND = PLAIN_APP.replace('"bare", "--help"', '"bare", "one", "--help"')
NOTHING = "pass"
IMPORT = "import shardkit"


def seconds(code: str, environ: dict[str, str]) -> float:
    """Wall time of a fresh interpreter that runs `code`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environ, cwd=REPO, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def cpu_seconds(code: str, environ: dict[str, str]) -> float:
    """CPU time of a fresh interpreter that runs `code`: what a busy machine changes little."""
    before = os.times()
    seconds(code, environ)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def interleaved(
    codes: list[str], rounds: int, timing: Callable[[str, dict[str, str]], float] = seconds
) -> list[list[float]]:
    """`rounds` timings of each code, in turns, after one round to fill caches."""
    with tempfile.TemporaryDirectory() as caches:
        # Byte code is cached as for an installed package, whatever this checkout's environment says.
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environ |= {"PYTHONPATH": str(REPO), "PYTHONPYCACHEPREFIX": caches}
        for code in codes:
            seconds(code, environ)
        return list(in_turns({code: partial(timing, code, environ) for code in codes}, rounds).values())


def ratio(ours: list[float], baseline: list[float]) -> dict[str, Any]:
    """Median over pairs of ours/baseline with its 95 % interval, and both medians in ms."""
    value, low, high = paired_ratio(ours, baseline)
    return {
        "ratio": round(value, 3),
        "interval_95": [round(low, 3), round(high, 3)],
        "shardkit_ms": round(median_ci(ours)[0] * 1e3, 1),
        "baseline_ms": round(median_ci(baseline)[0] * 1e3, 1),
    }


def import_ms(rounds: int, timing: Callable[[str, dict[str, str]], float] = seconds) -> tuple[float, float, float]:
    """(median, low, high) of the ms that `import shardkit` adds to an interpreter's start."""
    nothing, importing = interleaved([NOTHING, IMPORT], rounds, timing)
    value, low, high = median_ci([(b - a) * 1e3 for a, b in zip(nothing, importing, strict=True)])
    return value, low, high


def main() -> None:
    pairs = options(__doc__, pairs=Option(40, "timings of each", least=20)).pairs
    ours, plain, rich = interleaved([SHARDKIT_HELP, PLAIN_APP, RICH_APP], pairs)
    submit, command = interleaved([SUBMIT_HELP, PLAIN_COMMAND], pairs)
    value, low, high = import_ms(pairs)
    result = {
        "pairs": pairs,
        "help_vs_plain_typer_app": ratio(ours, plain),
        "submit_help_vs_plain_typer_app": ratio(submit, command),
        "help_vs_default_typer_app": ratio(ours, rich),
        "import_shardkit_ms": {"median": round(value, 1), "interval_95": [round(low, 1), round(high, 1)]},
    }
    publish("startup", result)


if __name__ == "__main__":
    main()
