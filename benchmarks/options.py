"""The command line of a benchmark, made of its defaults: one way to read counts, arms and parts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, NoReturn

from .common import FEWEST


class Option(NamedTuple):
    """A default with its help, where the name does not say it all.

    Attributes:
        among: the values that it may take.
        least: the smallest number that it may be.
    """

    default: Any
    help: str = ""
    among: Collection[str] | None = None
    least: int | None = None


RESUME = Option(False, "leave out what this commit has measured")
ONLY = Option("", "the cases whose names contain this; all others keep their results")
AGAIN = Option(False, "measure again what is recorded of these cases")
PREDICT = Option(False, "predict again, measure nothing")


def samples(default: int, text: str = "") -> Option:
    """A number of samples that is enough for an interval of their median."""
    return Option(default, text, least=FEWEST)


def options(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Read the command line: `--NAME` for each default, an `Option` or its default alone.

    False is a flag. A sequence takes several values; words only those of the sequence, if `among` has no others. All
    else takes one value of the default's kind.

    Raises:
        SystemExit: a wrong option, or --help; the reason is printed.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    described = {name: value if isinstance(value, Option) else Option(value) for name, value in defaults.items()}
    for name, (default, text, among, least) in described.items():
        text = ", ".join(filter(None, [text.replace("%", "%%"), "" if least is None else f"at least {least}"]))
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
    args = parser.parse_args()
    for name, option in described.items():
        if option.least is not None and getattr(args, name) < option.least:
            refuse(f"--{name.replace('_', '-')} {getattr(args, name)}: at least {option.least}")
    return args


def chosen(names: Iterable[str], only: str) -> list[str]:
    """The names that contain `only`.

    Raises:
        SystemExit: there is none; the reason is printed.
    """
    matching = [name for name in names if only in name]
    return matching or refuse(f"--only {only}: no case has such a name")


def refuse(problem: str) -> NoReturn:
    """End with what is wrong with the options."""
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)
