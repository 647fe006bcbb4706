"""Configs drawn at random over keys and tasks train on several ranks as on one, or are refused by name."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
import types
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin
from unittest.mock import patch

import pytest
import torch

from shardkit.config.load import load_config
from shardkit.config.schema import STRATEGIES, section_fields
from shardkit.run.job import start
from shardkit.run.trainer import Trainer
from tests.strategies.graphs.engines import Report
from tests.strategies.graphs.pool import Pool
from tests.strategies.graphs.proof import first_difference, recorder, watch
from tests.texts import write_numbers

STEPS = 3
TASKS: dict[str, dict[str, Any]] = {
    "causal_lm": {
        "model.d_model": 32, "model.n_layers": 3, "model.n_heads": 2, "model.max_seq_len": 32, "train.seq_len": 32,
    },
    "gpt2": {"task.name": "hf_causal_lm", "model.preset": "gpt2-debug", "train.seq_len": 32},
    "llama": {"task.name": "hf_causal_lm", "model.preset": "llama-debug", "train.seq_len": 32},
    "bert": {"task.name": "hf_masked_lm", "model.preset": "bert-debug", "train.seq_len": 32},
    "vit": {"task.name": "image_classification", "model.preset": "vit-debug"},
    "swin2sr": {"task.name": "super_resolution", "model.preset": "swin2sr-debug", "data.crop_size": 32},
}  # fmt: skip
_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 64,
}  # fmt: skip
SPLIT_TASKS: dict[str, dict[str, Any]] = {
    "causal_lm": {**TASKS["causal_lm"], "model.n_heads": 4},
    "llama": TASKS["llama"],
    **{
        family: {"task.name": "hf_causal_lm", "model.hf": {"model_type": family, **_SIZES, **sizes}}
        for family, sizes in {
            "qwen3": {"intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 4},
            "gemma3_text": {"intermediate_size": 48, "head_dim": 8, "sliding_window": 5},
            "mixtral": {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
            "qwen3_moe": {
                "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2,
            },
        }.items()
    },
}  # fmt: skip
"""Models whose layers, experts or sequences ranks can split."""
OF_OTHER_TASKS = {"data.mask_fraction", "data.mask_token", "data.crops_per_image", "data.augment"}
EXPERTS = ("mixtral", "qwen3_moe")
AXES: list[dict[str, int]] = [
    {"parallel.tp": 2}, {"parallel.tp": 4}, {"parallel.cp": 2}, {"parallel.cp": 4}, {"parallel.ep": 2},
    {"parallel.ep": 4}, {"parallel.tp": 2, "parallel.cp": 2}, {"parallel.ep": 2, "parallel.cp": 2},
    {"parallel.tp": 2, "parallel.ep": 2}, {"parallel.tp": 2, "parallel.ep": 4},
]  # fmt: skip
OF_RANKS = {"precision.autocast", "precision.reduce_dtype", "train.grad_accum_steps", "memory.cap"}
"""Keys beside `parallel` that say how ranks do it, not what is computed: the single process goes without them."""
TOLERANCES = {"fp32": (2e-5, 5e-4), "other": (3e-2, 0.3)}
"""Relative, on losses and gradient norms: in fp32, and where a type with fewer digits computes or travels."""
MISSING = float("nan")


@dataclass(frozen=True)
class Draw:
    """A training of some steps by these settings, recorded; `ranks` and `moved`: see `proof.recorder`."""

    settings: dict[str, Any]
    records: Path
    ranks: Path | None = None
    moved: bool = False

    @property
    def compiles(self) -> bool:
        return any("offload" in key for key in self.settings)

    def run(self, curve: list[tuple[float, float]]) -> None:
        with ExitStack() as stack:
            if self.settings.get("optim.name") == "muon":  # it orthogonalises in bf16, which magnifies rounding
                stack.enter_context(patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone))
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
            job = stack.enter_context(start(load_config(None, self.settings)))
            trainer = Trainer(job)
            watch(recorder(self.records, STEPS, self.ranks, self.moved), job)
            for record in trainer.recorded_steps():
                loss = record["loss"] + record.get("val_loss", 0.0)
                curve.append((loss, record.get("grad_norm", MISSING)))


def settings(seed: int, folder: Path, splits: bool = False) -> dict[str, Any]:
    """The config of a seed: a task, a strategy, and 2 to 5 keys.

    `splits`: ranks split layers, experts or sequences; mostly a model and an engine that can, as chance would draw them
    too rarely.
    """
    draws = random.Random(f"{seed} {'split' if splits else 'config'}")
    strategies = [name for name in STRATEGIES if name != "single"]
    tasks, axes = TASKS, dict[str, int]()
    if splits:
        axes, strategies = draws.choice(AXES), [*strategies, *4 * ["fsdp"], *3 * ["hsdp"]]
        has_experts = None if draws.random() < 0.05 else "parallel.ep" in axes
        tasks = {n: sizes for n, sizes in SPLIT_TASKS.items() if has_experts is None or (n in EXPERTS) == has_experts}
    task, strategy = draws.choice(list(tasks)), draws.choice(strategies)
    base: dict[str, Any] = {
        **({"train.seq_len": 32} if splits else {}), **tasks[task], "parallel.strategy": strategy,
        "train.max_steps": STEPS, "train.global_batch_size": 8, "train.micro_batch_size": 2,
        "run.device": "cpu", "run.dir": str(folder / f"run-{seed}"), "run.overwrite": True,
        "logging.tensorboard": False, "memory.plan": False, "logging.level": "error", "train.eval_samples": 8,
    }  # fmt: skip
    if splits or task in ("causal_lm", "gpt2", "llama", "bert"):
        base |= {"data.path": str(folder / "text"), "data.cache_dir": str(folder / "cache")}
    if splits:
        drawn = base | draw(draws, draws.randint(1, 3), OF_OTHER_TASKS) | axes
        return drawn | ({"parallel.tp_sequence": draws.random() < 0.5} if "parallel.tp" in axes else {})
    return base | draw(draws, draws.randint(2, 5))


def alone(config: dict[str, Any]) -> dict[str, Any]:
    """The same training in one process."""
    shared = {k: v for k, v in config.items() if not k.startswith("parallel.") and k not in OF_RANKS}
    return shared | {"parallel.strategy": "single", "run.dir": f"{config['run.dir']}-alone"}


@dataclass(frozen=True)
class Verdict:
    seed: int
    outcome: str
    words: str


def is_exact(config: dict[str, Any]) -> bool:
    """Whether ranks and one process round alike."""
    exact = config.get("precision.mode", "fp32") in ("fp32", "tf32")
    exact = exact and "8bit" not in config.get("optim.name", "")
    return exact and config.get("precision.reduce_dtype", "auto") in ("auto", "fp32")


def judge(ranks: list[Report | None], one: Report | None, config: dict[str, Any]) -> tuple[str, str]:
    """(outcome, words) of a draw's ranks against one process."""
    if None in ranks:
        return "hang", next((report.error for report in ranks if report is not None), "")
    reports = sorted((report for report in ranks if report is not None), key=lambda report: report.at)
    if reports[0].error and not reports[0].refused:
        return "traceback", reports[0].error[-400:]
    if reports[0].error:
        # With the optimizer's states a later step takes more: a cap that it exceeds ends it there, as a card would.
        late = any(report.curve for report in reports) and "ran out of memory" not in reports[0].error
        return ("stray" if late else "refused"), " ".join(reports[0].error.split())
    if one is None or one.error:
        return "no reference", "hang" if one is None else " ".join(one.error.split())[-300:]
    tolerances = TOLERANCES["fp32" if is_exact(config) else "other"]
    for step, (got, want) in enumerate(zip(reports[0].curve, one.curve, strict=True)):
        for name, mine, right, tolerance in zip(("loss", "norm"), got, want, tolerances, strict=True):
            both_missing = mine != mine and right != right
            if not both_missing and not abs(mine - right) <= tolerance * max(abs(right), 1e-3):
                return "wrong", f"step {step}: {name} {mine:.7f} against {right:.7f}"
    return "equal", ""


@dataclass
class Campaign:
    """Draws on two ranks, or on four that split layers, experts or sequences."""

    limit_s: float = 60.0
    splits: bool = False
    verdicts: list[Verdict] = field(default_factory=list)

    def run(self, seeds: Iterable[int], until: float | None = None) -> None:
        several, process = Pool(4 if self.splits else 2, self.limit_s), Pool(1, 60)
        with tempfile.TemporaryDirectory(prefix="draws-") as name, several, process:
            folder = Path(name)
            write_numbers(folder / "text")
            for seed in seeds:
                if until is not None and time.monotonic() > until:
                    break
                self._judge(seed, settings(seed, folder, self.splits), process, several, folder)

    def _judge(self, seed: int, config: dict[str, Any], one: Pool, several: Pool, folder: Path) -> None:
        records = folder / f"records-{seed}"
        ranks = several.run(Draw(config, records / "ranks"))
        trained = all(report is not None and not report.error for report in ranks)
        process = Draw(alone(config), records / "process", records / "ranks")
        (alone_report,) = one.run(process) if trained else [None]
        outcome, words = judge(ranks, alone_report, config)
        if outcome == "equal" and is_exact(config):
            one.run(replace(process, moved=True))
            _, words = first_difference(records / "ranks", records / "process", STEPS, several.world)
            outcome = "wrong" if words else "equal"
        shutil.rmtree(records, ignore_errors=True)
        self.verdicts.append(Verdict(seed, outcome, words))
        if outcome not in ("equal", "refused"):
            drawn = {k: v for k, v in config.items() if k not in ("run.dir", "data.cache_dir", "data.path")}
            print(f"{outcome:12} {seed}: {words}\n      {drawn}", flush=True)


NUMBERS: dict[str, list[Any]] = {
    "model.loss_chunk_size": [0, 16, 1024], "model.mlp_chunks": [2, 3], "adapter.r": [1, 4], "adapter.alpha": [4, 16],
    "data.val_fraction": [0.1, 0.3], "data.mask_fraction": [0.15, 0.5], "data.mask_token": [0, 5],
    "data.crops_per_image": [1, 8], "data.workers": [0, 1], "data.prefetch": [1, 3], "data.max_bad_rows": [0.0, 0.5],
    "data.tokenize_workers": [1, 2], "train.micro_batch_size": [1, 2, 4], "train.seq_len": [16, 24],
    "train.grad_accum_steps": [1, 2], "train.max_norm": [None, 0.1, 5.0], "train.seed": [1, 77],
    "train.eval_every": [1, 2], "train.sample_prompts": [["number 1"]], "train.sample_tokens": [2, 4],
    "train.sample_temperature": [0.0, 0.7], "train.ema_decay": [0.5, 0.9], "optim.lr": [1e-3, 1e-2],
    "optim.weight_decay": [0.0, 0.3], "optim.betas": [[0.5, 0.9]], "optim.eps": [1e-6], "optim.momentum": [0.0, 0.9],
    "optim.warmup_steps": [1, 2], "optim.min_lr_ratio": [0.0, 1.0], "parallel.dp_replicate": [1, 2], "parallel.cp": [2],
    "parallel.tp": [2], "parallel.ep": [2], "parallel.ep_imbalance": [1.0, 3.0],
    "parallel.dp_shard": [1, 2], "parallel.bucket_mb": [0.01, 1.0], "parallel.prefetch": [1, 2], "parallel.hpz": [2],
    "parallel.offload_ratio": [0.5, 1.0], "precision.loss_scale_init_power": [4, 12],
    "precision.loss_scale_window": [1, 1000], "activation.every_k": [1, 2, 3], "activation.budget": [0.0, 0.5, 1.0],
    "activation.offload_min_bytes": [0, 4096], "activation.block_classes": [["Block"], ["NoSuchClass"]],
    "checkpoint.every_steps": [1, 2], "checkpoint.every_minutes": [10.0], "checkpoint.keep_last": [1, None],
    "checkpoint.timeout_s": [120.0], "memory.interval": [1, 2], "memory.trace_step": [1, 2],
    "memory.cap": ["8GiB", "1MiB"], "memory.host_warn": [0.5, 1.0], "profile.start": [2], "profile.steps": [1],
    "logging.every": [1, 3], "run.init_timeout_s": [300.0], "run.step_timeout_s": [300.0],
}  # fmt: skip
"""Values of keys whose type does not list them."""

LEFT_OUT: dict[str, str] = {
    "every draw has one, and the same number of steps and samples": "task.name parallel.strategy train.max_steps "
    "train.epochs train.global_batch_size train.eval_samples",
    "the task's small model": "model.preset model.vocab_size model.max_seq_len model.d_model model.n_layers "
    "model.n_heads data.crop_size",
    "a task, keys or layers of somebody else's": "task.factory task.args model.hf adapter.targets parallel.ds_config",
    "a file, a folder or records": "model.hf_config model.init_from model.resize_embeddings data.path data.val_path "
    "data.bin_dtype data.tokenizer data.chat_template data.columns data.sources data.cache_dir data.chat_date "
    "data.ignore parallel.nvme_path run.dir run.resume run.overwrite",
    "the rows of the small models are no multiples of a block": "model.quantize",
    "ranks draw different elements than one process": "model.dropout adapter.dropout",
    "minutes of compilation": "compile.enabled compile.mode compile.scope",
    "a process of its own, a service or a port": "memory.plan logging.wandb_project logging.prometheus_port "
    "logging.prometheus_host",
    "the CPU, and another number of ranks": "run.device profile.ranks",
}
"""Why no draw sets them → keys."""
UNDRAWN = {key for keys in LEFT_OUT.values() for key in keys.split()}


def choices() -> dict[str, list[Any]]:
    """Key → the values to draw from."""
    found: dict[str, list[Any]] = {}
    for section, fields in section_fields().items():
        for name, info in fields.items():
            key = f"{section}.{name}"
            if key not in UNDRAWN:
                values = NUMBERS.get(key) or [value for value in _listed(info.annotation) if value != "nvme"]
                assert values, f"{key} needs values in NUMBERS, or a reason in LEFT_OUT"
                found[key] = values
    return found


def _listed(kind: Any) -> list[Any]:
    """The values of a type that lists them: bool, Literal, and unions of these with None."""
    if kind is bool:
        return [True, False]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return [value for part in get_args(kind) if part is not type(None) for value in _listed(part)]
    return []


def draw(draws: random.Random, number: int, without: Collection[str] = ()) -> dict[str, Any]:
    """Values of `number` keys."""
    options = choices()
    keys = draws.sample(sorted(options.keys() - set(without)), number)
    return {key: draws.choice(options[key]) for key in keys}


EQUAL, MOST = 2, 20
"""The default suite draws until so many configs trained as in one process, at most `MOST`: most are refused."""
FRESH, FRESH_MINUTES = "SHARDKIT_DRAW_SEED", 10.0
"""The variable with the fresh seeds of the release tier: the first one, or `first:last`, which has no limit in time;
unset = from the time on."""


def told(campaign: Campaign) -> str:
    failed = [verdict for verdict in campaign.verdicts if verdict.outcome not in ("equal", "refused")]
    return "\n".join(f"{verdict.outcome} {verdict.seed}: {verdict.words}" for verdict in failed)


def test_drawn_configs_train_as_in_one_process_or_are_refused() -> None:
    campaign = Campaign(limit_s=120)

    def n_equal() -> int:
        return sum(verdict.outcome == "equal" for verdict in campaign.verdicts)

    campaign.run(takewhile(lambda _: n_equal() < EQUAL, range(MOST)))
    assert not told(campaign), told(campaign)
    assert n_equal() == EQUAL, campaign.verdicts


@pytest.mark.release
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("splits", [False, True], ids=["two ranks", "axes on four ranks"])
def test_fresh_draws_train_as_in_one_process_or_are_refused(splits: bool) -> None:
    first, _, last = (os.environ.get(FRESH) or str(int(time.time()))).partition(":")
    print(f"configs from seed {first} on ({FRESH}={first} draws them again)")
    campaign = Campaign(limit_s=120, splits=splits)
    until = None if last else time.monotonic() + 60 * FRESH_MINUTES
    campaign.run(range(int(first), int(last or int(first) + 1000)), until)
    assert campaign.verdicts
    print(dict(Counter(verdict.outcome for verdict in campaign.verdicts)))
    assert not told(campaign), told(campaign)


def test_every_key_is_drawn_or_left_out_for_a_reason() -> None:
    keys = {f"{section}.{name}" for section, fields in section_fields().items() for name in fields}
    assert set(choices()) | UNDRAWN >= keys
    assert not (NUMBERS.keys() | UNDRAWN) - keys, "keys that are gone"
    assert len(choices()) > 80
