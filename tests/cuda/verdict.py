"""Whether a parity case agrees with the CPU's single process, and by how much it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.cuda.parity import Case

EXACT = 1e-5
"""fp32: losses over all steps."""
EXACT_WEIGHTS = 1e-4
"""fp32: ‖weights − wanted‖ / ‖wanted‖; AdamW turns gradients that are all rounding into whole steps."""


def loss_difference(case: Case, found: dict[str, Any], wanted: dict[str, Any]) -> float:
    return max(abs(a - b) for a, b in zip(found["losses"], wanted["losses"][case.wanted], strict=True))


TIMES = {"fp16": 1, "bf16": 6, "pure_bf16": 6, "fp8": 8}
"""Below fp32: how many times as far as the CPU's own bf16 lies from its fp32.

Engines cast at other places than autocast does; fp16 keeps three bits more than bf16, fp8 four less. The CPU's own
distance is one sample of rounding: other chunks of the loss changed it by a fifth.
"""


def limits(case: Case, wanted: dict[str, Any]) -> tuple[float, float]:
    """Largest difference of a loss, and relative one of the weights."""
    if case.mode == "fp32":
        return EXACT, EXACT_WEIGHTS
    spread = wanted["spread"][f"{case.optimizer} {case.layers} bf16"]
    return TIMES[case.mode] * spread["loss"], TIMES[case.mode] * spread["weights"]


def problems(case: Case, found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a case, if anything."""
    if "error" in found:
        yield found["error"]
        return
    loss, weights = limits(case, wanted)
    far = loss_difference(case, found, wanted)
    if not far <= loss:
        yield f"a loss differs by {far:.1e}, not {loss:.1e}"
    if not found["weights"] <= weights:
        yield f"the weights differ by {found['weights']:.1e}, not {weights:.1e}"
    if found["elements"] != wanted["elements"][case.wanted]:
        yield f"the ranks hold {found['elements']} elements between them, not {wanted['elements'][case.wanted]}"
    if found["elsewhere"]:
        yield f"{found['elsewhere']} bytes were taken on other ranks' devices"
    if case.overflow and not min(found["scales"]) == found["scales"][-1] == 512.0:
        yield f"the loss scale was not halved once: {found['scales']}"
