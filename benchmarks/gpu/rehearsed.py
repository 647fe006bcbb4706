"""Programs that know nothing of shardkit: their peaks under `shardkit rehearse` beside those on this GPU.

The prediction of a case is its rehearsal, which needs the CUDA build of torch and no GPU. `programs/` holds programs in
the style of their libraries' examples; random ones are drawn as `tests.cuda.programs` draws them. The settings of
`accuracy` are rehearsed and planned.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..common import REPO, environ, output_of
from ..models import llama
from .accuracy import named_settings
from .cases import Case, Cases, Figures, Where
from .target import load, planned, predicted, settings, target, train, went

PROGRAMS = Path(__file__).parent / "programs"
MODEL = "MODEL"
"""Stands for the model folder in a program's arguments: real weights on a GPU, pretended ones in a rehearsal."""
NAMED: dict[str, tuple[str, ...]] = {
    "GPT-2 in a plain loop": ("gpt.py",),
    "transformers' Trainer, Llama 1.1B": ("llama_trainer.py",),
    "FSDP2 by hand, torchrun, Llama 1.1B": ("llama_fsdp.py",),
    "TRL's SFTTrainer, QLoRA": ("trl_qlora.py", MODEL),
    "torchvision's ResNet-50, fp16": ("resnet.py",),
    "timm's ViT-B under Accelerate": ("vit_accelerate.py",),
    "Lightning, U-Net, fp16": ("unet_lightning.py",),
    "transformers' Trainer, LoRA": ("llama_trainer.py", "--lora"),
    "32,768 tokens, checkpointed": ("long_context.py",),
    "the same, bitsandbytes' 8-bit AdamW": ("long_context.py", "--bnb"),
    "three LSTM layers (cuDNN)": ("lstm.py",),
    "GPT-2, compiled": ("gpt.py", "--compile"),
}
SEEDS = range(30)
STEPS = 3
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
LIMIT_S = 240.0
_LLAMA = llama(1536, 4096, depth=16, heads=24, kv_heads=8, vocab=512, positions=2048)


def cases(dry: bool) -> Cases:
    """The named programs; the random ones as programs of one process, without their ranks; `shardkit.train`."""
    named: Cases = {name: Case(partial(_run, words), partial(_rehearse, words)) for name, words in NAMED.items()}
    for seed in SEEDS:
        named[drawn_name(seed)] = Case(partial(_run_drawn, seed), partial(_rehearse_drawn, seed))
    for name, overrides in named_settings(dry).items():
        named[trained_name(name)] = Case(partial(_train, overrides), partial(_rehearse_training, overrides))
    return dict(list(named.items())[:1]) if dry else named


def drawn_name(seed: int) -> str:
    return f"random program {seed}"


def trained_name(setting: str) -> str:
    return f"shardkit.train, {setting}"


def _command(words: Sequence[str], runner: Sequence[str] = ()) -> list[str]:
    """A program's command, run by a module if `runner` names one; torchrun starts what joins a process group."""
    in_group = any(call in Path(words[0]).read_text() for call in ("fully_shard(", "DistributedDataParallel("))
    return [sys.executable, *(_TORCHRUN if in_group else []), *runner, *words]


def _paths(words: Sequence[str], model: Path) -> list[str]:
    return [str(PROGRAMS / words[0]), *(str(model) if word == MODEL else word for word in words[1:])]


def _run(words: Sequence[str], where: Where) -> Figures:
    model = where.folder / "model"
    if MODEL in words:
        write_model(model)
    return _measured(_paths(words, model), where)


def _run_drawn(seed: int, where: Where) -> Figures:
    return _measured([str(_drawn(seed, where))], where)


def _drawn(seed: int, where: Where) -> Path:
    from tests.cuda.programs import draw

    path = where.folder / "drawn.py"
    path.write_text(draw(seed).text)
    return path


def _measured(words: Sequence[str], where: Where) -> Figures:
    out = where.folder / "peaks.json"
    command = _command(words, ["-m", "benchmarks.gpu.recorded"])
    variables = environ(RECORDED_PEAKS=str(out), HF_HUB_OFFLINE="1")
    code, output = output_of(command, LIMIT_S, cwd=where.folder, env=variables)
    if code is None:
        return {"outcome": "failed", "message": f"not done after {LIMIT_S:.0f} s"}
    if code or not out.exists():
        return {"outcome": "failed", "message": output[-1500:]}
    return {"outcome": "ok", **json.loads(out.read_text())}


def _rehearse(words: Sequence[str], where: Where) -> Figures:
    model = where.folder / "model"
    if MODEL in words:
        pretend_model(model)
    return _rehearsed(_command(_paths(words, model)), where)


def _rehearse_drawn(seed: int, where: Where) -> Figures:
    return _rehearsed(_command([str(_drawn(seed, where))]), where)


def _train(overrides: Sequence[str], where: Where) -> Figures:
    return went(train(where, overrides, steps=STEPS))


def _rehearse_training(overrides: Sequence[str], where: Where) -> Figures:
    from shardkit.plan.search.trial import trial_settings

    estimate = planned(load(where, overrides)([]), target(where))
    run = trial_settings(settings(where, overrides), where.folder / "run", STEPS, None, traced=False)
    rehearsal = _rehearsed([sys.executable, *_TORCHRUN, "-m", "shardkit.train", *run], where)
    return {**rehearsal, "planned": predicted(estimate)}


def _rehearsed(program: Sequence[str], where: Where) -> Figures:
    command = [sys.executable, "-m", "shardkit.cli", "rehearse", "--gpu", where.card, "--json", "--", *program]
    done = subprocess.run(
        command, cwd=where.folder, env=environ(), timeout=2 * LIMIT_S + 600, capture_output=True, text=True,
        errors="replace",
    )  # fmt: skip
    verdict = json.loads(done.stdout) if done.stdout.strip() else {"reason": done.stderr[-1000:]}
    if done.returncode:
        return {"outcome": "not known" if done.returncode == 7 else "failed", "message": verdict["reason"]}
    (rank,) = verdict["ranks"]
    assumptions = [
        {**assumption, "source_line": assumption["source_line"].removeprefix(f"{REPO}/")}
        for assumption in verdict.get("assumptions", [])
    ]
    return {
        "outcome": "ok", "verdict": verdict["verdict"], "allocated": rank["peak_allocated"],
        "reserved": rank["peak_reserved"], "outside": rank["outside_estimate"],
        "assumptions": assumptions,
    }  # fmt: skip


def write_model(folder: Path) -> None:
    """A Llama of 0.4 billion random values in bf16, with a tokenizer of single bytes."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**_LLAMA), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def pretend_model(folder: Path) -> None:
    """The same folder without its weights."""
    from transformers import LlamaConfig

    source = folder.with_name("source")
    LlamaConfig(**_LLAMA, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(source)
    write_tokenizer(source)
    subprocess.run(
        [sys.executable, "-m", "shardkit.cli", "pretend-weights", str(source / "config.json"), str(folder)], check=True,
        env=environ(), stdout=subprocess.DEVNULL,
    )  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
