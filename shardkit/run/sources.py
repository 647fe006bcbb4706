"""Look at what a run starts from before anything is built: weights, a checkpoint, and a tokenizer for the data."""

from __future__ import annotations

from pathlib import Path

from ..config.schema import RunConfig
from ..data.rows import format_of
from ..data.tokenizer import tokenizer_path
from ..errors import CheckpointError, ConfigError
from ..launch.local import run_dir


def check_sources(config: RunConfig) -> None:
    """Refuse a path to start from that is not there or holds nothing to load, and a model folder without a tokenizer.

    Only names of files are looked at: what they hold is judged when they are read.

    Raises:
        ConfigError: names the missing file and the folder.
        CheckpointError: the checkpoint that `run.resume` names is not there.
    """
    source = config.run.source
    if source is not None:
        _check_checkpoint(source)
    if config.model.init_from is None:
        return
    goes_on = source is not None or (config.run.continues and run_dir.has_run(Path(config.run.dir)))
    if config.adapter.type != "none" or not goes_on:  # a run that goes on has weights, unless for an adapter's base
        _check_weights(config.model.init_from)
    folder = Path(config.model.init_from).expanduser()
    if (folder / "config.json").is_file():
        _check_tokenizer(config, folder)


def _check_checkpoint(source: str) -> None:
    from ..checkpoint.resume import candidates

    if not Path(source).exists():
        raise CheckpointError(f"run.resume={source} does not exist", "name a checkpoint, or a run with one")
    if not candidates(Path(source)):
        raise CheckpointError(f"run.resume={source}: there is no checkpoint", "name a checkpoint, or a run with one")


def _check_weights(init_from: str) -> None:
    from ..checkpoint.formats.detect import opener

    folder = Path(init_from).expanduser()
    if not folder.exists():
        raise ConfigError(
            f"model.init_from={init_from} does not exist", "name a folder of transformers, a run or a checkpoint"
        )
    try:
        opener(folder)
    except CheckpointError as error:
        only_described = (folder / "config.json").is_file()
        fix = "; or set model.hf_config to that folder, to start from random weights" if only_described else ""
        raise ConfigError(f"model.init_from={init_from}: {error.cause}", error.fix + fix) from error
    except OSError as error:
        raise ConfigError(
            f"model.init_from={init_from} cannot be read: {error.strerror}", "make it readable, or name another"
        ) from error


def _check_tokenizer(config: RunConfig, folder: Path) -> None:
    if config.task.factory is not None or config.task.name not in ("hf_causal_lm", "hf_masked_lm"):
        return
    if tokenizer_path(config) is not None:
        return
    paths = [path for path in (config.data.path, *(source.path for source in config.data.sources)) if path is not None]
    records = next((path for path in paths if format_of(path) is not None), None)
    if records is None:
        return
    raise ConfigError(
        f"no tokenizer.json in {folder}, and {records} needs a tokenizer",
        "copy the model's tokenizer there, or set data.tokenizer to a tokenizer.json or to a folder that holds one",
    )
