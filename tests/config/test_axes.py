"""Wrong sizes of `parallel.tp`, `cp` and `ep`, refused by the config before any rank starts: cause and fix."""

from __future__ import annotations

from typing import Any

import pytest

from shardkit.config.capability import check, check_model
from shardkit.config.load import load_config
from shardkit.errors import ConfigError

FSDP, HSDP = {"strategy": "fsdp"}, {"strategy": "hsdp"}
MOE = {"model_type": "qwen3_moe", "num_experts": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
NO_EXPERTS = "only language models of transformers have experts"
WIDE = "parallel.tp=2 × parallel.cp=4 = 8"
TWO = "4 ranks / parallel.tp=2 = 2"
PIPELINE = "no model is cut into stages"

# (ranks, ranks of a node, keys of parallel, other keys, a part of the cause, a part of the fix)
CASES: list[tuple[int, int, dict[str, Any], dict[str, Any], str, str]] = [
    # sizes and the world
    (4, 4, {**FSDP, "tp": 3}, {}, "parallel.tp=3 does not divide the 4 ranks", "set parallel.tp to one of 1, 2, 4"),
    (1, 1, {**FSDP, "tp": 2}, {}, "parallel.tp=2 does not divide the 1 rank", "remove parallel.tp"),
    (4, 4, {"cp": 3}, {}, "parallel.cp=3 does not divide the 4 ranks", "set parallel.cp to one of 1, 2, 4"),
    (4, 4, {**FSDP, "tp": 2, "cp": 4}, {}, f"{WIDE} does not divide the 4 ranks", "set parallel.cp to one of 1, 2"),
    (4, 4, {**FSDP, "tp": 4, "cp": 2}, {}, "parallel.tp=4 × parallel.cp=2 = 8 does not divide", "remove parallel.cp"),
    (4, 4, {**FSDP, "ep": 3}, {"hf": MOE}, "parallel.ep=3 does not divide the 4 ranks", "one of 1, 2, 4"),
    (1, 1, {**FSDP, "ep": 2}, {"hf": MOE}, "parallel.ep=2 does not divide the 1 rank", "remove parallel.ep"),
    (4, 4, {**HSDP, "dp_replicate": 4, "ep": 2}, {"hf": MOE}, "does not divide the 1 rank of", "remove parallel.ep"),
    (4, 4, {**FSDP, "tp": 0}, {}, "parallel.tp=0", "the default is parallel.tp=1"),
    (4, 4, {**FSDP, "ep": "two"}, {}, "parallel.ep='two'", "the default is parallel.ep=1"),
    (4, 4, {**FSDP, "cp": 2.5}, {}, "parallel.cp=2.5", "the default is parallel.cp=1"),
    # with the mesh
    (4, 4, {**FSDP, "tp": 2, "dp_shard": 4}, {}, f"fsdp on {TWO} has dp_shard=2", "remove parallel.dp_shard"),
    (4, 4, {**HSDP, "tp": 2, "dp_replicate": 2, "dp_shard": 2}, {}, f"= 4, but there are {TWO}", "1 × 2, 2 × 1"),
    (4, 4, {**HSDP, "tp": 2, "dp_shard": 3}, {}, f"parallel.dp_shard=3 does not divide the {TWO}", "1 × 2, 2 × 1"),
    (4, 4, {**HSDP, "tp": 2, "cp": 2, "dp_shard": 4}, {}, f"does not divide the {TWO}", "1 × 2, 2 × 1"),
    # across nodes
    (8, 4, {**FSDP, "tp": 8}, {}, "a node has 4 ranks", "one of 1, 2, 4, or set parallel.tp_across_nodes=true"),
    (4, 1, {**FSDP, "tp": 2}, {}, "a node has 1 rank", "remove parallel.tp, or set parallel.tp_across_nodes=true"),
    (4, 2, {**FSDP, "tp": 2, "cp": 2}, {}, "= 4, but a node has 2 ranks", "or set parallel.cp_across_nodes=true"),
    (4, 4, {**FSDP, "tp_sequence": True}, {}, "would be ignored: parallel.tp=1", "remove parallel.tp_sequence"),
    # the engine
    *(
        (4, 4, {"strategy": engine, axis: 2}, {"hf": MOE}, f"parallel.strategy={engine}", "parallel.strategy=fsdp")
        for engine in ("ddp", "zero1", "zero2", "zero3")
        for axis in ("tp", "ep")
    ),
    (1, 1, {"strategy": "single", "cp": 2}, {}, "parallel.strategy=single", "remove parallel.cp"),
    # the model, where the config names its sizes
    (8, 8, {**FSDP, "tp": 8}, {}, "parallel.tp=8 does not divide model.n_heads=4", "parallel.tp to one of 1, 2, 4"),
    (4, 4, {"cp": 4}, {"n_heads": 2}, "parallel.cp=4 does not divide model.n_heads=2", "parallel.cp to one of 1, 2"),
    (4, 4, {**FSDP, "tp": 2, "cp": 2}, {"n_heads": 2}, "parallel.tp=2 × parallel.cp=2 does not divide", "remove"),
    (4, 4, {**FSDP, "tp": 4}, {"hf": MOE}, "model.hf.num_key_value_heads=2", "set parallel.tp to one of 1, 2"),
    (4, 4, {**FSDP, "ep": 4}, {"hf": MOE}, "model.hf.num_experts=6", "set parallel.ep to one of 1, 2, 3, 6"),
    (4, 4, {**FSDP, "tp": 4}, {"vocab_size": 3}, "model.vocab_size=3 leaves a rank", "parallel.tp to one of 1, 2, 3"),
    (2, 2, {**FSDP, "tp": 2}, {"hf": {"model_type": "llama", "vocab_size": 1}}, "vocab_size=1", "remove parallel.tp"),
    (2, 2, {**FSDP, "tp": 2}, {"dropout": 0.1}, "parallel.tp=2 with model.dropout=0.1", "set model.dropout=0"),
    (2, 2, {**FSDP, "ep": 2}, {}, NO_EXPERTS, "set task.name=hf_causal_lm"),
    (2, 2, {**FSDP, "ep": 2}, {"preset": "vit-debug"}, NO_EXPERTS, "remove parallel.ep"),
    (2, 2, {**FSDP, "tp": 2}, {"preset": "bert-debug"}, "parallel.tp=2 with task.name=hf_masked_lm", "remove"),
    (2, 2, {"cp": 2}, {"preset": "vit-debug"}, "parallel.cp=2 with task.name=image_classification", "remove"),
    # names of other tools, and typos
    (4, 4, {"tp_size": 2}, {}, "unknown key parallel.tp_size", "did you mean parallel.tp?"),
    (4, 4, {"tensor_parallel": 2}, {}, "unknown key parallel.tensor_parallel", "did you mean parallel.tp?"),
    (4, 4, {"ep_size": 2}, {}, "unknown key parallel.ep_size", "did you mean parallel.ep?"),
    (4, 4, {"enable_expert_parallel": True}, {}, "unknown key", "did you mean parallel.ep?"),
    (4, 4, {"context_parallel_size": 2}, {}, "unknown key", "did you mean parallel.cp?"),
    (4, 4, {"dp_shard_size": 2}, {}, "unknown key", "did you mean parallel.dp_shard?"),
    (4, 4, {"pp": 2}, {}, PIPELINE, "remove it"),
    (4, 4, {"pipeline_parallel_size": 2}, {}, PIPELINE, "remove it"),
    (4, 4, {"dp": 2}, {}, "data ranks are all ranks, over parallel.tp × parallel.cp", "remove it"),
]
TASKS = {"vit-debug": "image_classification", "bert-debug": "hf_masked_lm"}


@pytest.mark.parametrize(("world", "node", "parallel", "model", "cause", "fix"), CASES)
def test_axes_that_cannot_be_are_refused_by_the_config(
    world: int, node: int, parallel: dict[str, Any], model: dict[str, Any], cause: str, fix: str
) -> None:
    task = "hf_causal_lm" if "hf" in model else TASKS.get(model.get("preset", ""), "causal_lm")
    settings = {f"parallel.{key}": value for key, value in parallel.items()}
    settings |= {"task.name": task, **{f"model.{key}": value for key, value in model.items()}}

    def refuse() -> None:
        config = load_config(None, settings).config
        check(config, device="cpu", world_size=world, local_world_size=node)
        check_model(config)

    with pytest.raises(ConfigError) as caught:
        refuse()
    assert cause in caught.value.cause and fix in caught.value.fix, caught.value
    assert "\n" not in caught.value.cause + caught.value.fix


@pytest.mark.parametrize(
    ("world", "node", "parallel"),
    [
        (16, 4, {**FSDP, "tp": 8, "tp_across_nodes": True}),
        (4, 4, {**FSDP, "tp_across_nodes": True, "cp_across_nodes": True}),  # it only allows what others ask for
        (4, 2, {**FSDP, "tp": 2, "cp": 2, "cp_across_nodes": True}),
        (4, 4, {**FSDP, "tp": 2, "dp_shard": 2}),
        (8, 8, {**HSDP, "tp": 2, "cp": 2, "dp_shard": 2}),
    ],
)
def test_axes_that_fit_pass(world: int, node: int, parallel: dict[str, Any]) -> None:
    settings = {"model.n_heads": 8, **{f"parallel.{key}": value for key, value in parallel.items()}}
    check(load_config(None, settings).config, device="cpu", world_size=world, local_world_size=node)


def test_a_loop_of_the_users_own_has_another_model_than_the_config() -> None:
    settings = {"parallel.strategy": "fsdp", "parallel.ep": 8}
    check(load_config(None, settings).config, device="cpu", world_size=8, local_world_size=8)
    settings = {"parallel.strategy": "fsdp", "parallel.tp": 8}  # the reference transformer's 4 heads are not its own
    check(load_config(None, settings).config, device="cpu", world_size=8, local_world_size=8)
