"""What a run exports is the run's model: in transformers, in a plain torch module, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardkit.checkpoint.formats.adapter import SavedAdapter, write_peft
from shardkit.checkpoint.formats.convert import convert
from shardkit.checkpoint.formats.tensor_source import Source
from shardkit.checkpoint.native.reader import CheckpointReader, TensorSpec
from shardkit.config.load import load_config
from shardkit.config.schema import AdapterConfig
from shardkit.errors import CheckpointError
from shardkit.models.transformer import Transformer
from shardkit.tasks.load import load_task

NO_TOKENIZER = "the run has no tokenizer (data are bytes or token ids), so none is written"


def newest(run: Path) -> Path:
    return run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()


def model_of(run: Path, kind: str = "model") -> nn.Module:
    """The run's model with the weights of its newest checkpoint, put there without the converter."""
    task = load_task(load_config(run / "config.yaml").config)
    model = task.build_model()
    with CheckpointReader(newest(run)) as checkpoint, torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(checkpoint.read(f"{kind}.{name}").view(param.shape))
    return model.eval()


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_from_pretrained_gives_the_logits_of_the_run(case: str, runs_root: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    done = convert(runs_root / case, "safetensors", tmp_path / "hf", max_shard_size="100KB")
    assert done.notes == [NO_TOKENIZER]
    shards = sorted(p.name for p in done.files if p.suffix == ".safetensors")
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors" and len(shards) > 2
    assert all(p.stat().st_size < 110_000 for p in done.files)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.use_cache and model.dtype == torch.float32
    tokens = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens, use_cache=False).logits, model_of(runs_root / case)(tokens))


def test_a_state_dict_loads_into_a_plain_model_with_the_loss_of_the_run(runs_root: Path, tmp_path: Path) -> None:
    """The run evaluates its moving average: the exported one has the validation loss that the run recorded."""
    run = runs_root / "native"
    convert(run, "torch", tmp_path / "ema", average=True)
    convert(run, "torch", tmp_path / "plain")
    config = load_config(run / "config.yaml").config
    samples = load_task(config).dataset("val")
    losses = {}
    for kind in ("ema", "plain"):
        model = Transformer(config.model)
        state = torch.load(tmp_path / kind / "model.pt", weights_only=True)
        model.load_state_dict(state, strict=True)
        assert state["head.weight"].data_ptr() == state["tok_emb.weight"].data_ptr()
        total, count = torch.zeros(()), 0
        with torch.no_grad():
            for index in range(len(samples)):
                tokens, targets = (samples[index][key].unsqueeze(0) for key in ("tokens", "targets"))
                total += model(tokens, targets)
                count += int((targets != -100).sum())
        losses[kind] = float(total) / count
    recorded = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
    assert losses["ema"] == pytest.approx(recorded, abs=1e-5)
    assert abs(losses["plain"] - recorded) > 1e-4


def test_which_checkpoint_of_a_run(runs_root: Path, tmp_path: Path) -> None:
    for step in ("1", "latest", "best"):
        convert(runs_root / "llama", "torch", tmp_path / step, step=step)
    first, latest, best = (torch.load(tmp_path / s / "model.pt", weights_only=True) for s in ("1", "latest", "best"))
    assert not torch.equal(first["lm_head.weight"], latest["lm_head.weight"])
    assert torch.equal(best["lm_head.weight"], latest["lm_head.weight"]), "evaluated at the end only"
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        convert(runs_root / "llama", "torch", tmp_path / "7", step="7")
    # A checkpoint folder on its own; moved away from its run it has no config, and says so.
    done = convert(newest(runs_root / "llama"), "safetensors", tmp_path / "alone")
    assert (tmp_path / "alone" / "config.json").exists() and done.notes == [NO_TOKENIZER]
    moved = shutil.copytree(newest(runs_root / "llama"), tmp_path / "moved")
    done = convert(moved, "safetensors", tmp_path / "stranger")
    assert not (tmp_path / "stranger" / "config.json").exists()
    assert len(done.notes) == 1 and "config.json" in done.notes[0]


def test_a_model_that_cannot_be_built_is_exported_without_its_config(runs_root: Path, tmp_path: Path) -> None:
    run, step = tmp_path / "run", newest(runs_root / "llama")
    shutil.copytree(step, run / "checkpoints" / step.name)
    (run / "config.yaml").write_text("task: {factory: 'no_such_module:Task'}\n")
    done = convert(run, "safetensors", tmp_path / "out")
    assert len(done.notes) == 1 and "no_such_module" in done.notes[0]
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_only_a_named_runs_config_is_code(runs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    hostile = "task: {factory: 'planted:Task'}\n"
    step = newest(runs_root / "llama")
    beside, inside, run = tmp_path / "beside", tmp_path / "inside" / "checkpoints", tmp_path / "run"
    for checkpoints in (beside, inside, run / "checkpoints"):
        shutil.copytree(step, checkpoints / step.name)
    for config in (beside, inside, run, tmp_path):  # beside a bare step, in checkpoints/, of a run, above a bare step
        (config / "config.yaml").write_text(hostile)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / step.name).symlink_to(run / "checkpoints" / step.name)
    for number, checkpoints in enumerate([beside, inside, run / "checkpoints", tmp_path / "link"]):
        for path in (checkpoints, checkpoints / step.name):
            out = tmp_path / f"out-{number}-{path.name}"
            notes = convert(path, "safetensors", out).notes
            assert len(notes) == 1 and "tied names and config.json are left out" in notes[0]
            assert ("task.factory=planted:Task" in notes[0]) == (checkpoints == run / "checkpoints")
    assert not (tmp_path / "ran").exists()
    convert(run, "safetensors", tmp_path / "out")
    assert (tmp_path / "ran").exists(), "the run was named, and so was its code"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_adapters_of_experts_are_exported_in_the_type_asked_for(dtype: torch.dtype | None, tmp_path: Path) -> None:
    factors = {part: torch.arange(12.0).view(3, *shape) for part, shape in (("A", (2, 2)), ("B", (2, 2)))}
    saved = {f"model.experts.down_proj.lora_{part}.default.weight": tensor for part, tensor in factors.items()}

    def read_into(name: str, start: int, out: torch.Tensor) -> None:
        out.copy_(saved[name].flatten()[start : start + out.numel()])

    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items()}
    adapter = SavedAdapter(AdapterConfig(type="lora", r=2), False, {"source": "base"})
    write_peft(Source("shardkit", tmp_path, specs, read_into, lambda: None), adapter, tmp_path, dtype, None)
    written = load_file(tmp_path / "adapter_model.safetensors")
    expected = {"A": factors["A"].reshape(6, 2), "B": factors["B"].permute(1, 2, 0).reshape(2, 6)}
    for part, tensor in expected.items():
        assert torch.equal(written[f"base_model.model.experts.lora_{part}.weight"], tensor.to(dtype or torch.float32))
