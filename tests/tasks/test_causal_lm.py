from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardkit.config.schema import RunConfig
from shardkit.errors import ConfigError, DataError
from shardkit.tasks.causal_lm import CausalLM


def config(tmp_path: Path, **sections: dict[str, Any]) -> RunConfig:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    base: dict[str, Any] = {
        "model": {"d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 32},
        "train": {"seq_len": 32},
        "data": {"path": str(text), "cache_dir": str(tmp_path / "cache")},
    }
    return RunConfig.model_validate({key: {**base.get(key, {}), **sections.get(key, {})} for key in base})


def built(task: CausalLM) -> torch.nn.Module:
    model = task.build_model()
    for i, (fqn, parameter) in enumerate(model.named_parameters()):
        task.init_parameter(fqn, parameter.data, torch.Generator().manual_seed(i))
    return model


def batch(task: CausalLM, indices: list[int]) -> dict[str, torch.Tensor]:
    dataset = task.dataset("train")
    return torch.utils.data.default_collate([dataset[i] for i in indices])


def test_loss_is_a_sum_over_the_targets_that_n_targets_counts(tmp_path: Path) -> None:
    task = CausalLM(config(tmp_path))
    model = built(task)
    last = len(task.dataset("train")) - 1
    parts = [batch(task, [i]) for i in (0, last)]
    assert task.n_targets(parts[1]) < task.n_targets(parts[0]) == 32
    both = batch(task, [0, last])
    assert task.n_targets(both) == sum(map(task.n_targets, parts))
    separate = task.loss(model, parts[0]) + task.loss(model, parts[1])
    torch.testing.assert_close(task.loss(model, both), separate)
    assert task.loss(model, both).item() / task.n_targets(both) == pytest.approx(np.log(256), rel=0.02)


def test_token_beyond_the_vocabulary_names_both_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size=100, but .* holds the token 122") as caught:
        CausalLM(config(tmp_path, model={"vocab_size": 100})).dataset("train")
    assert "at least 123" in caught.value.fix


def test_data_shorter_than_a_sequence(tmp_path: Path) -> None:
    run = config(tmp_path, model={"max_seq_len": 4096}, train={"seq_len": 4096})
    with pytest.raises(DataError, match=r"training split of .* fewer than the 4097"):
        CausalLM(run).dataset("train")
    assert len(CausalLM(run).dataset("val")) == 1
