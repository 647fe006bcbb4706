"""Sequences that are split over ranks (parallel.cp) train as whole ones do, or are refused."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.config import capability
from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.tasks.load import load_task
from tests.parallel import context_runs
from tests.parallel.context_runs import MODELS, OPTIMIZERS, Ran, assert_same
from tests.ranks import run_ranks
from tests.strategies.cases import assert_curve

RUNS = "tests.parallel.context_runs:runs"
PACKINGS = ("none", "packed", "padding_free")


def settings(model: str, packing: str, optimizer: str) -> dict[str, Any]:
    return {**MODELS[model], **OPTIMIZERS[optimizer], "data.packing": packing}


def alone(case: dict[str, Any]) -> Ran:
    ran: Ran = run_ranks(1, RUNS, cases={"alone": {**case, "parallel.strategy": "single"}})[0]["alone"]
    return ran


def compare(world: int, cp: int, engines: list[str], case: dict[str, Any], **extra: Any) -> None:
    cases = {name: {**case, "parallel.strategy": name, "parallel.cp": cp, **extra} for name in engines}
    want = alone(case)
    assert want.steps[0][0] - want.steps[-1][0] >= 0.2, "the loss must fall, or parity says nothing"
    for ran in run_ranks(world, RUNS, cases=cases):
        for name, found in ran.items():
            assert_same(found, want, (name, cp))


@pytest.mark.dist
@pytest.mark.deepspeed
def test_two_ranks_that_share_sequences_train_as_one_process() -> None:
    compare(2, 2, ["ddp", "fsdp", "zero3"], settings("reference", "padding_free", "sgd"))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_every_engine_trains_split_sequences_as_one_process(packing: str, optimizer: str) -> None:
    case = settings("reference", packing, optimizer)
    compare(2, 2, ["ddp", "fsdp", "zero1", "zero2", "zero3"], case)
    compare(4, 2, ["hsdp", "zero2"], case)
    compare(4, 4, ["fsdp", "zero3"], case)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_split_sequences_as_one_process(model: str) -> None:
    for packing in ("none", "padding_free"):
        compare(4, 4, ["fsdp", "zero3"], settings(model, packing, "sgd"))


@pytest.mark.dist
def test_a_model_of_the_users_own_trains_with_the_hook_or_is_refused() -> None:
    loop, refused = "tests.parallel.context_runs:own_loop", "tests.parallel.context_runs:without_hook"
    want_steps, want = run_ranks(1, loop, strategy="ddp", cp=1)[0]
    steps, weights = run_ranks(4, loop, strategy="fsdp", cp=2)[0]
    assert_curve(steps, want_steps, "own")
    for name, weight in want.items():
        assert float((weights[name] - weight).abs().max()) <= 1e-5, name
    for model, cause in (
        ("plain", "context_parallel"), ("batch norm", "batch norm"), ("recurrent", "1, a GRU, mixes"),
        ("other", "1, a Conv1d, mixes"), ("torch's attention", "1.self_attn, a MultiheadAttention, mixes"),
    ):  # fmt: skip
        assert all(cause in words for words in run_ranks(2, refused, model=model)), model


@pytest.mark.dist
def test_the_first_step_notices_rows_that_are_whole_and_attention_that_exchanges_nothing() -> None:
    for rows, model, alike in run_ranks(2, "tests.parallel.context_runs:mistaken_loops"):
        assert rows.startswith("parallel.cp=2: ranks 0 to 1 got the same batch: whole sequences")
        assert model.startswith("parallel.cp=2: no attention exchanged heads")
        assert alike.startswith("trained"), "nobody can tell a part of such rows from the whole"


@pytest.mark.dist
def test_attention_costs_four_exchanges_a_layer_each_way_and_none_where_it_is_kept() -> None:
    layers = MODELS["reference"]["model.n_layers"]
    per_layer = {"none": 8, "full": 12, "selective": 12, "selective_op": 8}
    for counts in run_ranks(2, "tests.parallel.context_runs:exchanges", policies=list(per_layer)):
        assert counts == {policy: n * layers for policy, n in per_layer.items()}


@pytest.mark.dist
def test_the_bytes_of_an_exchange_are_those_of_the_docs() -> None:
    """16 rows of 24 tokens, and 4 heads of width 8 in two layers: docs/long.md has the formulas."""
    size, rows, length, width = 4, 16, 24, 8
    heads = {"reference": (4, 4), "llama": (4, 2), "one key head": (4, 1)}
    for found in run_ranks(size, "tests.parallel.context_runs:exchanged", models=list(heads)):
        for model, (n_query, n_key) in heads.items():
            query, key = (rows * length // size * width * n for n in (n_query, math.lcm(n_key, size)))
            assert sorted(found[model]) == sorted(2 * 2 * [query, query, key, key]), model


@pytest.mark.dist
def test_traces_count_the_copies_that_are_sent_and_received_as_communication() -> None:
    assert run_ranks(2, "tests.parallel.context_runs:buffers") == [4 * 2**14] * 2


@pytest.mark.dist
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_kernels_get_every_position_of_a_ranks_heads(cp: int) -> None:
    run_ranks(cp, "tests.parallel.context_runs:arguments_of_kernels")


@pytest.mark.dist
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_document_sees_another_across_a_cut(cp: int) -> None:
    *others, same = run_ranks(cp, "tests.parallel.context_runs:leaks", packed=True)[0]
    assert others == [0.0, 0.0, 0.0], "a token of one document moved the loss of another"
    assert same > 1e-4
    *others, _ = run_ranks(cp, "tests.parallel.context_runs:leaks", packed=False)[0]
    assert others[0] == 0 < min(others[1:]), "without bounds later documents see it: the probe finds leaks"


@pytest.mark.slow
@pytest.mark.dist
def test_evaluation_and_samples_are_those_of_whole_sequences() -> None:
    prompts = {"train.sample_prompts": ["def", "import x return"], "train.sample_tokens": 4}
    case = {**settings("llama", "none", "adamw"), **prompts}
    want = alone(case)
    found = run_ranks(2, RUNS, cases={"fsdp": {**case, "parallel.strategy": "fsdp", "parallel.cp": 2}})[0]["fsdp"]
    assert want.texts and found.texts == want.texts
    assert_same(found, want, "fsdp")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.deepspeed
def test_a_run_goes_on_with_other_parts_of_its_sequences(tmp_path: Path) -> None:
    context_runs.documents(tmp_path, pairs=False)
    legs = [(2, "ddp", 1), (4, "fsdp", 2), (4, "zero3", 4), (1, "single", 1)]
    runs: list[Any] = []
    for number, (world, engine, cp) in enumerate(legs, start=1):
        case = {"parallel.strategy": engine, "parallel.cp": cp, "train.max_steps": 2 * number}
        runs.append(run_ranks(world, "tests.parallel.context_runs:leg", settings=case, folder=str(tmp_path))[0])
    for (_, _, saved), (_, loaded, _) in itertools.pairwise(runs):
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    (tmp_path / "run").rename(tmp_path / "split")
    case = {"parallel.strategy": "single", "train.max_steps": 8}
    want, *_ = run_ranks(1, "tests.parallel.context_runs:leg", settings=case, folder=str(tmp_path))[0]
    assert_curve([step for steps, *_ in runs for step in steps], want, "resumed")


@pytest.mark.dist
def test_neighbours_on_two_nodes_are_refused_unless_asked_for() -> None:
    words = "parallel.cp=2: ranks 0 and 1 share sequences, but are on nodes 0 and 1"
    assert run_ranks(2, "tests.parallel.context_runs:scattered", across=False) == [words] * 2
    assert run_ranks(2, "tests.parallel.context_runs:scattered", across=True) == ["joined 1"] * 2


@pytest.mark.parametrize(
    ("given", "world", "node", "cause"),
    [
        ({"parallel.cp": 2, "train.seq_len": 33}, 2, 2, "train.seq_len=33"),
        ({"parallel.cp": 2, "task.name": "hf_masked_lm"}, 2, 2, "parallel.cp=2 with task.name=hf_masked_lm"),
        ({"parallel.cp": 2, "task.name": "image_classification"}, 2, 2, "only causal language models"),
        ({"parallel.cp": 8, **context_runs.hf("llama")}, 8, 8, "num_attention_heads=4"),
        ({"parallel.cp": 2, "task.name": "hf_causal_lm", "model.hf": {"model_type": "mamba"}}, 2, 2, "Mamba"),
        ({"parallel.cp": 2, **context_runs.hf("jamba")}, 2, 2, "JambaForCausalLM"),
        ({"parallel.cp": 2, "task.name": "hf_causal_lm", "model.hf": {"model_type": "t5"}}, 2, 2, "model_type=t5"),
        ({"parallel.cp": 2, **context_runs.hf("llama", attn_implementation="flex_attention")}, 2, 2, "_implementation"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(given: dict[str, Any], world: int, node: int, cause: str) -> None:
    def prepare() -> None:
        config = load_config(None, {"train.seq_len": 32, "model.loss_chunk_size": 0, **given}).config
        capability.check(config, device="cpu", world_size=world, local_world_size=node)
        load_task(config)

    with pytest.raises(ConfigError) as caught:
        prepare()
    assert cause in str(caught.value), caught.value
