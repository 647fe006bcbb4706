"""The section of docs/benchmarks.md on the automatic plan."""

from __future__ import annotations

from typing import Any

from .markdown import interval, mib, section, table


def auto(result: dict[str, Any]) -> str:
    rows = [
        [str(row["cap_mib"]), f"{row['feasible']} of {row['of']}", _cell(row["chosen"]),
         f"{_cell(row['best'])}{_in_margin(result, row)}", interval(row["ratio"], 3), mib(row["chosen_peak"]),
         str(row["under_cap"])]
        for row in result["caps"]
    ]  # fmt: skip
    both = [
        (cell["speed"], cell["predicted_tokens_per_s"]) for cell in result["grid"] if cell["predicted_tokens_per_s"]
    ]
    steps = len(result["final"][0]["seconds"])
    uncertainty = max(row["uncertainty"] for row in result["caps"])
    head = ["cap MiB", "fit", "chosen", "best", "tokens/s, chosen / best", "peak of the choice MiB",
            "under the real cap"]  # fmt: skip
    return section(
        "The automatic plan",
        f"`python -m benchmarks.auto`: {len(result['grid'])} settings (strategy × checkpointing × micro-batch, the "
        f"samples of a step fixed) of a small transformer are all trained on {result['ranks']} CPU ranks; several "
        f"at once take turns of one step with {_cell(result['reference'])}, and their speed is measured against "
        "its neighbouring steps. `shardkit plan --auto` chooses under memory caps, evenly spaced between the least "
        "and the most that a setting needs, from this machine's calibration and without running any; the best is "
        "the fastest setting whose measured peak is under the cap. Choices and best settings took turns again "
        f"({steps} steps each; ratio of tokens/s, 1 = the best was chosen), and each choice ran alone with "
        f"`memory.cap`. The search leaves its estimate's uncertainty free ({uncertainty:.0%}); * marks a best "
        "setting that needs some of this margin and could not be chosen. Goal: ratio ≥ 0.95, never out of memory. "
        f"Rank correlation of predicted and measured speed over the {len(both)} settings that the search "
        f"reported: {_rank_correlation(both):.2f}.",
        table(head, rows),
        environment=result["environment"],
    )


def _cell(cell: list[Any]) -> str:
    strategy, policy, micro_batch = cell
    return f"{strategy}, {policy}, {micro_batch}"


def _in_margin(result: dict[str, Any], row: dict[str, Any]) -> str:
    peak = next(cell["peak"] for cell in result["grid"] if cell["settings"] == row["best"])
    return " *" if peak * (1 + row["uncertainty"]) > row["cap_mib"] * 2**20 else ""


def _rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's rank correlation."""
    ranks = [_ranks([pair[side] for pair in pairs]) for side in (0, 1)]
    n = len(pairs)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)) / (n * (n * n - 1))


def _ranks(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0] * len(values)
    for rank, index in enumerate(order):
        found[index] = rank
    return found
