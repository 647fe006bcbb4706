"""Types of weights, gradients and moments, and dynamic loss scaling, under every strategy."""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

from shardkit.config.load import load_config
from shardkit.config.schema import PrecisionConfig
from shardkit.errors import ConfigError
from shardkit.parallel.precision import cast_parameters, convert_to_fp8, set_matmul_precision
from shardkit.run.checks import check_masters
from shardkit.run.job import start
from tests.ranks import run_ranks

ALL = ["ddp", "fsdp", "zero1", "zero2", "zero3"]
SPREAD = 0.02
"""How far bf16 losses of this job may lie from fp32's: two single bf16 runs of different order differ by 0.006."""


@pytest.fixture(scope="module")
def fp32() -> list[tuple[float, float]]:
    return run_ranks(1, "tests.strategies.cases:curves", names=["single"], steps=4)[0]["single"]


@pytest.mark.slow
def test_masters_and_moments_are_fp32_unless_asked() -> None:
    mixed = run_ranks(2, "tests.strategies.precision_cases:types", names=ALL, extra={"precision.mode": "bf16"})[0]
    for name, found in mixed.items():
        masters = found["master_params" if name.startswith("zero") else "params"]
        assert set(masters) == {"float32"}, f"{name}: {found}"
        assert set(found["optimizer"]) == {"float32"}, name
        if name.startswith("zero"):
            assert set(found["params"]) == {"bfloat16"}, name
    pure = run_ranks(2, "tests.strategies.precision_cases:types", names=ALL, extra={"precision.mode": "pure_bf16"})[0]
    for name, found in pure.items():
        moments = {dtype: size for dtype, size in found["optimizer"].items() if size > 1000}  # step counts are fp32
        assert set(moments) == set(found["params"]) == {"bfloat16"}, f"{name}: {found}"


def test_gradients_travel_in_the_type_asked_for(fp32: list[tuple[float, float]]) -> None:
    extra = {"precision.reduce_dtype": "bf16"}
    results = run_ranks(2, "tests.strategies.cases:curves", names=["ddp", "fsdp", "zero2"], steps=4, extra=extra)
    for name, curve in results[0].items():
        assert curve[0][1] != pytest.approx(fp32[0][1], rel=1e-7), f"{name} reduced in fp32"
        for (loss, norm), (want, want_norm) in zip(curve, fp32, strict=True):
            assert abs(loss - want) <= SPREAD, name
            assert norm == pytest.approx(want_norm, rel=0.02)


@pytest.mark.parametrize("world", [1, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(world: int, fp32: list[tuple[float, float]]) -> None:
    names = ["single"] if world == 1 else ["ddp", "fsdp"]
    for result in run_ranks(world, "tests.strategies.precision_cases:scaled", names=names, overflow_at=2):
        for name, (curve, scales, weights, scalars) in result.items():
            assert not math.isfinite(curve[2][1]), f"{name}: the norm says that the step overflowed"
            assert weights[2] == weights[1], f"{name}: the step was not skipped"
            assert weights[3] != weights[2]
            assert scales == [1024, 1024, 512, 512, 512], name
            assert scalars["engine.loss_scaler.cur_scale"] == 512
            for step in (0, 1):  # scaling and unscaling cancel out: powers of two
                assert curve[step] == pytest.approx(fp32[step], rel=1e-5), name


def test_the_scale_grows_after_a_window_without_overflow() -> None:
    result = run_ranks(1, "tests.strategies.precision_cases:scaled", names=["single"], overflow_at=99, steps=7)[0]
    assert result["single"][1] == [1024, 1024, 2048, 2048, 2048, 4096, 4096]


def test_a_model_built_in_another_type_is_refused() -> None:
    with (
        start(None, {"parallel.strategy": "single", "precision.mode": "bf16", "run.device": "cpu"}) as job,
        pytest.raises(ConfigError, match=r"updates float32 weights.*bfloat16") as error,
    ):
        job.wrap(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16())
    assert "pure_bf16" in error.value.fix


def test_frozen_parameters_may_have_any_type() -> None:
    with start(None, {"parallel.strategy": "single", "precision.mode": "bf16", "run.device": "cpu"}) as job:
        job.wrap(lambda: nn.Sequential(nn.Linear(4, 4).bfloat16().requires_grad_(False), nn.Linear(4, 4)))
        check_masters(job.config.precision, job.strategy)


def test_pure_bf16_casts_parameters_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.append(model[0])
    cast_parameters(model, PrecisionConfig(mode="pure_bf16"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model[1].running_mean.dtype == torch.float32
    assert model[2].weight is model[0].weight


def two_layers(width: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(up=nn.Linear(width, width), relu=nn.ReLU(), head=nn.Linear(width, width)))


def test_fp8_computes_linear_layers_but_the_head_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchao.float8 as float8

    emulated = partial(float8.convert_to_float8_training, config=float8.Float8LinearConfig(emulate=True))
    monkeypatch.setattr(float8, "convert_to_float8_training", emulated)  # no CPU has the products
    torch.manual_seed(0)
    model, x = two_layers(32), torch.randn(16, 32)
    want = model(x)
    convert_to_fp8(model, PrecisionConfig(mode="fp8"))
    assert type(model.up).__name__ == "Float8Linear"
    assert type(model.head) is nn.Linear
    error = ((model(x) - want).norm() / want.norm()).item()
    assert 1e-4 < error < 0.1, "eight bits give another result, but not much"


def test_fp8_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        convert_to_fp8(two_layers(20), PrecisionConfig(mode="fp8"))


def test_fp8_without_torchao_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match="needs torchao") as error:
        convert_to_fp8(two_layers(32), PrecisionConfig(mode="fp8"))
    assert "pip install" in error.value.fix


def test_fp32_is_fp32_for_products_and_convolutions_unless_tf32_is_asked_for() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for mode, precision in (("tf32", "high"), ("fp32", "highest")):
            set_matmul_precision(PrecisionConfig(mode=mode))
            assert torch.get_float32_matmul_precision() == precision
            assert torch.backends.cudnn.allow_tf32 is (mode == "tf32")
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_fp16_gradients_on_the_cpu_are_refused() -> None:
    """torch copies the loss scale to where they are without waiting for it."""
    settings = {"parallel.strategy": "fsdp", "parallel.offload_param": "cpu", "precision.mode": "fp16"}
    with pytest.raises(ConfigError, match=r"precision\.mode=fp16 with parallel\.offload_param=cpu") as error:
        load_config(None, settings)
    assert "bf16" in error.value.fix
