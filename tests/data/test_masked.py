from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shardkit.config.schema import RunConfig
from shardkit.data.windows import MaskedWindows, flatten_targets
from shardkit.errors import ConfigError
from shardkit.tasks.hf_masked_lm import HFMaskedLM


def task(tmp_path: Path, **data: object) -> HFMaskedLM:
    path = tmp_path / "tokens.bin"
    np.tile(np.arange(1, 201, dtype="<u2"), 40).tofile(path)
    sections = {
        "task": {"name": "hf_masked_lm"},
        "model": {"preset": "bert-debug"},
        "train": {"seq_len": 64, "seed": 3},
        "data": {"path": str(path), "cache_dir": str(tmp_path / "cache"), **data},
    }
    return HFMaskedLM(RunConfig.model_validate(sections))


def masked(tmp_path: Path, **data: object) -> MaskedWindows:
    return task(tmp_path, **data).dataset("train")


def test_shares_are_those_asked_for(tmp_path: Path) -> None:
    samples = masked(tmp_path)
    tokens, targets = (torch.stack([samples[i][key] for i in range(len(samples))]) for key in ("tokens", "targets"))
    plain = torch.stack([samples.windows[i]["tokens"] for i in range(len(samples))])
    chosen = targets != -100
    n = int(chosen.sum())
    assert chosen.float().mean() == pytest.approx(0.15, abs=0.02)
    assert torch.equal(targets[chosen], plain[chosen])
    assert torch.equal(tokens[~chosen], plain[~chosen])
    assert int((tokens[chosen] == 256).sum()) / n == pytest.approx(0.8, abs=0.05)
    assert int((tokens[chosen] == plain[chosen]).sum()) / n == pytest.approx(0.1, abs=0.04)


def test_a_sample_depends_on_seed_and_index_alone(tmp_path: Path) -> None:
    first, again = masked(tmp_path), masked(tmp_path)
    again[3]  # the order of reading does not matter
    assert torch.equal(first[9]["tokens"], again[9]["tokens"])
    assert not torch.equal(first[9]["targets"] == -100, first[8]["targets"] == -100)
    again.seed = 4
    assert not torch.equal(first[9]["targets"], again[9]["targets"])


def test_filling_is_never_a_target(tmp_path: Path) -> None:
    samples = masked(tmp_path, mask_fraction=0.9)
    last = len(samples) - 1
    real = int((samples.windows[last]["targets"] != -100).sum())
    assert 0 < real < 64
    assert bool((samples[last]["targets"][real:] == -100).all())


def test_a_micro_batch_lists_what_is_to_be_predicted(tmp_path: Path) -> None:
    samples = masked(tmp_path)
    batch = flatten_targets([samples[0], samples[1]])
    assert batch["tokens"].shape == (2, 64)
    whole = torch.cat([samples[0]["targets"], samples[1]["targets"]])
    assert torch.equal(whole[batch["positions"]], batch["targets"])
    assert len(batch["targets"]) == int((whole != -100).sum())


def test_a_mask_token_that_the_data_uses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.mask_token=7 occurs in"):
        task(tmp_path, mask_token=7).dataset("train")
    with pytest.raises(ConfigError, match=r"data.mask_token=300, but the model's vocabulary has 257"):
        task(tmp_path, mask_token=300)
