"""The section of docs/benchmarks.md on CUDA parity."""

from __future__ import annotations

from typing import Any

from .markdown import machine, paragraph, table

MODES = ("fp32", "bf16", "fp16", "pure_bf16", "fp8")
TITLES = {
    "pairs": "Every engine, precision, policy, offload, accumulation, clipping and averaging with each other",
    "full": "Every strategy in every precision under every activation policy",
    "late": "Offload and prefetch, with late copies and poisoned new memory",
}


def cuda_parity(result: dict[str, Any]) -> str:
    exact, exact_weights = result["limits"]["fp32"]
    times = ", ".join(f"{mode} {n}" for mode, n in result["limits"].items() if mode != "fp32")
    parts = [
        "## Trainings on CUDA against the CPU's single process",
        "",
        paragraph(
            "`python -m benchmarks.cuda_parity`, on **emulated** cards: the CUDA build of torch with its allocator, "
            "streams and ProcessGroupNCCL, over the CPU's arithmetic (tests/emulated_cuda/README.md explains what that "
            "shows and what needs a GPU). Cells give the number of cases in brackets, the largest difference of a loss "
            f"in {result['steps']} steps, and the largest ‖weights − wanted‖ / ‖wanted‖ after them. The limits in fp32 "
            f"are {exact:.0e} and {exact_weights:.0e}; below fp32, this many times the distance of the CPU's bf16 "
            f"from its fp32: {times}. pure_bf16 is compared with the CPU's pure_bf16, the others with its fp32. In "
            "fp16, one rank's gradient overflows once in every case of the full product."
        ),
    ]
    for name, found in result["sets"].items():
        rows = found["rows"]
        run = sum(row["cases"] for row in rows.values())
        wrong = [f"{case}: {'; '.join(w)}" for row in rows.values() for case, w in row["wrong"].items()]
        said = f"{run} of {found['asked']} cases run at {found['commit'][:10]}, {len(wrong)} do not agree."
        parts += ["", f"**{TITLES[name]}**: {said}", ""]
        parts += [_table(rows), *(f"\n- {text[:300]}" for text in wrong)]
    return "\n".join([*parts, "", machine(result["environment"]), ""])


def _table(rows: dict[str, Any]) -> str:
    engines = list(dict.fromkeys(key.split(" ")[0] for key in rows))
    modes = [mode for mode in MODES if any(key.endswith(f" {mode}") for key in rows)]
    return table(["engine@ranks", *modes], [[f"`{e}`", *(_cell(rows.get(f"{e} {m}")) for m in modes)] for e in engines])


def _cell(row: dict[str, Any] | None) -> str:
    return "–" if row is None else f"({row['cases']}) {row['loss']:.0e}, {row['weights']:.0e}"
