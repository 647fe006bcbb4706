"""Count the keys of example files of other tools: `python -m tests.foreign.published FOLDER… > published_keys.txt`.

Each folder is the `examples` of a checkout of axolotl, LLaMA-Factory or TRL. The files have licences of their own and
stay there: `test_published` needs their keys alone, with the number of files that have each.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from shardkit.errors import ShardkitError
from shardkit.foreign.files import File, read

KEYS = Path(__file__).parent / "published_keys.txt"


def recipes(folder: Path) -> Iterator[File]:
    """The files below a folder that shardkit recognises as a tool's, a model's config aside."""
    for path in sorted(path for suffix in ("yaml", "yml", "json") for path in folder.rglob(f"*.{suffix}")):
        try:
            file = read(str(path))
        except ShardkitError:
            continue
        if file.tool != "model":
            yield file


def published() -> list[tuple[str, str, int]]:
    """(tool, dotted key, number of files) of each recorded key."""
    lines = [line.split("\t") for line in KEYS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [(tool, key, int(count)) for tool, key, count in lines]


def main(folders: list[str]) -> None:
    """Print a line for each tool, and one for each of its keys."""
    files = [file for folder in folders for file in recipes(Path(folder))]
    counts = Counter((file.tool, key) for file in files for key in file.values)
    print("# tool, key, files that have it; written by tests/foreign/published.py")
    for tool, count in sorted(Counter(file.tool for file in files).items()):
        print(f"# {tool}: {count} files")
    for (tool, key), count in sorted(counts.items()):
        print(tool, key, count, sep="\t")


if __name__ == "__main__":
    main(sys.argv[1:])
