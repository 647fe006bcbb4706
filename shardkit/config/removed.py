"""Keys, values, commands and options that earlier versions had, each with one line on what to use instead.

A row is dropped with the release after the one that removed its feature. Pure data: no module of shardkit is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Removed(NamedTuple):
    """A key that no longer exists."""

    instead: str  # the fix that its error shows
    # values that asked for nothing, usually the former default. A run directory's config.yaml holds every key, so a run
    # that never used the feature could not be resumed if they were refused: they are dropped.
    harmless: tuple[Any, ...] = ()


KEYS: dict[str, Removed] = {
    "train.eval_batches": Removed("set train.eval_samples, a number of samples over all ranks"),
}
"""`section.key` → what to use instead."""

VALUES: dict[str, str] = {
    "activation.policy=sqrt": "set activation.policy=full",
}
"""`section.key=value` → what to use instead; for values that the key's type no longer accepts."""

COMMANDS: dict[str, str] = {
    "jobs": "squeue --me lists your jobs",
    "logs": "tail -F follows the log file that `shardkit submit` printed",
    "cancel": "scancel JOB ends a job; its checkpoints stay",
    "profile": "open RUN_DIR/profile/rank0_tables.txt, torch's tables of the operators of a run with profile.start",
    "ladder --from": "shardkit plan --from FILE plans the job; set the rungs of a ladder in a config",
    "submit --from": "shardkit submit --rehearse -- FILE … tries the script itself on emulated cards",
    "submit --model": "shardkit submit --rehearse -- FILE … tries the script itself on emulated cards",
    "plan --peft": "shardkit rehearse -- COMMAND tries the script with its adapter on emulated cards",
}
"""A command (`jobs`), or one with an option (`launch --bind-cpus`) → what to use instead."""
