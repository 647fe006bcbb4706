"""The command line of a benchmark, made of its defaults: one way to read counts, arms and parts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from typing import Any, NamedTuple, NoReturn


class Option(NamedTuple):
    """A default with its help, where the name does not say it all; `among`: the values that it may take."""

    default: Any
    help: str = ""
    among: Collection[str] | None = None


LIMIT = Option(1e9, "begin nothing after so many seconds; started again, the benchmark goes on")
RESUME = Option(False, "leave out what this commit has measured")


def options(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Read the command line: `--NAME` for each default, an `Option` or its default alone.

    False is a flag. A sequence takes several values; words only those of the sequence, if `among` has no others. All
    else takes one value of the default's kind.

    Raises:
        SystemExit: a wrong option, or --help; argparse has printed the reason.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in defaults.items():
        default, text, among = given if isinstance(given, Option) else Option(given)
        text = text.replace("%", "%%")
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
            continue
        values = list(default) if isinstance(default, Collection) and not isinstance(default, str) else [default]
        several = {"nargs": "*", "default": values} if values != [default] else {"default": default}
        if among is None and "nargs" in several:
            among = [value for value in values if isinstance(value, str)]
        kind = str if values == [None] else type(values[0])
        parser.add_argument(
            flag, type=kind, choices=list(among or ()) or None, help=f"{text} (default {default})".strip(), **several
        )  # fmt: skip
    return parser.parse_args()


def refuse(problem: str) -> NoReturn:
    """End with what is wrong with the options."""
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)
