"""Experts that are split over ranks (parallel.ep) train as in one process, or are refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.config import capability
from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.tasks.load import load_task
from tests.parallel.expert_runs import BALANCED, FAMILIES, OPTIMIZERS, Ran, distance, hf
from tests.parallel.tensor_runs import OF_FSDP, OF_LAYERS
from tests.ranks import run_ranks

MODULE = "tests.parallel.expert_runs"
GRADIENTS = 1e-5
"""How far a gradient or weight may be off after three steps, as a share of its tensor's largest value: rounding."""
_alone: dict[str, Ran] = {}


def alone(case: dict[str, Any]) -> Ran:
    key = repr(case)
    if key not in _alone:
        whole = {**case, "settings": {**case["settings"], "parallel.strategy": "single"}}
        _alone[key] = run_ranks(1, f"{MODULE}:runs", cases={"alone": whole})[0]["alone"]
    return _alone[key]


def assert_equal(world: int, settings: dict[str, Any], cases: dict[str, dict[str, Any]], **options: Any) -> None:
    """Train each case on `world` ranks, and compare it with the same settings in one process."""
    expected = alone({"settings": settings, **options})
    given = {
        name: {"settings": {"parallel.strategy": "fsdp", **settings, **keys}, **options} for name, keys in cases.items()
    }
    by_rank = run_ranks(world, f"{MODULE}:runs", cases=given)
    for name in cases:
        for ran in (of_rank[name] for of_rank in by_rank):
            for (loss, norm), (expected_loss, expected_norm) in zip(ran.steps, expected.steps, strict=True):
                assert abs(loss - expected_loss) <= 1e-5, name
                assert abs(norm - expected_norm) <= 1e-5 * expected_norm, name
            assert distance(ran, expected)[0] <= GRADIENTS, (name, distance(ran, expected))


EP2, EP4 = {"parallel.ep": 2}, {"parallel.ep": 4}
HSDP = {"parallel.strategy": "hsdp", "parallel.dp_replicate": 2, "parallel.dp_shard": 2, "parallel.ep": 2}


@pytest.mark.dist
def test_two_groups_of_experts_train_as_one_process() -> None:
    assert_equal(4, {**hf("mixtral"), **OPTIMIZERS["clipped"]}, {"ep2 x fsdp2": EP2})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_as_one_process(family: str) -> None:
    assert_equal(4, {**hf(family), **OPTIMIZERS["sgd"]}, {"ep2 x fsdp2": EP2, "ep4": EP4, "hsdp": HSDP})


POLICIES = {
    f"activation {policy}": {**EP2, "activation.policy": policy} for policy in ("full", "selective", "selective_op")
}
KERNELS = {f"adamw {kernel}": {**EP2, "optim.implementation": kernel} for kernel in ("fused", "foreach", "for_loop")}
MORE = {
    "no_sync": {**EP2, "parallel.no_sync": True},
    "gathered": {**EP2, "parallel.reshard_after_forward": False},
    "prefetch": {**EP2, "parallel.prefetch": 2},
    "cp 2": {**EP2, "parallel.cp": 2},
    "cp 4": {**EP4, "parallel.cp": 4},
}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("optimizer", "cases", "options"),
    [
        ("clipped", {**POLICIES, "ep4": EP4}, {}),
        ("adamw", KERNELS, {}),
        ("clipped", {"ep2": EP2, "ep4": EP4, "no_sync": MORE["no_sync"]}, {"accum": 2}),
        ("sgd", {"ep2": EP2, "ep4": EP4}, {"dead": [3]}),
        ("sgd", {"ep4": EP4}, {"dead": [6, 7]}),
        ("sgd", MORE, {}),
        ("sgd", {"ep2": EP2}, {"products": "batched_mm"}),
        ("adamw", {"ep2 x fsdp2": EP2, "ep2 x cp2": MORE["cp 2"]}, {"accum": 2, "dead": [3]}),
        ("clipped", {"ep2 x cp2": MORE["cp 2"]}, {"accum": 2}),
    ],
    ids=[
        "activations",
        "adamw",
        "accumulated",
        "an expert that no rank uses",
        "a rank without rows",
        "more",
        "batched products",
        "an unused expert under adamw",
        "accumulated sequences",
    ],
)
def test_experts_train_as_in_one_process_with(
    optimizer: str, cases: dict[str, dict[str, Any]], options: dict[str, Any]
) -> None:
    assert_equal(4, {**hf("mixtral"), **OPTIMIZERS[optimizer]}, cases, **options)


TP = {"parallel.tp": 2}
TP_EP2, TP_EP4 = {**TP, **EP2}, {**TP, **EP4}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "glm4_moe"])
def test_layers_are_shared_where_experts_are_split(family: str) -> None:
    cases = {"tp2 x ep2": TP_EP2, "tp2 x ep4": TP_EP4, "replicas": {**HSDP, **TP, "parallel.dp_shard": 1}}
    assert_equal(4, {**hf(family), **OPTIMIZERS["clipped"]}, cases)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("optimizer", "cases", "options"),
    [
        ("sgd", {"tp2 x ep2": TP_EP2, "tp2 x ep4": TP_EP4}, {"accum": 4, "seq": 15}),
        ("sgd", {"tp2 x ep4": TP_EP4}, {"dead": [6, 7]}),
        (
            "adamw",
            {"tp2 x ep2 x cp2": {**TP_EP2, "parallel.cp": 2}, "recomputed": {**TP_EP2, "activation.policy": "full"}},
            {},
        ),
    ],
    ids=["rows that 2 does not divide", "a rank without rows", "sequences and recomputation"],
)
def test_shared_layers_and_split_experts_train_as_in_one_process_with(
    optimizer: str, cases: dict[str, dict[str, Any]], options: dict[str, Any]
) -> None:
    assert_equal(4, {**hf("qwen3_moe"), **OPTIMIZERS[optimizer]}, cases, **options)


@pytest.mark.release
@pytest.mark.dist
def test_layers_experts_and_shards_are_split_over_eight_ranks() -> None:
    assert_equal(8, {**hf("qwen3_moe"), **OPTIMIZERS["clipped"]}, {"tp2 x ep2 x fsdp2": TP_EP2, "tp2 x ep4": TP_EP4})


@pytest.mark.release
@pytest.mark.dist
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_experts_sequences_and_shards_are_split_over_eight_ranks(optimizer: str) -> None:
    settings = {**hf("mixtral", **BALANCED), **OPTIMIZERS[optimizer]}
    cases = {"ep2 x cp2 x fsdp2": {**EP2, "parallel.cp": 2}, "ep4 x cp2": {**EP4, "parallel.cp": 2}}
    assert_equal(8, settings, cases, accum=2, dead=[3])


@pytest.mark.slow
@pytest.mark.dist
def test_rows_of_ranks_that_share_layers_count_once() -> None:
    settings = {**hf("mixtral"), **OPTIMIZERS["sgd"]}
    expected = alone({"settings": settings})
    case = {"settings": {"parallel.strategy": "fsdp", **settings, **TP_EP2}}
    for fault, off in (("rows of all", 1.0), ("none", 0.0)):
        ran = run_ranks(4, f"{MODULE}:faulty", name=fault, cases={"case": case})[0]["case"]
        assert abs(ran.steps[0][0] - expected.steps[0][0]) <= 1e-5
        ran.weights, ran.gradients[1:] = expected.weights, expected.gradients[1:]
        assert distance(ran, expected)[0] == pytest.approx(off, abs=1e-4)


@pytest.mark.dist
def test_the_balance_loss_is_that_of_all_ranks_tokens() -> None:
    settings = {**hf("mixtral", **BALANCED), **OPTIMIZERS["clipped"]}
    assert_equal(2, settings, {"ep2": EP2}, accum=2)
    without = alone({"settings": {**hf("mixtral"), **OPTIMIZERS["clipped"]}, "accum": 2})
    assert alone({"settings": settings, "accum": 2}).steps[0][0] > without.steps[0][0] + 0.1


ENGINES = {name: {"parallel.strategy": name} for name in ("ddp", "zero1", "zero2", "zero3")}


@pytest.mark.slow
@pytest.mark.dist
def test_the_balance_loss_is_that_of_all_ranks_tokens_under_every_engine() -> None:
    settings = {**hf("mixtral", **BALANCED), **OPTIMIZERS["clipped"]}
    assert_equal(2, settings, {**ENGINES, "fsdp": {}, "cp2": {"parallel.cp": 2}}, accum=2)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_balance_loss_over_groups_is_that_of_all_tokens(optimizer: str) -> None:
    settings = {**hf("qwen3_moe", **BALANCED), **OPTIMIZERS[optimizer]}
    checkpointed = {**EP2, "activation.policy": "full"}
    cases = {"ep2": EP2, "hsdp": HSDP, "ep2 x cp2": MORE["cp 2"], "tp2 x ep2": TP_EP2, "recomputed": checkpointed}
    assert_equal(4, settings, cases)


def off(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """How far gradients are off, as a share of their norm."""
    difference = sum(float((grad - expected[name]).square().sum()) for name, grad in gradients.items())
    return float((difference / sum(float(grad.square().sum()) for grad in expected.values())) ** 0.5)


BF16 = {"precision.mode": "bf16"}
PURE = {"precision.mode": "pure_bf16"}


def improvement(world: int, cases: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How much less far the gradients of fp32 routers are off than those of routers in the case's mode."""
    module = "tests.parallel.router_runs:by_case"
    fp32 = run_ranks(1, module, cases={"fp32": {"parallel.strategy": "single"}})[0]["fp32"]
    twice = {
        (name, is_fp32): {**keys, "precision.router_fp32": is_fp32}
        for name, keys in cases.items()
        for is_fp32 in (True, False)
    }
    gradients = run_ranks(world, module, cases=twice)[0]
    return {name: off(gradients[name, True], fp32) / off(gradients[name, False], fp32) for name in cases}


@pytest.mark.dist
def test_routers_compute_in_fp32_in_narrower_modes() -> None:
    single = {"parallel.strategy": "single"}
    ratios = improvement(1, {"bf16": {**BF16, **single}, "pure_bf16": {**PURE, **single}})
    assert all(ratio < 0.7 for ratio in ratios.values()), ratios
    ratios = improvement(2, {"fsdp": {**BF16, "parallel.strategy": "fsdp"}})
    assert all(ratio < 0.7 for ratio in ratios.values()), ratios


@pytest.mark.slow
@pytest.mark.dist
def test_routers_compute_in_fp32_under_every_engine() -> None:
    fsdp = {"parallel.strategy": "fsdp"}
    cases = {**ENGINES, "ep2": {**fsdp, **EP2}, "recomputed": {**fsdp, "activation.policy": "full"}}
    cases |= {"tp2 x ep2": {**fsdp, **TP_EP2}}
    ratios = improvement(2, {name: {**BF16, **keys} for name, keys in cases.items()})
    assert all(ratio < 0.7 for ratio in ratios.values()), ratios


@pytest.mark.dist
def test_an_experts_gradient_is_divided_by_all_ranks() -> None:
    """The loss and the first norm of a wrong factor look right enough, and AdamW hides it."""
    settings = {**hf("mixtral"), **OPTIMIZERS["sgd"]}
    expected = alone({"settings": settings})
    found = {}
    for fault, keys in (("default factor", EP2), ("forced sum", EP4)):
        case = {"settings": {"parallel.strategy": "fsdp", **settings, **keys}}
        found[fault] = run_ranks(4, f"{MODULE}:faulty", name=fault, cases={"case": case})[0]["case"]
    for ran, off in zip(found.values(), (1.0, 0.75), strict=True):
        assert abs(ran.steps[0][0] - expected.steps[0][0]) <= 1e-5
        ran.weights, ran.gradients[1:] = expected.weights, expected.gradients[1:]
        assert distance(ran, expected)[0] == pytest.approx(off, abs=1e-4)


@pytest.mark.slow
@pytest.mark.dist
def test_a_layer_exchanges_rows_four_times_a_step_and_counts_once() -> None:
    per_layer = {"none": 5, "selective_op": 6, "full": 8}  # counts, rows there and back; selective_op keeps the rows
    for counts in run_ranks(2, f"{MODULE}:exchanges", policies=list(per_layer)):
        assert counts == {policy: 2 * 3 * n for policy, n in per_layer.items()}, "2 layers, 3 steps"


@pytest.mark.slow
@pytest.mark.dist
def test_a_block_moves_as_many_values_as_in_theory() -> None:
    """One sequence of 24 tokens and width 32 a rank, 2 of 8 experts a row; docs/wide.md has the table."""
    ranks, rows, dense, experts = 4, 24 * 2 * 32, 2 * 32 * 32 + 2 * 16 * 32 + 2 * 32 + 8 * 32, 8 * 3 * 16 * 32
    full = {"activation.policy": "full"}
    policies = {"fsdp": {}, "fsdp, recomputed": full, "ep 2": EP2, "ep 2, recomputed": {**EP2, **full}, "ep 4": EP4}
    policies["ep 2, rows kept"] = {**EP2, "activation.policy": "selective_op"}
    cases = {name: {**hf("mixtral"), **keys} for name, keys in policies.items()}
    kinds = {**OF_LAYERS, **OF_FSDP}
    by_rank = run_ranks(ranks, "tests.parallel.tensor_runs:collectives", cases=cases, kinds=kinds)
    for name, keys in policies.items():
        ep = keys.get("parallel.ep", 1)
        gathered = [dense + experts] if ep == 1 else [dense, experts // ep] if ep < ranks else [dense]
        sent = [0, 0]
        for forward, backward in (found[name] for found in by_rank):
            by_size = [
                {key: n for key, n in side.items() if key[0] != "all_to_all_single"} for side in (forward, backward)
            ]
            assert by_size[0] == {("all_gather", n): 1 for n in gathered}, name
            assert by_size[1] == by_size[0] | {("reduce_scatter", n): 1 for n in gathered}, name
            for side, counts in enumerate((forward, backward)):
                exchanges = {key: n for key, n in counts.items() if key[0] == "all_to_all_single"}
                expected = 0 if ep == 1 else 4 if side and "recomputed" in name else 2
                assert sum(exchanges.values()) == expected, name
                sent[side] += sum(n * values for (_, values), n in exchanges.items())
        assert sent == [ranks * rows * n for n in (2 if ep > 1 else 0, expected)], name


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_goes_on_with_other_groups_of_experts(tmp_path: Path) -> None:
    legs = [(4, "fsdp", EP2), (2, "fsdp", EP2), (4, "ddp", {}), (4, "fsdp", EP4), (4, "hsdp", HSDP), (1, "single", {})]
    runs = [
        run_ranks(
            world, f"{MODULE}:leg", settings={"parallel.strategy": engine, **keys}, folder=str(tmp_path), step=2 * n
        )[0]
        for n, (world, engine, keys) in enumerate(legs)
    ]
    for (_, saved, _), (loaded, _, _) in itertools.pairwise(runs):
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    again = tmp_path / "again"
    for n, (_, _, losses) in enumerate(runs):
        single = {"parallel.strategy": "single"}
        _, _, expected = run_ranks(1, f"{MODULE}:leg", settings=single, folder=str(again), step=2 * n)[0]
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.dist
def test_experts_of_the_users_own_are_split_by_the_hook_or_refused() -> None:
    steps, weights = run_ranks(1, f"{MODULE}:own_loop", settings={"parallel.strategy": "single"})[0]
    found, found_weights = run_ranks(2, f"{MODULE}:own_loop", settings={"parallel.strategy": "fsdp", **EP2})[0]
    assert torch.allclose(torch.tensor(found), torch.tensor(steps), atol=1e-5)
    assert all(torch.allclose(found_weights[name], weight, atol=1e-6) for name, weight in weights.items())
    for model, cause in (("none", "no module of Sequential holds experts"), ("three", "does not divide the 3 experts")):
        assert all(cause in words for words, _ in run_ranks(2, f"{MODULE}:refused", build=model, ep=2)), model


FEW = {"num_hidden_layers": 2, "num_local_experts": 4}


@pytest.mark.parametrize(
    ("given", "world", "cause"),
    [
        ({"parallel.ep": 16}, 16, "parallel.ep=16 does not divide model.hf.num_local_experts=8"),
        ({"parallel.ep": 3, "model.hf": {"model_type": "mixtral"}}, 3, "the 8 experts of model.layers.0.mlp.experts"),
        ({"model.hf": {"model_type": "llama"}}, 2, "no module of LlamaForCausalLM holds experts"),
        ({"model.hf": {"model_type": "llama4_text", **FEW}}, 2, "a Llama4TextExperts, is not called with rows, the"),
        ({"model.hf": {"model_type": "jetmoe", **FEW}}, 2, "a JetMoeParallelExperts, is not called with rows, the"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(given: dict[str, Any], world: int, cause: str) -> None:
    def prepare() -> None:
        config = load_config(None, {"parallel.strategy": "fsdp", "parallel.ep": 2, **hf("mixtral"), **given}).config
        capability.check(config, device="cpu", world_size=world, local_world_size=world)
        load_task(config)

    with pytest.raises(ConfigError) as caught:
        prepare()
    assert cause in caught.value.cause
