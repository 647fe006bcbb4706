"""Three axes at once, on eight ranks: every gradient and weight is that of one process."""

from __future__ import annotations

import pytest

from tests.parallel import test_experts, test_tensor
from tests.parallel.expert_runs import OPTIMIZERS, hf
from tests.parallel.test_tensor import TP_CP

pytestmark = [pytest.mark.release, pytest.mark.dist, pytest.mark.timeout(900)]


def test_layers_sequences_and_rows() -> None:
    replicas = {"parallel.strategy": "hsdp", "parallel.dp_replicate": 2, "parallel.dp_shard": 2}
    test_tensor.assert_as_one_process(
        8,
        {
            "tp2 x cp2 x fsdp2": test_tensor.case("qwen3", **TP_CP),
            "the reference, tp2 x cp2 x replicas": test_tensor.case("reference", **TP_CP, **replicas),
        },
    )


def test_experts_sequences_and_rows() -> None:
    axes = {"parallel.ep": 2, "parallel.cp": 2}
    replicas = {"parallel.strategy": "hsdp", "parallel.dp_replicate": 2, "parallel.dp_shard": 4}
    cases = {"ep2 x cp2 x fsdp2": axes, "ep2 x cp2 x replicas": {**axes, **replicas}}
    test_experts.assert_equal(8, {**hf("mixtral"), **OPTIMIZERS["sgd"]}, cases)
