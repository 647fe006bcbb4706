"""Layers and experts split over cards train beside what CPUs do not have: fp16, parameters in host memory."""

from __future__ import annotations

import pytest

from tests.cuda import gpu_ranks
from tests.emulated_cuda import needs_emulation
from tests.parallel import pair_runs
from tests.parallel.expert_runs import Ran
from tests.parallel.test_pairs import difference

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), needs_emulation]
CASES = {
    f"{axis} beside {', '.join(facts)}": pair_runs.case(axis, *facts)
    for axis in ("tp", "ep of all", "tp, ep")
    for facts in (
        ("fp16", "clipped", "lora"),
        ("offloaded parameters", "clipped", "averages"),
        ("offloaded activations", "adamw fused"),
    )
}


def test_split_layers_and_experts_train_on_cards_as_on_one() -> None:
    run = "tests.parallel.pair_runs:attempts_on_cards"
    ranks = gpu_ranks(4, run, timeout=400, env={"EMUCUDA_DEVICES": "4"}, cases=CASES)
    one = {name: pair_runs.alone(settings) for name, settings in CASES.items()}
    (alone,) = gpu_ranks(1, run, cases=one)
    for name, settings in CASES.items():
        want = alone[name]
        assert isinstance(want, Ran), want
        for found in (of_rank[name] for of_rank in ranks):
            assert isinstance(found, Ran), (name, found)
            assert not difference(found, want, pair_runs.is_exact(settings)), name
