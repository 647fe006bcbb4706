"""What stands beside layers and experts that are split over ranks trains as in one process, or is refused by name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.config import capability, schema
from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from tests.parallel import pair_runs
from tests.parallel.expert_runs import Ran
from tests.ranks import run_ranks

ATTEMPTS = "tests.parallel.pair_runs:attempts"
EXACT, ROUNDED = 1e-5, 0.4
"""How far a gradient or weight may be off, as the 2-norm of the difference over its own: rounding in fp32, and in bf16,
which also sends rows to other experts. A factor of 2, or a part that is missing, would be off by more."""
FRESH, FRESH_MINUTES = "SHARDKIT_PAIR_SEED", 10.0
"""The variable with the first fresh seed of the release tier; unset = the time."""


def difference(found: Ran, want: Ran, exact: bool) -> str:
    """Where a run differs from the one in one process; empty if nowhere."""
    loss, norm, share = (1e-5, 1e-5, EXACT) if exact else (2e-3, 3e-2, ROUNDED)
    for step, ((value, size), (wanted, wanted_size)) in enumerate(zip(found.steps, want.steps, strict=True)):
        if abs(value - wanted) > loss or abs(size - wanted_size) > norm * wanted_size:
            return f"step {step}: loss {value} and norm {size} instead of {wanted} and {wanted_size}"
    kinds = [(f"gradient {step}", *both) for step, both in enumerate(zip(found.gradients, want.gradients, strict=True))]
    for kind, tensors, others in [*kinds, ("weight", found.weights, want.weights)]:
        if tensors.keys() != others.keys():
            return f"{kind}s of {sorted(tensors.keys() ^ others.keys())}"
        for name, other in others.items():
            off = float(torch.dist(tensors[name], other)) / max(float(other.norm()), 1e-12)
            if not off <= share:
                return f"{kind} of {name} is off by {off:.1e}"
    return ""


def outcomes(cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Of each case "equal", "refused: …" or "wrong: …"; all ranks have to say the same."""
    by_rank = run_ranks(4, ATTEMPTS, timeout=60 + 40 * len(cases), cases=cases)
    trained = {name: pair_runs.alone(settings) for name, settings in cases.items() if isinstance(by_rank[0][name], Ran)}
    alone = run_ranks(1, ATTEMPTS, timeout=60 + 40 * len(cases), cases=trained)[0] if trained else {}
    found = {}
    for name, settings in cases.items():
        ranks, want = [of_rank[name] for of_rank in by_rank], alone.get(name)
        if isinstance(want, Ran) and all(isinstance(ran, Ran) for ran in ranks):
            words = next(filter(None, (difference(ran, want, pair_runs.is_exact(settings)) for ran in ranks)), "")
            found[name] = f"wrong: {words}" if words else "equal"
        else:
            same = len({str(ran) for ran in ranks}) == 1
            found[name] = f"refused: {ranks[0]}" if same and want is None else f"wrong: {ranks}, {want}"
    return found


TP, SEQUENCE, EP = (
    {" beside ".join((axis, *facts)): pair_runs.case(axis, *facts) for axis, *facts in rows}
    for rows in (
        (
            ("tp", "pure_bf16", "adamw foreach", "averages"),
            ("tp", "bf16", "adamw fused", "clipped"),
            ("tp, cp", "muon", "full"),
            ("tp", "offloaded activations", "clipped", "selective_op"),
            ("tp", "offloaded parameters", "clipped", "averages"),
            ("tp, replicas", "tiles", "full"),
            ("tp", "lora everywhere", "adamw fused"),
            ("tp, cp", "lora everywhere", "tiles", "offloaded activations"),
            ("tp", "compiled", "lora", "clipped"),
            ("tp, cp", "compiled", "full"),
            ("tp", "4 bits", "adamw fused"),
            ("tp, cp", "4 bits, scales too", "full", "clipped"),
            ("tp, replicas", "4 bits, scales too", "offloaded parameters"),
        ),
        (
            ("tp, sequence", "lora everywhere", "adamw fused"),
            ("tp, sequence", "lora", "full"),
            ("tp, sequence", "4 bits", "clipped"),
            ("tp, sequence", "offloaded activations", "clipped", "selective_op"),
            ("tp, sequence", "offloaded parameters", "clipped", "averages"),
            ("tp, sequence", "muon", "full"),
            ("tp, sequence", "bf16", "adamw fused", "clipped"),
            ("tp, sequence", "pure_bf16", "adamw foreach", "averages"),
        ),
        (
            ("ep", "pure_bf16", "adamw foreach", "averages"),
            ("ep of all", "bf16", "adamw fused", "clipped"),
            ("ep, cp", "muon", "full"),
            ("ep", "offloaded activations", "clipped", "selective_op"),
            ("ep of all", "offloaded parameters", "clipped", "averages"),
            ("ep", "lora", "adamw fused", "averages"),
            ("ep of all", "4 bits", "clipped"),
            ("ep", "4-bit experts", "adamw fused"),
            ("ep of all", "4-bit experts", "full", "offloaded parameters"),
            ("ep, cp", "4-bit experts, scales too", "clipped"),
            ("tp, ep", "lora", "offloaded activations"),
            ("tp, ep", "4-bit experts", "full"),
            ("ep", "compiled", "full"),
            ("ep of all", "compiled", "lora", "clipped"),
        ),
    )
)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", [TP, SEQUENCE, EP], ids=["tp", "tp_sequence", "ep"])
def test_pairs_and_triples_train_as_in_one_process(cases: dict[str, dict[str, Any]]) -> None:
    wanted = {name: "refused" if "averages" in name and "lora" in name else "equal" for name in cases}
    found = outcomes(cases)
    assert {name: outcome.partition(":")[0] for name, outcome in found.items()} == wanted, found


@pytest.mark.release
@pytest.mark.dist
@pytest.mark.timeout(3600)
def test_drawn_triples_train_as_in_one_process_or_are_refused() -> None:
    first = int(os.environ.get(FRESH) or time.time())
    print(f"triples from seed {first} on ({FRESH}={first} draws them again)")
    until, seed, found = time.monotonic() + 60 * FRESH_MINUTES, first, dict[str, str]()
    while time.monotonic() < until:
        draws = {f"{at}: {', '.join(pair_runs.drawn(at))}": pair_runs.drawn(at) for at in range(seed, seed + 10)}
        found |= outcomes({name: pair_runs.case(*facts) for name, facts in draws.items()})
        seed += 10
    wrong = [f"{name}: {outcome}" for name, outcome in found.items() if outcome.startswith("wrong")]
    assert not wrong, "\n".join(wrong)
    assert "equal" in found.values()


REFUSED: dict[str, tuple[dict[str, Any], ...]] = {
    "tp": ({"task.name": "hf_masked_lm"}, {**pair_runs.LORA, "adapter.dropout": 0.1}),
    "ep": ({"model.mlp_chunks": 2},),
    "tp ep": (
        {"precision.mode": "fp8"},
        {"compile.enabled": True, "activation.policy": "budget"},
        *({"optim.name": name} for name in ("adafactor", "adamw8bit", "adamw_bnb_8bit")),
        *({"parallel.strategy": name} for name in ("ddp", "zero1", "zero2", "zero3")),
    ),
}
"""Axes → settings of which the last is refused beside each of them."""


@pytest.mark.dist
def test_all_ranks_skip_a_step_in_which_one_rank_overflows() -> None:
    """Its gradient is of a part that ranks with other layers do not have, and not the first one."""
    assert run_ranks(4, "tests.parallel.pair_runs:overflow") == [([True, True], 4.0)] * 4


@pytest.mark.parametrize(
    ("axis", "given"), [(axis, given) for axes, rows in REFUSED.items() for axis in axes.split() for given in rows]
)
def test_what_cannot_stand_beside_an_axis_is_refused_by_name(axis: str, given: dict[str, Any]) -> None:
    settings = pair_runs.case(axis) | given

    def prepare() -> None:
        config = load_config(None, settings).config
        capability.check(config, device="cuda", world_size=4, local_world_size=4)

    with pytest.raises(ConfigError) as caught:
        prepare()
    assert [*given][-1] in str(caught.value)


def test_the_page_has_the_closed_list_of_what_is_refused() -> None:
    page = Path("docs/wide.md").read_text("utf-8").partition("## Refused")[2]
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("| `")]
    for key, _, reasons, _ in schema.BESIDE_AXES:
        for axis in (axis for axes in reasons for axis in axes.split()):
            cells = [row[2 if axis == "tp" else 3] for row in rows if row[1].startswith(f"`{key}`")]
            assert any("refused" in cell for cell in cells), (key, axis)
