"""Sampled mutations of the source on stdin, as JSON; runs in an environment that has cosmic-ray."""

from __future__ import annotations

import ast
import json
import random
import re
import sys
from collections.abc import Iterator

LEFT_OUT = r"core/ReplaceBinaryOperator_BitOr_.*"
"""Operators that are not used: nearly every `|` of these modules stands in an annotation, which is not evaluated."""


def positions(source: str) -> list[tuple[str, int]]:
    """(operator, occurrence) of every mutation that cosmic-ray's operators make."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast(source)))
    places = []
    for name in sorted(operator_names()):
        kind = get_operator(name)
        if kind.arguments() or re.fullmatch(LEFT_OUT, name):
            continue
        operator = kind()
        count = sum(1 for node in nodes for _ in operator.mutation_positions(node))
        places += [(name, occurrence) for occurrence in range(count)]
    return places


def mutants(source: str, places: list[tuple[str, int]]) -> Iterator[dict[str, object]]:
    """The mutated sources that are Python."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    for name, occurrence in places:
        mutated = mutate_code(source, get_operator(name)(), occurrence)
        try:
            ast.parse(mutated)
        except SyntaxError:
            continue
        yield {"operator": name.removeprefix("core/"), "occurrence": occurrence, "source": mutated}


if __name__ == "__main__":
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    original = sys.stdin.read()
    every = positions(original)
    shuffled = random.Random(seed).sample(every, len(every))
    json.dump([mutant for mutant, _ in zip(mutants(original, shuffled), range(count))], sys.stdout)  # noqa: B905
