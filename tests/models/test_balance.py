"""The routers' load-balancing loss is transformers' own, and is refused where a model has another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit.config.load import load_config
from shardkit.data.windows import split_rows
from shardkit.errors import ConfigError
from shardkit.tasks.load import load_task
from tests.parallel.expert_runs import BALANCED, batch, hf

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")


def task_of(family: str, **settings: Any) -> Any:
    return load_task(
        load_config(None, {**hf(family, **BALANCED, vocab_size=256), "train.seq_len": 16, **settings}).config
    )


@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_that_of_transformers_on_unpadded_tokens(family: str, chunk: int) -> None:
    rows = batch(0)
    task = task_of(family, **{"model.loss_chunk_size": chunk})
    torch.manual_seed(0)
    model: Any = task.hf._class(task.hf.config)
    labels = nn.functional.pad(rows["targets"], (1, 0), value=-100)[:, :-1]  # transformers shifts them by itself
    expected = model(input_ids=rows["tokens"], attention_mask=rows["real"].long(), labels=labels)
    assert expected.aux_loss > 1
    alone = nn.functional.cross_entropy(expected.logits.flatten(0, 1), rows["targets"].flatten(), reduction="sum")
    n_targets = task.n_targets(rows)
    weights = model.state_dict()

    trained = task.build_model().train()
    trained.load_state_dict(weights)
    total = task.loss(trained, rows)
    both = alone + n_targets * 0.1 * expected.aux_loss
    assert torch.allclose(total, both, rtol=1e-6)
    total.backward()
    both.backward()
    for (name, param), (_, other) in zip(trained.named_parameters(), model.named_parameters(), strict=True):
        assert torch.allclose(param.grad, other.grad, atol=1e-4 * float(other.grad.abs().max())), name
    assert torch.allclose(task.loss(trained.eval(), rows), alone, rtol=1e-6), "an evaluation's has none"


@pytest.mark.parametrize(
    ("family", "settings", "cause"),
    [
        ("mixtral", {"compile.enabled": True}, "compile.enabled=true with model.hf.output_router_logits=true"),
        ("doge", {}, "the load-balancing loss of DogeForCausalLM cannot be summed over ranks"),
        ("jetmoe", {}, "it has no router_aux_loss_coef"),
    ],
)
def test_another_loss_is_refused(family: str, settings: dict[str, Any], cause: str) -> None:
    keys = hf(family)["model.hf"] if family == "mixtral" else {"model_type": family, "num_hidden_layers": 1}
    given = {"task.name": "hf_causal_lm", "model.hf": {**keys, "output_router_logits": True}, "train.seq_len": 16}
    with pytest.raises(ConfigError) as caught:
        load_task(load_config(None, {**given, **settings}).config)
    assert cause in caught.value.cause


def test_padding_is_marked_where_rows_are_padded_or_stand_in() -> None:
    task = task_of("mixtral")
    window = torch.arange(16)
    samples = [{"tokens": window, "targets": window.where(window < n, -100)} for n in (16, 5)]
    real = task.collate(samples)["real"]
    assert real.sum(1).tolist() == [16, 5]
    assert not task.filler(task.collate(samples))["real"].any()
    parts = [split_rows(task.collate(samples), rank, 3)["real"] for rank in range(3)]
    assert [part.shape for part in parts] == [(2, 6)] * 3
    assert sum(int(part.sum()) for part in parts) == 21

    packed = task_of("mixtral", **{"data.packing": "packed", "train.micro_batch_size": 2})
    samples = [{"tokens": torch.ones(n), "targets": torch.ones(n), "lengths": [n]} for n in (16, 9)]
    assert packed.collate(samples)["real"].sum(1).tolist() == [16, 9]
    free = task_of("mixtral", **{"data.packing": "padding_free"})
    assert free.collate(samples)["real"].shape == (1, 25)
    assert free.collate(samples)["real"].all()
