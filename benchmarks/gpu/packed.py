"""LoRA over bases of tens of billions of parameters in 4 bits, on one card.

A large base is a folder of holes, except for its embeddings, norms and last block: its shapes, types and sizes are a
published model's, and gradients reach its last block.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.hardware.cards import GPUS

from ..models import LLAMA_70B, llama
from .cases import Case, Cases, Figures, Where
from .child import emulated_card
from .target import load, planned, predicted, target, train, went_traced

LLAMA, MIXTRAL = "Llama 70B", "Mixtral 8x7B, experts adapted"
STEPS = 3
LARGE: dict[str, dict[str, Any]] = {
    LLAMA: {"model_type": "llama", **LLAMA_70B, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"},
    MIXTRAL: {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "dtype": "bfloat16"},
}  # fmt: skip
_SMALL = llama(128, 256, depth=4, heads=4, kv_heads=2, vocab=512)
_KEYS = {
    LLAMA: ("model.quantize={bits: 4}",),
    MIXTRAL: ("model.quantize={bits: 4, experts: true}", "adapter.targets=all-linear"),
}
_ALIKE = 2**24
"""Values that are drawn once, and written again and again."""


def cases(dry: bool) -> Cases:
    return {name: Case(partial(_train_large, name), partial(_plan_large, name)) for name in LARGE}


def overrides(name: str, dry: bool) -> list[str]:
    """The settings of the published claims: r = 16, one sequence of 2,048 tokens, all blocks recomputed."""
    return [
        "task.name=hf_causal_lm", "adapter.type=lora", "adapter.r=16", *_KEYS[name], "precision.mode=bf16",
        "activation.policy=full", "train.micro_batch_size=1", f"train.seq_len={64 if dry else 2048}",
        "parallel.strategy=single",
    ]  # fmt: skip


def _sizes(name: str, dry: bool) -> dict[str, Any]:
    return {**LARGE[name], **(_SMALL if dry else {})}


def _plan_large(name: str, where: Where) -> Figures:
    run_settings = [*overrides(name, where.dry), f"model.hf={json.dumps(_sizes(name, where.dry))}"]
    return predicted(planned(where, load(where, run_settings)([]), target(where)))


def _train_large(name: str, where: Where) -> Figures:
    from ..overhead import write_tokens

    folder = where.folder / "model"
    began = time.monotonic()
    _write_folder(folder, _sizes(name, where.dry), where.folder / "config.json")
    written = time.monotonic()
    weights = [f"model.hf_config={folder}", f"model.init_from={folder}", f"data.path={write_tokens(where.folder)}"]
    run_settings = [*overrides(name, where.dry), *weights]
    # An emulated card holds in host memory what it computes. By default that includes the scales: gigabytes.
    card = {**emulated_card(GPUS[where.card]), "EMUCUDA_SKIP_ABOVE": "16K"} if where.emulated else None
    trial = train(where, run_settings, steps=STEPS, card=card)
    seconds = {"write_s": round(written - began, 1), "train_s": round(time.monotonic() - written, 1)}
    return {**went_traced(trial, where.folder / "run"), "wall_s": seconds}


def _write_folder(folder: Path, sizes: dict[str, Any], config: Path) -> None:
    """A folder of holes, with numbers in the embeddings, the norms, and the last block."""
    import torch

    from shardkit.checkpoint.formats.pretended import write_pretended_weights

    config.write_text(json.dumps(sizes))
    write_pretended_weights(config, folder)
    torch.manual_seed(0)
    drawn = (torch.randn(_ALIKE) * 0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    ones = torch.ones(_ALIKE).bfloat16().view(torch.uint8).numpy().tobytes()
    last = f".layers.{json.loads((folder / 'config.json').read_text())['num_hidden_layers'] - 1}."
    for path in folder.glob("*.safetensors"):
        with path.open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            for fqn, tensor in json.loads(file.read(length)).items():
                if ".layers." in fqn and not any(part in fqn for part in (last, "norm")):
                    continue
                if fqn != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    file.seek(8 + length + begin)
                    for at in range(begin, end, len(drawn)):
                        file.write((ones if "norm" in fqn else drawn)[: min(len(drawn), end - at)])
