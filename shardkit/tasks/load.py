"""Load the task of a config, a built-in one or the user's own through `task.factory`, and the prompts it continues."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from ..config.capability import check_model
from ..config.schema import RunConfig, TaskName, TrainConfig
from ..data.loader import Collate
from ..data.tokenizer import load_tokenizer, tokenizer_path
from ..errors import ConfigError, ShardkitError
from .base import Task
from .causal_lm import CausalLM
from .hf_text import HFCausalLM, HFMaskedLM
from .images import ImageClassification, SuperResolution

BUILT_IN: dict[TaskName, Callable[[RunConfig], Task]] = {
    "causal_lm": CausalLM,
    "hf_causal_lm": HFCausalLM,
    "hf_masked_lm": HFMaskedLM,
    "image_classification": ImageClassification,
    "super_resolution": SuperResolution,
}
_REQUIRED = ("build_model", "dataset", "n_targets", "loss")


def model_config(config: RunConfig) -> Any:
    """The transformers configuration of a built-in task's model: presets, files and keys applied, nothing built."""
    from ..models.hf import import_transformers, read_config

    return read_config(import_transformers(config.task.name), config.model, {})


def load_task(config: RunConfig) -> Task:
    """Make the task: `BUILT_IN[task.name](config)`, or `Factory(config, **task.args)` where `task.factory` is set.

    The current directory is searched for the factory's module first, as `python -m` does.
    """
    check_model(config)
    spec = config.task.factory
    if spec is None:
        return BUILT_IN[config.task.name](config)
    module_name, _, attribute = spec.partition(":")
    factory = _attribute(spec, _import(spec, module_name), attribute)
    _check_arguments(spec, factory, config)
    try:
        task = factory(config, **config.task.args)
    except ShardkitError:
        raise
    except Exception as error:
        raise _raised(spec, "making the task failed", error) from error
    missing = [name for name in _REQUIRED if not callable(getattr(task, name, None))]
    if missing:
        raise ConfigError(
            f"task.factory={spec} made a {type(task).__name__} without {', '.join(missing)}",
            "add the missing methods; docs/tasks.md shows a whole task",
        )
    checked: Task = task
    return checked


def _import(spec: str, module_name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"task.factory={spec}: there is no module {error.name}",
                f"check the name, or put the directory that holds it on PYTHONPATH (searched first: {folder})",
            ) from error
        raise _raised(spec, f"importing {module_name} failed", error) from error
    except (Exception, SystemExit) as error:
        raise _raised(spec, f"importing {module_name} failed", error) from error


def _attribute(spec: str, module: ModuleType, name: str) -> Callable[..., Any]:
    attribute: Callable[..., Any] | None = getattr(module, name, None)
    if attribute is not None and callable(attribute):
        return attribute
    callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    close = get_close_matches(name, callables, n=3, cutoff=0.5)
    defined_here = [key for key in callables if getattr(vars(module)[key], "__module__", None) == module.__name__]
    fix = (
        f"did you mean {' or '.join(close)}?"
        if close
        else f"it has: {', '.join(defined_here) or 'no classes or functions'}"
    )
    problem = f"has no {name}" if attribute is None else f"has {name}, but it cannot be called"
    location = getattr(module, "__file__", None) or "a namespace package"
    raise ConfigError(f"task.factory={spec}: module {module.__name__} ({location}) {problem}", fix)


def build_model(config: RunConfig, task: Task) -> nn.Module:
    try:
        return task.build_model()
    except (ShardkitError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if config.task.factory is None or "memory" in str(error):
            raise
        raise _raised(config.task.factory, "build_model failed", error) from error


def _check_arguments(spec: str, factory: Callable[..., Any], config: RunConfig) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # a builtin without a signature: the call itself checks the arguments
    try:
        signature.bind(config, **config.task.args)
    except TypeError as error:
        names = ", ".join(config.task.args) or "nothing"
        raise ConfigError(
            f"task.factory={spec} cannot be called with the config and task.args ({names}): {error}",
            f"it is called as {signature.replace(return_annotation=signature.empty)}, config first; change task.args",
        ) from error


def _raised(spec: str, action: str, error: BaseException) -> ConfigError:
    """An error that names the raising line of the user's code."""
    if isinstance(error, SyntaxError) and error.filename:
        location = f"{error.filename}:{error.lineno}"
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen ")]
        user_frames = [f for f in frames if f.filename not in (__file__, importlib.__file__)]
        location = f"{user_frames[-1].filename}:{user_frames[-1].lineno}" if user_frames else "unknown line"
    message = " ".join(str(error).split())
    return ConfigError(
        f"task.factory={spec}: {action} at {location}: {type(error).__name__}{': ' + message if message else ''}",
        "correct that line; SHARDKIT_DEBUG=1 shows the whole traceback",
    )


def collate_of(task: Task, rank: int, cp: int) -> Collate:
    """The function that makes a micro-batch of samples: of the whole ones, or of the part of each sequence that a rank
    of `parallel.cp` holds."""
    collate: Collate = getattr(task, "collate", None) or default_collate
    return collate if cp == 1 else partial(_collate_part, collate, splitting(task, rank, cp))


def splitting(task: Task, rank: int, cp: int) -> Callable[[Any], Any]:
    """The function that takes the part of a micro-batch that a rank of `parallel.cp` holds."""
    if cp == 1:
        return lambda batch: batch
    split = getattr(task, "split_sequences", None)
    if split is None:
        raise ConfigError(
            f"parallel.cp={cp}: {type(task).__name__} does not split the sequences of its batches",
            "remove parallel.cp, or give the task split_sequences(batch, rank, size) (docs/long.md)",
        )
    return partial(split, rank=rank % cp, size=cp)


def _collate_part(collate: Collate, split: Callable[[Any], Any], samples: list[Any]) -> Any:
    return split(collate(samples))


@dataclass(frozen=True)
class Prompts:
    """Prompts as token ids, and how to read an answer."""

    texts: tuple[str, ...]
    ids: tuple[list[int], ...]
    decode: Callable[[list[int]], str]
    end: int | None  # the token that ends an answer; None if there is none

    def batch(self, train: TrainConfig, world_size: int) -> tuple[int, int]:
        """Prompts that a rank continues together, and the tokens of the longest with its answer: the shape of every
        forward, never more than a micro-batch of training."""
        rows = min(train.micro_batch_size, -(-len(self.ids) // world_size))
        return rows, max(map(len, self.ids)) + train.sample_tokens


def read_prompts(config: RunConfig, task: Any) -> Prompts | None:
    """The run's prompts in the tokens of its tokenizer, else as bytes; None without prompts or evaluations."""
    train = config.train
    if not train.sample_prompts or not train.eval_samples:
        return None
    if not hasattr(task, "next_logits"):
        raise ConfigError(
            f"train.sample_prompts needs a task that continues text, and {type(task).__name__} has no next_logits",
            "remove train.sample_prompts, or give the task that method (docs/tasks.md)",
        )
    path = tokenizer_path(config)
    tokenizer = load_tokenizer(path) if path is not None else None
    if tokenizer is None:
        ids = [list(text.encode()) for text in train.sample_prompts]
        prompts = Prompts(
            texts=train.sample_prompts,
            ids=tuple(ids),
            decode=lambda answer: bytes(i for i in answer if i < 256).decode(errors="replace"),
            end=None,
        )
    else:
        ids = [list(tokenizer(text).input_ids) for text in train.sample_prompts]
        prompts = Prompts(train.sample_prompts, tuple(ids), tokenizer.decode, tokenizer.eos_token_id)
    for index, tokens in enumerate(ids):
        if not tokens:
            raise ConfigError(f"train.sample_prompts[{index}] is empty", "give it a word to begin with")
        if len(tokens) + train.sample_tokens > train.seq_len:
            raise ConfigError(
                f"train.sample_prompts[{index}] has {len(tokens)} tokens: with train.sample_tokens="
                f"{train.sample_tokens} more than train.seq_len={train.seq_len}",
                "shorten the prompt, or lower train.sample_tokens",
            )
    return prompts
