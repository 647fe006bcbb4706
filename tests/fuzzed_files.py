"""Mutated files of every format that strangers may give: `python -m tests.fuzzed_files --seeds 0:200`.

Each seed damages one honest file of each format and reads it in a process of its own. A reader may take a file or
refuse it with an error of shardkit's. It may not start a program, take more than a GiB of memory beyond the file's
size, take more than 20 s of CPU time, or fail in another way.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from shardkit.cli.__main__ import main
from shardkit.errors import ShardkitError
from shardkit.files import bounded
from tests import fuzzed_runs
from tests.commands import python_m

MOST_BYTES, MOST_SECONDS, LONGEST_SECONDS = 1 << 30, 20.0, 120.0
PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
Read = Callable[[], object]
Case = Callable[[Path], tuple[Path, Read]]


def command(*arguments: object) -> Read:
    """Runs a command of shardkit's in this process."""
    return lambda: main([str(argument) for argument in arguments])


def convert(source: Path, folder: Path) -> Read:
    return command("convert", source, "--to", "safetensors", "--out", folder / "out")


def pt(folder: Path) -> tuple[Path, Read]:
    torch.save({"w": torch.ones(64, 3), "b": torch.zeros(5, dtype=torch.bfloat16)}, folder / "m.pt")
    return folder / "m.pt", convert(folder / "m.pt", folder)


def safetensors(folder: Path) -> tuple[Path, Read]:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(64, 3), "b": torch.zeros(5)}, folder / "m.safetensors")
    return folder / "m.safetensors", convert(folder / "m.safetensors", folder)


def dcp(folder: Path) -> tuple[Path, Read]:
    from torch.distributed import checkpoint

    checkpoint.save({"w": torch.ones(64, 3), "n": 3}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp" / ".metadata", convert(folder / "dcp", folder)


def manifest(folder: Path) -> tuple[Path, Read]:
    run = shutil.copytree(trained(), folder / "run")
    file = next(run.glob("checkpoints/*/manifest.json"))
    return file, command("checkpoint", "ls", run)


def metrics(folder: Path) -> tuple[Path, Read]:
    run = shutil.copytree(trained(), folder / "run")
    return run / "metrics.jsonl", command("report", run)


def config(folder: Path) -> tuple[Path, Read]:
    run = shutil.copytree(trained(), folder / "run")
    return run / "config.yaml", command("report", run)


def trace(folder: Path) -> tuple[Path, Read]:
    from tests.report.samples import add

    run = shutil.copytree(trained(), folder / "run")
    add(run, {"trace/rank0.json": {"timeline": [[i, i * 7] for i in range(400)], "stack": {"a": [1, 2, 3]}}})
    return run / "trace" / "rank0.json", command("report", run)


def tokenizer(folder: Path) -> tuple[Path, Read]:
    from shardkit.data.tokenize.tokenizer import load_tokenizer
    from tests.data.chats import write_tokenizer

    write_tokenizer(folder / "tok")
    return folder / "tok" / "tokenizer.json", lambda: load_tokenizer(folder / "tok")


def table(suffix: str) -> Case:
    def case(folder: Path) -> tuple[Path, Read]:
        import pyarrow
        from pyarrow import feather, parquet

        from shardkit.data.rows.formats import find_records
        from shardkit.data.rows.pieces import cut, rows, survey

        written = pyarrow.table({"text": [f"some text {i % 9}" for i in range(300)], "n": list(range(300))})
        path = folder / f"rows.{suffix}"
        if suffix == "parquet":
            parquet.write_table(written, path, row_group_size=100, compression="zstd")
        else:
            feather.write_feather(written, path, compression="zstd", chunksize=100)

        def read() -> None:
            files, row_format = find_records(str(path))
            row_format.columns(files, {"text"})
            pieces = cut(files, row_format, split_groups=True)
            survey(pieces)
            for piece in pieces:
                list(rows(piece, ["text"]))

        return path, read

    return case


def picture(folder: Path) -> tuple[Path, Read]:
    from PIL import Image

    from shardkit.data.datasets.pictures import find_pictures, read

    Image.effect_noise((64, 48), 40).save(folder / "a.png")
    return folder / "a.png", lambda: [read(found) for found in find_pictures(str(folder))]


def template(folder: Path) -> tuple[Path, Read]:
    from shardkit.data.chat import RowError, Template, limits, renderer
    from tests.data.chats import MARKED, conversation

    (folder / "chat.jinja").write_text(MARKED)
    renderer()

    def read() -> None:
        source = (folder / "chat.jinja").read_bytes().decode("utf-8", "replace")
        with contextlib.suppress(RowError), limits():
            Template(source, {}).render(conversation(1))

    return folder / "chat.jinja", read


def directory(*arguments: str) -> Case:
    """A command on a run directory of a stranger: RUN and OUT in its arguments are folders."""

    def case(folder: Path) -> tuple[Path, Read]:
        run = fuzzed_runs.write(folder / "run", trained())
        folders = {"RUN": str(run), "OUT": str(folder / "out")}

        def read() -> None:
            try:
                main([folders.get(word, word) for word in arguments])
            except SystemExit as ended:  # 1 is the answer that a checkpoint is damaged
                raise SystemExit(2 if "verify" in arguments and ended.code == 1 else ended.code) from None

        return run, read

    return case


DIRECTORIES: dict[str, Case] = {
    "report": directory("report", "RUN"), "comparison": directory("report", "RUN", "RUN", "--out", "OUT"),
    "profile": directory("profile", "RUN"), "profile --json": directory("profile", "RUN", "RUN", "--json"),
    "logs": directory("logs", "RUN"), "checkpoint ls": directory("checkpoint", "ls", "RUN"),
    "checkpoint verify": directory("checkpoint", "verify", "RUN"),
    "checkpoint rm": directory("checkpoint", "rm", "RUN", "2", "--force"),
    "convert": directory("convert", "RUN", "--to", "safetensors", "--out", "OUT"),
}  # fmt: skip
"""Commands on damaged run directories."""
CASES: dict[str, Case] = {
    "manifest": manifest, "safetensors": safetensors, ".pt": pt, "DCP": dcp, "tokenizer.json": tokenizer,
    "Parquet": table("parquet"), "Arrow": table("arrow"), "PNG": picture, "config.yaml": config, "metrics": metrics,
    "trace": trace, "chat template": template, **DIRECTORIES,
}  # fmt: skip
_trained: list[Path] = []


def trained() -> Path:
    """A run of two steps, made once."""
    if not _trained:
        run = Path(tempfile.mkdtemp()) / "run"
        keys = {
            "model.preset": "debug", "train.max_steps": 2, "train.seq_len": 32, "run.dir": run, "run.device": "cpu",
            "checkpoint.every_steps": 2, "train.micro_batch_size": 2, "train.global_batch_size": 2,
        }  # fmt: skip
        python_m("shardkit.train", *(f"{key}={value}" for key, value in keys.items()), timeout=300, code=0)
        _trained.append(run)
    return _trained[0]


def mutate(content: bytes, rng: random.Random) -> bytes:
    """The bytes with one to five damages."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 5)):
        if not data:
            break
        start = rng.randrange(len(data))
        stop = min(len(data), start + rng.choice([1, 2, 4, 8, 64]))
        kind = rng.randrange(7)
        if kind == 0:
            data[start] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[start:stop] = rng.choice([b"\xff", b"\x00", b"\x7f"]) * (stop - start)
        elif kind == 2:
            del data[start:stop]
        elif kind == 3:
            data[start:start] = data[start:stop] * rng.choice([1, 9, 2000])
        elif kind == 4:
            data[start:start] = rng.choice(
                [b"[", b"{", b"(", b"9", b"-1", b"1e999", b"\\u0000", b'"', b"{{", b"~", b"*"]
            ) * (rng.choice([1, 1, 50, 5000]))
        elif kind == 5 and (digits := [i for i, byte in enumerate(data) if 48 <= byte <= 57]):
            at = rng.choice(digits)
            data[at : at + 1] = rng.choice([b"0", b"-1", b"99999999", b"9223372036854775807", b"1e9", b"null"])
        elif kind == 6:
            del data[start:]
    return bytes(data)


def outcome(read: Read, size: int) -> str:
    """How reading ends in a forked process: taken, refused, or the rule that it breaks."""
    reader, writer = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setpgid(0, 0)
        os.write(writer, _in_child(read).encode()[:2000])
        os._exit(0)
    os.close(writer)
    peak = baseline = 0
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        peak = max(peak, _resident(child))
        baseline = baseline or peak
        if time.monotonic() - began > LONGEST_SECONDS:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    seconds = usage.ru_utime + usage.ru_stime  # of its children too
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    if os.WIFSIGNALED(status):
        return f"ended by signal {os.WTERMSIG(status)} after {seconds:.1f} s"
    if seconds > MOST_SECONDS:
        return f"took {seconds:.1f} s"
    if peak - baseline > MOST_BYTES + size:
        return f"took {(peak - baseline) >> 20} MiB"
    return said


def _resident(root: int) -> int:
    """Resident bytes of a process and its children; a page that several share counts once."""
    total = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        total += int(Path(f"/proc/{root}/smaps_rollup").read_text().split("Pss:")[1].split()[0]) << 10
        for child in Path(f"/proc/{root}/task/{root}/children").read_text().split():
            total += _resident(int(child))
    return total


def _in_child(read: Read) -> str:
    programs: list[str] = []
    sys.addaudithook(lambda event, args: programs.append(f"{event} {args[:1]}") if event in PROGRAMS else None)
    errors, output = io.StringIO(), io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    text = "taken"
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(output):
        try:
            read()
        except SystemExit as ended:
            text = "taken" if ended.code in (0, None) else "refused" if ended.code == 2 else f"exit code {ended.code}"
        except ShardkitError as error:
            text = "refused" if "\n" not in error.cause else f"a cause of several lines: {error.cause}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
    shown = output.buffer.getvalue().decode(errors="surrogateescape") + errors.getvalue()  # type: ignore[attr-defined]
    if "Traceback (most" in errors.getvalue():
        text = f"traceback: {errors.getvalue()[-300:]}"
    if controls := sorted({char for char in shown if not char.isprintable() and char not in "\n\t"}):
        text = f"wrote {controls} to the terminal"
    return f"started {programs[0]}" if programs and "git" not in programs[0] else text


def _import_once(cases: list[str]) -> None:
    """Read an honest file of each format in this process, so that its children have the modules already."""
    bounded._is_child = True
    for name in cases:
        output = contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO()))
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(SystemExit), output:
            CASES[name](Path(folder))[1]()
    bounded._is_child = False


def fuzz(seeds: range, cases: list[str], keep: Path | None = None) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Counts by format and outcome, and the seeds that broke a rule."""
    counts: Counter[tuple[str, str]] = Counter()
    broken: list[str] = []
    _import_once(cases)
    for seed in seeds:
        if seed % 10 == 0:
            print(
                f"from seed {seed}: {dict(sorted(Counter(ends for _, ends in counts.elements()).items()))}", flush=True
            )
        for name in cases:
            with tempfile.TemporaryDirectory() as folder:
                file, read = CASES[name](Path(folder))
                rng, content = random.Random(f"{name} {seed}"), b""
                if file.is_dir():
                    fuzzed_runs.damage(file, rng, mutate)
                    size = sum(path.stat().st_blocks * 512 for path in file.rglob("*") if path.is_file())
                else:
                    content = mutate(file.read_bytes(), rng)
                    file.write_bytes(content)
                    size = len(content)
                ends = outcome(read, size)
            counts[name, ends if ends in ("taken", "refused") else "broken"] += 1
            if ends not in ("taken", "refused"):
                broken.append(f"{name} seed {seed}: {ends}")
                print(broken[-1], flush=True)
                if keep is not None and content:
                    keep.mkdir(exist_ok=True)
                    (keep / f"{name.replace(' ', '_')}-{seed}").write_bytes(content)
    return counts, broken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:200")
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--keep", type=Path, help="a folder for the files that break a rule")
    options = parser.parse_args()
    first_seed, stop_seed = map(int, options.seeds.split(":"))
    counted, failures = fuzz(range(first_seed, stop_seed), options.case or list(CASES), options.keep)
    for case_name in options.case or CASES:
        print(json.dumps({"format": case_name, **{key[1]: n for key, n in counted.items() if key[0] == case_name}}))
    sys.exit(bool(failures))
