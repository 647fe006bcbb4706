"""The proof of `shardkit prove`: programs drawn at random, with a defect or without, and what it answers.

`python -m tests.prove.planted --seeds 0:400` judges both kinds for each seed; `--kind planted` or `right` one of them.
Ranks are forked from this process, which has imported what programs need, and see no sandbox.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tests.preloaded  # noqa: F401 - first: it sets variables that torch and DeepSpeed read
from shardkit.errors import ShardkitError
from shardkit.prove.inject.shardkit_pieces import SAMPLED_ABOVE
from shardkit.prove.leaks import LeakSearch
from shardkit.prove.proof import prove
from shardkit.prove.runs import Runner, injected
from shardkit.rehearse.rehearsal import Limits
from tests.ranks import LEAKS, _die_with_parent

from .programs import OF_OPTION, Draw, draw

PROGRAM_S = 60.0
"""How long one start of a tiny program may take on a machine that others use."""


class Forked(Runner):
    """Starts programs as forks of this process: seconds of imports less for each."""

    def execute(self, command: Sequence[str], folder: Path, n_steps: int) -> tuple[int, bool]:
        count = re.search(r"--nproc-per-node (\d+)", " ".join(command))
        program = next(index for index, word in enumerate(command) if word.endswith(".py"))
        environ = {"SHARDKIT_PROOF": str(folder / "records"), "SHARDKIT_PROOF_PLAN": str(folder / "plan.json")}
        environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
        n_ranks = int(count[1]) if count else 1
        if count:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            environ |= {"WORLD_SIZE": count[1], "LOCAL_WORLD_SIZE": count[1], "MASTER_ADDR": "127.0.0.1"}
            environ |= {"MASTER_PORT": port}
        path = str(injected(self.folder))
        (folder / "upper" / "0").mkdir(parents=True)  # as the sandbox has what a program writes
        (folder / "overlays.json").write_text(json.dumps({"overlays": ["/drawn"], "read_only": []}))
        ranks: set[int] = set()
        for rank in range(n_ranks):
            process = os.fork()
            if not process:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count else {}
                _train(list(command[program:]), path, {**environ, **own}, folder)
            ranks.add(process)
        return _ended(ranks)


def _train(argv: list[str], inject: str, environ: dict[str, str], folder: Path) -> None:
    """Run a script in this process, a fork, and end it."""
    code = 1
    try:
        _die_with_parent()
        opened = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        for name in [name for name in os.environ if name.startswith((*LEAKS, "RANK", "WORLD_SIZE", "LOCAL_"))]:
            del os.environ[name]
        os.environ.update(environ)
        sys.path.insert(0, inject)
        import shardkit_proof  # type: ignore[import-not-found]  # the recorder, in the folder just named

        shardkit_proof.attach()
        sys.argv = argv
        os.chdir(folder / "upper" / "0")
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(ranks: set[int]) -> tuple[int, bool]:
    """Wait for all ranks; after the first that fails the others have two seconds."""
    deadline, code, failed = time.monotonic() + PROGRAM_S, 0, False
    try:
        while ranks and time.monotonic() < deadline:
            for process in list(ranks):
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    ranks.discard(process)
                    code = code or os.waitstatus_to_exitcode(status)
            if code and not failed:
                failed, deadline = True, time.monotonic() + 2
            time.sleep(0.02)
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return code, bool(ranks) and not failed


def judge(program: Draw, folder: Path, sampled_above: int = SAMPLED_ABOVE) -> dict[str, Any]:
    """The verdict on a draw, as `--json` has it, with the seconds that it took."""
    train, one = folder / "train.py", folder / "one.py"
    train.write_text(program.program())
    one.write_text(program.plain())
    command = ["torchrun", "--nproc-per-node", str(program.world), str(train)]
    against = f"python {one}" if program.plain_reference else None
    began = time.monotonic()
    try:
        until, leak = ("save", None) if program.until == "save" else ("", LeakSearch() if program.until else None)
        runner = Forked(folder, Limits(time_limit_s=PROGRAM_S), sampled_above=sampled_above)
        verdict = prove(command, against, 2, runner, until, leak).as_json()
    except ShardkitError as error:
        verdict = {"verdict": "refused", "word": None, "lines": [str(error)], "reasons": []}
    return {**verdict, "seconds": time.monotonic() - began}


def answer(program: Draw, verdict: dict[str, Any]) -> str:
    """How good the answer is: right, another word, missed, a false alarm, or another verdict."""
    got = verdict["verdict"]
    if got == program.wanted:
        return "right" if program.is_named(verdict["word"]) else "another word"
    if program.defect == "none":
        return "false alarm" if got in ("not the same", "rows") else f"not proven ({got})"
    return "missed" if got == "same" else f"another verdict ({got})"


def table(rows: Iterable[tuple[Draw, dict[str, Any], str]]) -> str:
    """Defects down; draws, flagged, right words, and the seconds of one."""
    by_defect: dict[str, list[tuple[Draw, dict[str, Any], str]]] = defaultdict(list)
    for row in rows:
        by_defect["right programs" if row[0].defect == "none" else row[0].defect].append(row)
    lines = ["| planted | layouts | draws | right | other answers | seconds each |", "|---|---|---|---|---|---|"]
    for defect, drawn in sorted(by_defect.items()):
        layouts = ", ".join(sorted({program.layout for program, *_ in drawn}))
        answers = Counter(text for *_, text in drawn)
        right = answers.pop("right", 0)
        others = ", ".join(f"{count} {text}" for text, count in answers.most_common()) or "none"
        seconds = sum(verdict["seconds"] for _, verdict, _ in drawn) / len(drawn)
        lines.append(f"| {defect} | {layouts} | {len(drawn)} | {right} | {others} | {seconds:.0f} |")
    return "\n".join(lines)


def campaign(
    seeds: range,
    kinds: Sequence[str],
    layouts: tuple[str, ...],
    log: Path | None,
    until: str = "",
    sampled_above: int = SAMPLED_ABOVE,
) -> list[str]:
    """Judge the draws of these seeds; the answers."""
    rows = []
    for seed in seeds:
        for kind in kinds:
            program = draw(seed, right=kind == "right", layouts=layouts, until=until)
            folder = Path(tempfile.mkdtemp(prefix="planted-"))
            try:
                verdict = judge(program, folder, sampled_above)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            text = answer(program, verdict)
            rows.append((program, verdict, text))
            spent = f"{verdict['seconds']:.1f} s"
            print(f"{seed} {kind}: {text}; {program.defect}; {verdict['word']}; {program.line()}; {spent}", flush=True)
            if text != "right":
                words = [verdict.get("headline", ""), *verdict["lines"], *verdict["reasons"]]
                print(*(f"    {line}" for line in words), sep="\n", flush=True)
            if log:
                with log.open("a") as file:
                    file.write(json.dumps({"seed": seed, "kind": kind, "answer": text, **verdict}) + "\n")
    print(table(rows))
    return [text for *_, text in rows]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:20", help="from:to")
    parser.add_argument("--kind", choices=["both", "planted", "right"], default="both")
    parser.add_argument("--layouts", help="separated by commas; else all that the options are drawn for, but FURTHER")
    parser.add_argument("--until", choices=["", "save"], default="", help="what is saved is judged, too")
    parser.add_argument("--leak", action="store_true", help="whether documents see each other is judged, too")
    parser.add_argument("--sample-above", type=int, default=SAMPLED_ABOVE, help="numbers of a tensor")
    parser.add_argument("--exact", action="store_true", help="another word for a defect is wrong, too")
    parser.add_argument("--log", type=Path, help="a file to which each answer is added, a line of JSON each")
    given = parser.parse_args(argv)
    first, last = map(int, given.seeds.split(":"))
    kinds = ["planted", "right"] if given.kind == "both" else [given.kind]
    option = "leak" if given.leak else given.until
    layouts = tuple(given.layouts.split(",")) if given.layouts else OF_OPTION[option]
    if {"accelerate", "trainer"} & set(layouts):
        import transformers.trainer  # noqa: F401 - before the forks: it takes seconds
    answers = campaign(range(first, last), kinds, layouts, given.log, option, given.sample_above)
    return int(any(text != "right" and (given.exact or text != "another word") for text in answers))


if __name__ == "__main__":
    sys.exit(main())
