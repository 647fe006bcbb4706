"""`shardkit plan --auto`: search for a plan, verify it by real steps if asked, and write it as a config."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..launch.ranks.env import visible_gpus
from ..plan.model.cost import SPEED_ERROR
from ..plan.search.ladder import Try
from ..plan.search.search import AXES, INTERRUPTED, Combination, Search, SearchResult, Setting, named
from ..plan.search.show import Verified, show_found, show_verified
from ..plan.search.trial import writing
from ..plan.target import Target
from .progress import ProgressLine, say

if TYPE_CHECKING:
    from .plan import ConfigJob, SearchOptions

VERIFY_STEPS = 6
"""Steps of each run of --verify; the second is traced, those after it are timed."""


def verify(settings: Sequence[Setting], try_it: Try, logs: Path) -> list[Verified]:
    """Run settings for a few steps each; returns the fastest first, failed ones last."""
    runs = [Verified(setting, try_it(setting.settings, number)) for number, setting in enumerate(settings)]
    runs.sort(key=lambda run: -(run.trial.tokens_per_s or 0.0))
    if runs[0].trial.outcome != "ok":
        raise ConfigError(f"no setting ran: {runs[0].trial.message}", f"see the runs' logs in {logs}")
    return runs


def to_json(search_result: SearchResult, verified: Sequence[Verified] = ()) -> dict[str, Any]:
    """The search's result and the runs that verified it, for programs."""
    refused = search_result.refused.items()
    return {
        "schema": 1,
        "speed_error": SPEED_ERROR,
        "best": _setting_as_json(search_result.best),
        "front": [_setting_as_json(setting) for setting in search_result.front],
        "fitting": [_setting_as_json(setting) for setting in search_result.fitting],
        "misfits": [_setting_as_json(setting) for setting in search_result.misfits],
        "refused": [{"settings": list(combination.settings), "reason": reason} for combination, reason in refused],
        "stopped": search_result.stopped,
        "left_out": len(search_result.left_out),
        "not_tried": [{**_combination_as_json(c), "settings": list(c.settings)} for c in search_result.left_out],
        "verified": [
            {**_setting_as_json(run.setting), "outcome": run.trial.outcome, "peak": run.trial.peak,
             "measured": run.trial.tokens_per_s}
            for run in verified
        ],
    }  # fmt: skip


def _combination_as_json(combination: Combination) -> dict[str, Any]:
    axes = dict(zip(AXES, combination.sizes, strict=True))
    return {"engine": combination.engine, "policy": combination.policy, "precision": combination.precision, **axes}


def _setting_as_json(setting: Setting) -> dict[str, Any]:
    return {
        **_combination_as_json(setting.combination), "micro_batch": setting.micro_batch,
        "settings": list(setting.settings), "needed": setting.needed, "filled": setting.filled,
        "tokens_per_s": setting.tokens_per_s, "waits": dict(setting.waits), "sent": round(setting.sent),
        "exact": setting.estimate is not None,
    }  # fmt: skip


def plan_automatically(
    job: ConfigJob, target: Target, options: SearchOptions, memory_cap: str | None, as_json: bool
) -> None:
    """Search, run the best settings if asked, print the result, write the chosen config."""
    from ..report.plot import save_front

    most, folder = options.verify, options.out
    n_gpus = visible_gpus()
    if most and target.gpu is not None and n_gpus < target.world_size:
        cause = f"--verify {most} trains on {target.world_size} GPUs, this machine has {n_gpus}"
        raise ConfigError(cause, "leave --verify out here and pass it on a machine that has them")
    with writing(folder):  # the search takes minutes: check first that its result can be written
        pass
    with Search(job.config, target, job.fixed_keys, options.margin, ProgressLine(), options.budget) as search:
        say(f"searching for at most {options.budget:g} s (--budget): each setting is traced, the first takes longest")
        search_result = search.run()
    interrupted = search_result.stopped == INTERRUPTED
    verified = []
    if most and not interrupted:
        runs = folder / "runs"
        verified = verify(
            search_result.fitting[:most], job.tried(target.world_size, runs, VERIFY_STEPS, memory_cap), runs
        )
    chosen = verified[0].setting if verified else search_result.best
    with writing(folder):
        (folder / "auto.json").write_text(json.dumps(to_json(search_result, verified), indent=1) + "\n")
        (folder / "config.yaml").write_text(job.load(chosen.settings).render())
    try:
        save_front(search_result, folder)
    except ConfigError as error:
        print(f"note: no plot: {error.cause}; {error.fix}", file=sys.stderr)
    if as_json:
        print(json.dumps(to_json(search_result, verified), indent=1))
    else:
        print(show_found(job.name, search_result, target))
        if verified:
            print("\n" + show_verified(verified))
        print(f"\nwritten: {folder / 'config.yaml'}: {named(chosen)}")
    if interrupted:
        raise SystemExit(130)
