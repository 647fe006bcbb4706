from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.config import capability
from shardkit.config.capability import CAPABILITIES, check, mesh_shape
from shardkit.config.load import load_config, resolve_batch
from shardkit.config.schema import STRATEGIES, RunConfig, StrategyName
from shardkit.errors import ConfigError
from shardkit.models.transformer import Block, Transformer, init_parameter
from shardkit.parallel.compat import graph_breaks
from shardkit.run.job import start
from tests import generated
from tests.ranks import run_ranks
from tests.strategies import cases

REPO = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPO / "configs").glob("*.yaml"))

FEATURES: dict[str, dict[str, Any]] = {
    "unused_params": {}, "compile": {"compile.enabled": True},
    "compile_model": {"compile.enabled": True, "compile.scope": "model"},
}  # fmt: skip
"""Others are trained by tests/strategies/test_parity.py and tests/activation/test_strategies.py."""

BY_KEYS = [pytest.param(entry, id=f"{entry.dotted}-{entry.name}") for entry in capability.DECLARED]


def run_check(settings: dict[str, Any], world: int = 4, local: int | None = None, device: Any = "cuda") -> None:
    config = load_config(overrides=settings).config
    check(config, device=device, world_size=world, local_world_size=local or world)


def refused(settings: dict[str, Any], world: int = 4, local: int | None = None, device: Any = "cuda") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        run_check(settings, world, local, device)
    assert caught.value.fix
    assert "\n" not in caught.value.cause + caught.value.fix
    return caught.value


def ranks_of(strategy: str) -> int:
    return 1 if strategy == "single" else 4


CPU = {"parallel.offload_optimizer": "cpu"}
HALF = {"precision.mode": "pure_bf16"}
PARAM = {"parallel.offload_param": "cpu"}
TOGETHER: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("zero3", {**CPU, "parallel.offload_ratio": 0.5}, {"optim.name": "sgd"}, "optim.name=sgd", ""),
    ("zero2", CPU | HALF, {"optim.name": "sgd"}, "optim.name=sgd", ""),
    ("zero3", CPU | HALF, {"optim.name": "sgd"}, "optim.name=sgd", ""),
    ("fsdp", CPU | PARAM, {"parallel.offload_param": "none"}, "offload_param=cpu too", ""),
    ("hsdp", CPU | PARAM, {"parallel.offload_param": "none"}, "offload_param=cpu too", ""),
    ("fsdp", {"parallel.dp_shard": 4}, {"parallel.dp_shard": 2}, "parallel.dp_shard=2", "hsdp"),
    ("ddp", {"parallel.dp_replicate": 4}, {"parallel.dp_shard": 2}, "parallel.dp_shard=2", ""),
]
"""Strategy, settings that work with it on four ranks, what makes them fail, the cause and the fix."""


@pytest.mark.parametrize(("strategy", "settings", "change", "cause", "fix"), TOGETHER)
def test_settings_that_a_strategy_has_together_only(
    strategy: str, settings: dict[str, Any], change: dict[str, Any], cause: str, fix: str
) -> None:
    run_check({"parallel.strategy": strategy, **settings})
    error = refused({"parallel.strategy": strategy, **settings, **change})
    assert cause in error.cause and fix in error.fix


def test_the_table_has_each_row_once() -> None:
    assert get_args(StrategyName) == STRATEGIES
    beyond_keys = {"data_parallel", "mesh", "frozen_params", "unused_params", "buffers"}
    assert {entry.name for entry in capability.DECLARED} | beyond_keys == set(CAPABILITIES)
    assert not {entry.name for entry in capability.DECLARED} & beyond_keys
    titles = [row.words for row in CAPABILITIES.values()]
    assert len(set(titles)) == len(titles)
    for row in CAPABILITIES.values():
        assert all(reason and "\n" not in reason for reason in row.reasons.values())


NEEDS: dict[str, dict[str, Any]] = {
    "resize_embeddings": {"task.name": "hf_causal_lm"},
    "adapter": {"task.name": "hf_causal_lm"},
    "quantize": {"task.name": "hf_causal_lm", "adapter.type": "lora"},
    "in_backward": {"train.max_norm": None},
    "nvme": {"parallel.nvme_path": "/scratch"},
    "offload_ratio": {"parallel.offload_optimizer": "cpu"},
    "autocast": {"precision.mode": "bf16"},
    "compile_model": {"compile.enabled": True},
}
"""Row → the settings that are valid only together with the key's."""


def asking_for(entry: capability.Declared) -> dict[str, Any]:
    """Settings that ask for a capability, the key's own first."""
    needs = NEEDS.get(entry.name, {})
    for choice in (*entry.capability.choices, 2, 0.5, "bf16", "full", {"wall_clock_breakdown": True}, {"bits": 4}):
        settings = {entry.dotted: choice, **needs}
        with contextlib.suppress(ConfigError):
            if entry.asks(load_config(overrides=settings).config):
                return settings
    raise AssertionError(f"no value here asks for {entry.dotted}: add one")


@pytest.mark.parametrize("entry", BY_KEYS)
def test_check_refuses_exactly_what_the_table_refuses(entry: capability.Declared) -> None:
    example = asking_for(entry)
    key, setting = next(iter(example.items()))
    assert not entry.asks(RunConfig())
    for strategy in STRATEGIES:
        settings = {"parallel.strategy": strategy, **example}
        assert entry.asks(load_config(overrides=settings).config)
        if strategy in entry.capability.works:
            run_check(settings, ranks_of(strategy))
            continue
        error = refused(settings, ranks_of(strategy))
        assert key in error.cause and strategy in error.cause
        assert isinstance(setting, dict) or str(setting).lower() in error.cause
        assert entry.capability.reasons[strategy] in error.cause
        assert "{" not in error.fix and ("{key}" not in entry.capability.fix or key in error.fix)


@pytest.mark.parametrize(
    ("key", "value", "library", "fix"),
    [
        ("parallel.strategy", "zero2", "deepspeed", "pip install deepspeed, or set parallel.strategy=fsdp"),
        ("logging.wandb_project", "project", "wandb", "pip install"),
    ],
)
def test_a_library_that_is_not_installed_is_named(
    key: str, value: str, library: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = refused({key: value})
    assert f"needs {library}, which is not installed" in error.cause and fix in error.fix
    run_check({"parallel.strategy": "fsdp"})


@pytest.mark.parametrize(
    "settings",
    [
        {"compile.mode": "max-autotune"},
        {"activation.policy": "full", "activation.every_k": 3},
        {"activation.policy": "full", "activation.budget": 0.2},
        {"activation.policy": "full", "activation.offload_min_bytes": 1},
        {"activation.block_classes": ["Block"]},
        {"data.prefetch": 4},
        {"data.val_path": "x", "data.val_fraction": 0.1},
        {"train.eval_samples": 0, "data.val_path": "x"},
        {"train.eval_samples": 0, "train.eval_every": 5},
        {"optim.schedule": "constant", "optim.min_lr_ratio": 0.5},
        {"parallel.strategy": "zero2", **CPU, "optim.implementation": "foreach"},
        {"parallel.strategy": "zero1", "parallel.no_sync": False},
        {"data.mask_token": 7},
        {"data.augment": False},
        {"model.hf": {"model_type": "gpt2"}},
        {"task.name": "hf_causal_lm", "model.n_layers": 8},
        {"task.name": "super_resolution", "model.loss_chunk_size": 8},
    ],
)
def test_a_setting_that_would_be_ignored_is_an_error(settings: dict[str, Any]) -> None:
    """The last one; without it the others work."""
    *others, key = settings
    error = refused(settings)
    assert key in error.cause and "would be ignored" in error.cause
    assert error.fix == f"remove {key}"
    run_check({name: settings[name] for name in others})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resolved_config_passes_though_it_spells_out_every_key(strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(load_config(overrides={"parallel.strategy": strategy}).render())
    size = ranks_of(strategy)
    config = load_config(path).config
    check(config, device="cpu", world_size=size, local_world_size=size)
    assert config == load_config(overrides={"parallel.strategy": strategy}).config


@pytest.mark.parametrize(
    ("parallel", "world", "local", "shape"),
    [
        ({}, 16, 8, (2, 8)),
        ({}, 4, 4, (1, 4)),
        ({"dp_replicate": 4}, 16, 8, (4, 4)),
        ({"dp_shard": 2}, 16, 8, (8, 2)),
        ({"dp_replicate": 2, "dp_shard": 2}, 4, 4, (2, 2)),
    ],
)
def test_hsdp_mesh(parallel: dict[str, int], world: int, local: int, shape: tuple[int, int]) -> None:
    keys = {f"parallel.{key}": value for key, value in parallel.items()}
    config = load_config(overrides={"parallel.strategy": "hsdp", **keys}).config
    assert mesh_shape(config, world, local) == shape
    check(config, device="cuda", world_size=world, local_world_size=local)


@pytest.mark.parametrize(
    ("parallel", "world", "local", "cause"),
    [
        ({"dp_replicate": 3}, 4, 4, "parallel.dp_replicate=3 does not divide the 4 ranks"),
        ({"dp_shard": 8}, 4, 4, "parallel.dp_shard=8 does not divide the 4 ranks"),
        ({"dp_replicate": 2, "dp_shard": 4}, 4, 4, "parallel.dp_replicate=2 × parallel.dp_shard=4 = 8, but"),
        ({}, 6, 4, "the 4 ranks of one node, which do not divide the 6 ranks"),
    ],
)
def test_a_mesh_that_does_not_fit(parallel: dict[str, int], world: int, local: int, cause: str) -> None:
    error = refused({"parallel.strategy": "hsdp"} | {f"parallel.{k}": v for k, v in parallel.items()}, world, local)
    assert cause in error.cause
    assert f"1 × {world}" in error.fix


def test_the_page_has_the_current_table() -> None:
    assert generated.is_current("capability"), "run: python -m tests.generated"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_can_run(path: Path, device: Any) -> None:
    sizes = [1] if path.stem == "single_gpu_offload" else [2, 8]
    for world in sizes:
        reference = load_config(path).config.task.name == "causal_lm"
        for overrides in ([], ["model.preset=debug", "train.seq_len=128"])[: 1 + reference]:
            config = load_config(path, overrides).config
            check(config, device=device, world_size=world, local_world_size=world)
            assert resolve_batch(config, world) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_every_mark_trains_like_one_process(feature: str) -> None:
    works = [name for name in CAPABILITIES[feature].works if name != "single"]
    target = "tests.config.test_capability:losses"
    want = run_ranks(1, target, strategies=["single"], feature=feature, timeout=300)[0]["single"]
    assert want[0] - want[-1] > 0.1
    for rank in run_ranks(2, target, strategies=works, feature=feature, timeout=300):
        for name, curve in rank.items():
            assert curve == pytest.approx(want, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["compile", "compile_model"])
def test_no_strategy_breaks_a_graph_or_compiles_hooks(feature: str) -> None:
    """ZeRO-3 gathers a block's weights in hooks, ZeRO's engine keeps time in the model's; they stay outside."""
    compiled = [name for name in CAPABILITIES[feature].works if name != "single"]
    target = "tests.config.test_capability:broken_graphs"
    for rank in run_ranks(2, target, strategies=compiled, feature=feature, timeout=300):
        assert rank == {name: {} for name in compiled}


def test_unused_parameters_are_named_where_the_table_refuses_them() -> None:
    refused_by = [*CAPABILITIES["unused_params"].reasons]
    assert refused_by == ["zero1", "zero2", "zero3"]
    for messages in run_ranks(
        2, "tests.config.test_capability:refusals", strategies=refused_by, feature="unused_params"
    ):
        for name, (cause, fix) in messages.items():
            assert cause.startswith("2 of ") and "no gradient in the first step (spare.weight, spare.bias)" in cause
            assert f"parallel.strategy={name} cannot train: {CAPABILITIES['unused_params'].reasons[name]}" in cause
            assert "freeze them" in fix


STEPS = 4


def losses(strategies: list[str], feature: str) -> dict[str, list[float]]:
    """Loss of each step, every strategy in turn, the same global batches."""
    return {name: _train(name, feature) for name in strategies}


def broken_graphs(strategies: list[str], feature: str) -> dict[str, dict[str, int]]:
    """What is wrong with the compiled code of each strategy: graph breaks and recompilations by reason, and
    functions that are no module's forward."""
    from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

    found = {}
    for name in strategies:
        torch.compiler.reset()
        counters.clear()
        clear_compilation_metrics()
        _train(name, feature)
        made = get_compilation_metrics()
        again = Counter(str(one.recompile_reason) for one in made if one.recompile_reason)
        others = Counter(one.co_name for one in made if one.co_name not in (None, "forward"))
        found[name] = graph_breaks() | dict(again) | dict(others)
    return found


def refusals(strategies: list[str], feature: str) -> dict[str, tuple[str, str]]:
    """The error that ends a run under each strategy."""
    out = {}
    for name in strategies:
        try:
            _train(name, feature)
        except ConfigError as error:
            out[name] = error.cause, error.fix
        gc.collect()
    return out


def _build(feature: str) -> nn.Module:
    # In whole logits: on CPUs the chunks of the loss depend on the data, which breaks a graph.
    model = Transformer(cases.MODEL.model_copy(update={"loss_chunk_size": 0}))
    if feature == "unused_params":
        model.spare = nn.Linear(4, 4)
    return model


def _init_parameter(fqn: str, full: torch.Tensor, generator: torch.Generator) -> None:
    init_parameter(cases.MODEL, fqn.replace("spare.weight", "head.weight"), full, generator)


def _train(strategy: str, feature: str) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    with start(None, cases.overrides(strategy, world, "sgd_unclipped", **FEATURES[feature])) as job:
        job.wrap(partial(_build, feature), init_parameter=_init_parameter, block_classes=(Block,))
        steps = [job.step(cases.micro_batches(i, rank, world), cases.loss_fn, cases.n_targets) for i in range(STEPS)]
    gc.collect()
    return [step.loss for step in steps]
