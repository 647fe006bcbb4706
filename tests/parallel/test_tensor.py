"""Layers that are split over ranks (parallel.tp) train as whole ones do, or are refused."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from shardkit.config import capability
from shardkit.config.load import load_config
from shardkit.config.schema import ParallelConfig
from shardkit.errors import ConfigError
from shardkit.tasks.load import load_task
from tests.parallel import context_runs
from tests.parallel.context_runs import MODELS, OPTIMIZERS, hf
from tests.parallel.tensor_runs import Own, Ran
from tests.ranks import run_ranks
from tests.strategies.cases import assert_curve

RUNS = "tests.parallel.tensor_runs:runs"
GRADIENT, SGD, ADAMW = 1e-5, 1e-5, 5e-4
"""How far a gradient of the first step, and a weight after all steps, may be off: shares of its tensor's largest, by
rounding, which differs between CPUs' libraries. AdamW divides small gradients by their size, and makes a step of what
is rounding."""
TP, TP_CP = {"parallel.tp": 2}, {"parallel.tp": 2, "parallel.cp": 2}
SPLIT_RESIDUALS = {**TP, "parallel.tp_sequence": True}
BF16, ROUNDED = {"precision.mode": "bf16"}, ("bf16", "fp32")
RECOMPUTING = ("full", "selective", "selective_op")
ODD_PARTS = {"parallel.tp_sequence": True, "train.seq_len": 23, "train.max_norm": 0.5}


def case(model: str, optimizer: str = "sgd", **keys: Any) -> dict[str, Any]:
    return {**MODELS[model], **OPTIMIZERS[optimizer], "train.max_steps": 4, **keys}


def ran(world: int, cases: dict[str, dict[str, Any]], how: str = RUNS) -> list[dict[str, Ran]]:
    """What each rank got, and one process last."""
    alone = {
        name: {key: value for key, value in settings.items() if not key.startswith("parallel.")}
        | {"parallel.strategy": "single"}
        for name, settings in cases.items()
    }  # fmt: skip
    ranks = run_ranks(world, how, cases={name: {"parallel.strategy": "fsdp", **c} for name, c in cases.items()})
    return [*ranks, *run_ranks(1, RUNS, cases=alone)]


def assert_same(found: Ran, want: Ran, name: str, share: float = SGD) -> None:
    """Every gradient of the first step, every weight before and after, and the losses. `share`: how far a weight may be
    off, of its tensor's largest."""
    assert want.steps[0][0] > want.steps[-1][0] + 0.02, "the loss must fall, or parity says nothing"
    assert_curve(found.steps, want.steps, name)
    assert abs(found.val_loss - want.val_loss) <= 1e-5, name
    assert not found.drifted, (name, "copies of these weights differ", found.drifted)
    compared = (
        ("initial weights", found.before, want.before, 0.0),
        ("gradients", found.gradients[0], want.gradients[0], GRADIENT),
        ("weights", found.weights, want.weights, share),
    )
    for kind, tensors, others, allowed in compared:
        assert tensors.keys() == others.keys(), name
        for key, other in others.items():
            off = float((tensors[key] - other).abs().max()) / (float(other.abs().max()) + 1e-12)
            assert off <= allowed, f"{name}: {kind} of {key} are off by {off:.1e} of the largest"


def assert_as_one_process(world: int, cases: dict[str, dict[str, Any]]) -> None:
    *ranks, alone = ran(world, cases)
    for name, want in alone.items():
        assert ranks[0][name].texts == want.texts, name
    for rank in ranks:
        for name, settings in cases.items():
            assert_same(rank[name], alone[name], name, ADAMW if settings["optim.name"] == "adamw" else SGD)


@pytest.mark.slow
@pytest.mark.dist
def test_errors_that_say_nothing_are_noticed() -> None:
    odd = {"model.vocab_size": 513}
    cases = {
        " in norms of heads": case("qwen3", **TP),
        "norms in norms of heads": case("qwen3", **TP),
        "ties in tied weights": case("tied", **TP),
        "first id in an odd vocabulary": case("tied", **TP, **odd),
        "factor in the reference": case("reference", **TP),
        " in split residuals": case("llama", **SPLIT_RESIDUALS),
        "split norms in split residuals": case("llama", **SPLIT_RESIDUALS),
        "clipping in norms of heads": case("qwen3", **TP, **{"train.max_norm": 0.5}),
    }
    first, *_, alone = ran(4, cases, "tests.parallel.tensor_runs:broken")
    for name in cases:
        with nullcontext() if name.startswith(" ") else pytest.raises(AssertionError):
            assert_same(first[name], alone[name], name)


@pytest.mark.dist
def test_two_ranks_that_share_layers_train_as_one_process() -> None:
    assert_as_one_process(
        2,
        {
            "the reference, a vocabulary that 2 does not divide": case("tied", **TP, **{"model.vocab_size": 513}),
            "norms of heads, an odd vocabulary": {**case("qwen3", **TP), **hf("qwen3", head_dim=8, vocab_size=513)},
            "split residuals": case("qwen3", **SPLIT_RESIDUALS, **{"train.seq_len": 23}),
        },
    )


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("split", [{}, ODD_PARTS], ids=["whole residuals", "split residuals"])
def test_every_model_trains_shared_layers_as_one_process(split: dict[str, Any]) -> None:
    whole_logits = {"model.loss_chunk_size": 0}
    phi = hf("phi3", pad_token_id=0)
    cases: dict[str, dict[str, Any]] = {
        **{model: case(model, "sgd", **TP) for model in ("reference", "tied", "llama", "qwen3")},
        "a window": case("mistral with a window", **TP),
        "tied, norms of heads, scaled embeddings": case("gemma 3", **TP),
        "capped logits": case("gemma 2 with softcaps", **TP),
        "biases": {**case("llama", **TP), **hf("qwen2")},
        "gathered projections": {**case("llama", **TP), **phi},
        "norms of whole projections": {**case("llama", **TP), **hf("olmo2")},
        "whole logits": case("reference", **TP, **whole_logits),
        "whole logits of transformers": case("llama", **TP, **whole_logits),
    }
    assert_as_one_process(4, {name: {**settings, **split} for name, settings in cases.items()})


@pytest.mark.slow
@pytest.mark.dist
def test_shared_layers_train_with_every_setting_that_is_not_refused() -> None:
    prompts = {"train.sample_prompts": ["def", "import x return"], "train.sample_tokens": 4}
    hsdp = {"parallel.strategy": "hsdp", "parallel.dp_shard": 1}
    assert_as_one_process(
        4,
        {
            "adamw, clipped": case("llama", "adamw", **TP),
            "foreach": case("qwen3", "adamw", **TP, **{"optim.implementation": "foreach"}),
            "one by one": case("qwen3", "adamw", **TP, **{"optim.implementation": "for_loop"}),
            "replicas": case("qwen3", **TP, **hsdp),
            "split sequences": case("reference", "adamw", **TP_CP),
            "split and packed sequences": case("qwen3", **TP_CP, **{"data.packing": "padding_free"}),
            "four parts": case("reference", **{"parallel.tp": 4}),
            "averages": case("reference", "adamw", **TP, **{"train.ema_decay": 0.9}),
            "samples": case("llama", **TP, **prompts),
            "reduced once": case("llama", **TP, **{"parallel.no_sync": True}),
            **{policy: case("qwen3", **TP, **{"activation.policy": policy}) for policy in RECOMPUTING},
        },
    )


@pytest.mark.slow
@pytest.mark.dist
def test_residuals_are_split_beside_every_setting_that_is_not_refused() -> None:
    prompts = {"train.sample_prompts": ["def", "import x return"], "train.sample_tokens": 4}
    cases: dict[str, dict[str, Any]] = {
        "four parts of 22": case("reference", **{"parallel.tp": 4, "train.seq_len": 22}),
        "adamw": case("llama", "adamw", **TP),
        "an odd vocabulary": case("tied", **TP, **{"model.vocab_size": 513}),
        "a sample's one position": case("llama", **TP, **prompts),
        "split sequences": case("qwen3", **TP_CP),
        "packed": case("qwen3", **TP, **{"data.packing": "padding_free"}),
        "replicas": case("qwen3", **TP, **{"parallel.strategy": "hsdp", "parallel.dp_shard": 1}),
        **{policy: case("qwen3", **TP, **{"activation.policy": policy}) for policy in RECOMPUTING},
    }
    assert_as_one_process(4, {name: {**settings, "parallel.tp_sequence": True} for name, settings in cases.items()})


@pytest.mark.slow
@pytest.mark.dist
def test_bf16_is_no_further_from_fp32_than_in_one_process() -> None:
    """By the same engine, whose casts are its own. The largest ratio that was measured is 1.6, of norms of heads."""
    models, few = ("llama", "qwen3", "reference"), {"parallel.strategy": "fsdp", "train.max_steps": 2}
    alone = run_ranks(
        1, RUNS, cases={f"{m} {mode}": case(m, **few, **{"precision.mode": mode}) for m in models for mode in ROUNDED}
    )[0]
    splits = {"whole residuals": TP, "split residuals": SPLIT_RESIDUALS}
    shared = {f"{m}, {name}": case(m, **few, **split, **BF16) for m in models for name, split in splits.items()}
    for name, found in run_ranks(2, RUNS, cases=shared)[0].items():
        rounded, exact = (alone[f"{name.partition(',')[0]} {mode}"].gradients[0] for mode in ROUNDED)
        for key, gradient in found.gradients[0].items():
            off, allowed = torch.dist(gradient, exact[key]), 2 * torch.dist(rounded[key], exact[key])
            assert 0 < off <= allowed, (name, key, off / exact[key].norm(), allowed / exact[key].norm())


@pytest.mark.dist
def test_collectives_of_a_block_are_those_of_theory() -> None:
    """One sequence of 24 tokens and width 32; docs/wide.md has the table."""
    tokens, qkv = 24 * 32, 3 * 32 * 32
    forward = backward = {("all_reduce", tokens): 2}
    # The heads' rows of three stacked layers and of their biases are gathered from ranges of all heads.
    gathered = {("all_gather_into_tensor", n // 2): 1 for n in (qkv, 96)}
    scattered = {("reduce_scatter_tensor", n): 1 for n in (qkv, 96)}
    gather, scatter = ("all_gather_into_tensor", tokens // 2), ("reduce_scatter_tensor", tokens)
    exchanged, norms = {gather: 2, scatter: 2}, {("all_reduce", 32): 2}
    lora = {"adapter.type": "lora", "adapter.r": 4, "adapter.targets": ["q_proj", "k_proj", "v_proj"]}
    factors = {("all_reduce", 24 * 4): 3}
    want = {
        "llama": (case("llama", **TP), [forward, backward]),
        **{
            policy: (case("llama", **TP, **{"activation.policy": policy}), [forward, {("all_reduce", tokens): n}])
            for policy, n in (("full", 3), ("selective", 2), ("selective_op", 3))
        },
        "stacked": (case("reference", **TP), [forward | gathered, backward | scattered]),
        "norms of heads": (case("qwen3", **TP), [forward, backward | {("all_reduce", 8): 2}]),
        "adapters": (case("llama", **TP, **lora), [forward, backward | factors]),
        "split residuals, adapters": (case("llama", **SPLIT_RESIDUALS, **lora), [exchanged, exchanged | factors]),
        "split residuals": (case("llama", **SPLIT_RESIDUALS), [exchanged, exchanged | norms]),
        "split residuals, recomputed": (
            case("llama", **SPLIT_RESIDUALS, **{"activation.policy": "full"}),
            [exchanged, {gather: 4, scatter: 3} | norms],
        ),
    }
    cases = {name: settings for name, (settings, _) in want.items()}
    for found in run_ranks(2, "tests.parallel.tensor_runs:collectives", cases=cases):
        assert found == {name: counts for name, (_, counts) in want.items()}


@pytest.mark.dist
def test_a_block_keeps_a_part_of_norms_and_residuals() -> None:
    """One sequence of 24 tokens and width 32: each of two norms keeps its input, that input scaled and a factor of each
    token, and the layers after it their input, which is whole."""
    sizes = hf("llama", intermediate_size=40)  # none that is the number of tokens
    full = {"activation.policy": "full"}
    cases = {
        f"{policy}, {residuals}": {**case("llama", **split), **sizes, **recomputed}
        for policy, recomputed in (("none", {}), ("full", full))
        for residuals, split in (("whole", TP), ("split", SPLIT_RESIDUALS))
    }
    found = run_ranks(2, "tests.parallel.tensor_runs:kept", cases=cases)[1]
    whole, split = (found[f"none, {residuals}"] for residuals in ("whole", "split"))
    changed = {n: split.get(n, 0) - whole.get(n, 0) for n in {*whole, *split}}
    assert {n: more for n, more in changed.items() if more} == {24 * 32: -4, 12 * 32: 4, 24: -2, 12: 2}
    assert (found["full, whole"], found["full, split"]) == ({24 * 32: 1}, {12 * 32: 1})


@pytest.mark.dist
def test_a_model_of_the_users_own_is_split_by_a_plan_of_its_own() -> None:
    loop = "tests.parallel.tensor_runs:own_loop"
    want_steps, want = run_ranks(1, loop, strategy="single", tp=1)[0]
    steps, weights = run_ranks(4, loop, strategy="fsdp", tp=2)[0]
    assert_curve(steps, want_steps, "own")
    for name, weight in want.items():
        assert float((weights[name] - weight).abs().max()) <= 1e-5, name


@pytest.mark.parametrize(
    ("given", "world", "node", "cause"),
    [
        ({"parallel.tp": 4, **hf("llama")}, 4, 4, "num_key_value_heads=2"),
        ({"parallel.tp": 2, **hf("llama", attention_dropout=0.1)}, 2, 2, "drops 0.1"),
        ({"parallel.tp": 2, **hf("gpt_oss", num_local_experts=4)}, 2, 2, "GptOssForCausalLM says of no block"),
        ({"parallel.tp": 2, "task.name": "hf_causal_lm", "model.hf": {"model_type": "gpt2"}}, 2, 2, "no block"),
        ({"parallel.tp": 2, **hf("mixtral")}, 2, 2, "which shardkit cannot do"),
        ({**SPLIT_RESIDUALS, "parallel.ep": 2, **hf("mixtral")}, 2, 2, "routers would see parts of sequences"),
        ({**SPLIT_RESIDUALS, "compile.enabled": True}, 2, 2, "torch.compile fails"),
        ({**SPLIT_RESIDUALS, "precision.mode": "fp16"}, 2, 2, "fp16 is not compared"),
        ({**SPLIT_RESIDUALS, "model.mlp_chunks": 2}, 2, 2, "would scatter its sum over other positions"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(given: dict[str, Any], world: int, node: int, cause: str) -> None:
    def prepare() -> None:
        small = {"train.seq_len": 32, "parallel.strategy": "fsdp", "model.loss_chunk_size": 0}
        config = load_config(None, {**small, **given}).config
        capability.check(config, device="cpu", world_size=world, local_world_size=node)
        load_task(config)

    with pytest.raises(ConfigError) as caught:
        prepare()
    assert cause in str(caught.value), caught.value


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.norm, self.out = nn.Linear(8, 8), nn.LayerNorm(4), nn.Linear(8, 8)


SPLIT = {"q": "colwise", "out": "rowwise"}


@pytest.mark.parametrize(
    ("plan", "cause"),
    [
        (SPLIT, "norm.weight lies beside layers that are cut"),
        ({**SPLIT, "norms": "replicated_with_grad_allreduce"}, "the model has no such layer"),
        ({**SPLIT, "norm": "colwise"}, "only Linear is cut as colwise"),
        ({**SPLIT, "norm": "packed_colwise"}, "which shardkit cannot do"),
        ({}, "says of no block"),
    ],
)
def test_a_plan_that_would_train_wrongly_is_refused(plan: dict[str, str], cause: str) -> None:
    from shardkit.parallel.tensor import check_plan

    model: Any = Heads()
    model.tp_plan = plan
    with pytest.raises(ConfigError) as caught:
        check_plan(model, ParallelConfig(tp=2))
    assert cause in str(caught.value)
    model.tp_plan = {**SPLIT, "norm": "replicated_with_grad_allreduce"}
    assert check_plan(model, ParallelConfig(tp=2)) == model.tp_plan


class Normed(nn.Module):
    """A block around layers that are cut."""

    tp_plan: ClassVar[dict[str, str]] = {"attn.q": "colwise", "attn.norm": "colwise", "attn.out": "rowwise"}

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.attn = norm, Heads()
        self.attn.norm = nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (Normed(nn.Linear(8, 8)), "lies norm (Linear)"),
        (Own(), "lies blocks (ModuleList)"),
        (Normed(nn.LayerNorm(8)), ""),
    ],
)
def test_only_norms_see_parts_of_sequences(model: nn.Module, cause: str) -> None:
    from shardkit.parallel.tensor import check_plan

    with pytest.raises(ConfigError) if cause else nullcontext() as caught:
        check_plan(model, ParallelConfig(tp=2, tp_sequence=True))
    assert caught is None or cause in caught.value.cause


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_goes_on_with_layers_shared_by_others(tmp_path: Path) -> None:
    context_runs.documents(tmp_path, pairs=False)
    legs = [(2, "fsdp", 2, 1), (4, "fsdp", 2, 1), (1, "single", 1, 1), (4, "hsdp", 2, 2), (2, "ddp", 1, 1)]
    runs: list[Any] = []
    for number, (world, engine, tp, cp) in enumerate(legs, start=1):
        keys = {"parallel.strategy": engine, "parallel.tp": tp, "parallel.cp": cp, "train.max_steps": 2 * number}
        runs.append(run_ranks(world, "tests.parallel.context_runs:leg", settings=keys, folder=str(tmp_path))[0])
    for (_, _, saved), (_, loaded, _) in itertools.pairwise(runs):
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    (tmp_path / "run").rename(tmp_path / "split")
    keys = {"parallel.strategy": "single", "train.max_steps": 2 * len(legs)}
    want, *_ = run_ranks(1, "tests.parallel.context_runs:leg", settings=keys, folder=str(tmp_path))[0]
    assert_curve([step for steps, *_ in runs for step in steps], want, "resumed")
