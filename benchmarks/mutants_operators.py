"""Runs in cosmic-ray's own environment (benchmarks/mutants.py): sampled mutations of the source on stdin, as JSON."""

from __future__ import annotations

import ast
import json
import random
import re
import sys
from collections.abc import Iterator


def positions(source: str, left_out: str) -> list[tuple[str, int]]:
    """(operator, occurrence) of every mutation that cosmic-ray's operators make."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast(source)))
    places = []
    for name in sorted(operator_names()):
        kind = get_operator(name)
        if kind.arguments() or re.fullmatch(left_out, name):
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
    seed, count, without = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    original = sys.stdin.read()
    every = positions(original, without)
    shuffled = random.Random(seed).sample(every, len(every))
    taken = [mutant for mutant, _ in zip(mutants(original, shuffled), range(count))]  # noqa: B905
    json.dump({"possible": len(every), "mutants": taken}, sys.stdout)
