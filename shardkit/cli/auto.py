"""`shardkit plan --auto`: search for a plan, verify it by real steps if asked, and write it as a config."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config.load import LoadedConfig, load_config
from ..errors import ConfigError
from ..launch.ranks.gpus import visible_gpus
from ..plan.search.ladder import Try, tried
from ..plan.search.search import INTERRUPTED, Search, SearchResult, Setting, named
from ..plan.search.trial import writing
from ..plan.show import Verified, show_found, show_verified
from ..plan.target import Target, cap_setting
from .progress import ProgressLine, say

VERIFY_STEPS = 6
"""Steps of each run of --verify; the second is traced, those after it are timed."""


def verify(found: SearchResult, most: int, try_it: Try) -> list[Verified]:
    """Run the `most` settings that are predicted to be fastest; returns the fastest first, failed ones last."""
    ran = [Verified(setting, try_it(setting.settings, place)) for place, setting in enumerate(found.fitting[:most])]
    return sorted(ran, key=lambda one: -(one.trial.tokens_per_s or 0.0))


def to_json(found: SearchResult, verified: Sequence[Verified] = ()) -> dict[str, Any]:
    """The whole result, for programs."""

    def one(setting: Setting) -> dict[str, Any]:
        what = setting.combination
        return {
            "engine": what.engine, "policy": what.policy, "precision": what.precision,
            "micro_batch": setting.micro_batch, "settings": list(setting.settings), "needed": setting.needed,
            "filled": setting.filled, "tokens_per_s": setting.tokens_per_s, "waits": dict(setting.waits),
            "exact": setting.estimate is not None,
        }  # fmt: skip

    return {
        "schema": 1,
        "best": one(found.best),
        "front": [one(setting) for setting in found.front],
        "fitting": [one(setting) for setting in found.fitting],
        "misfits": [one(setting) for setting in found.misfits],
        "refused": [{"settings": list(what.settings), "reason": why} for what, why in found.refused.items()],
        "stopped": found.stopped,
        "left_out": len(found.left_out),
        "not_tried": [
            {"engine": one.engine, "policy": one.policy, "precision": one.precision, "settings": list(one.settings)}
            for one in found.left_out
        ],
        "verified": [
            {**one(v.setting), "outcome": v.trial.outcome, "peak": v.trial.peak, "measured": v.trial.tokens_per_s}
            for v in verified
        ],
    }


def plan_automatically(
    path: str | None,
    given: Sequence[str],
    target: Target,
    margin: float | None,
    most: int,
    memory_cap: str | None,
    folder: Path,
    as_json: bool,
    budget: float,
) -> None:
    """Search, run the best `most` settings, print the result, write the chosen config.

    Args:
        path: a YAML file; `None` = defaults.
        given: overrides from the command line; the search does not change their keys.
        margin: share of the memory to leave free; `None` = the uncertainty of the estimate.
        budget: seconds that the search may take; after them, or after Ctrl-C, the best so far is the result.

    Raises:
        ConfigError: nothing fits; or no setting ran; or this machine has too few GPUs to run them.
        SystemExit: 130, with the result written, after Ctrl-C.
    """

    def load(more: Sequence[str]) -> LoadedConfig:
        return load_config(path, [*given, *more])

    here = visible_gpus()
    if most and target.gpu is not None and here < target.world_size:
        raise ConfigError(
            f"--verify {most} trains on {target.world_size} GPUs, this machine has {here}",
            "leave --verify out here and pass it on a machine that has them",
        )
    keys = {".".join(item.partition("=")[0].split(".")[:2]) for item in given}  # a nested override fixes its key
    with writing(folder):  # the search takes minutes: check first that its result can be written
        pass
    with Search(lambda more: load(more).config, target, keys, margin, ProgressLine(), budget) as search:
        say(f"searching for at most {budget:g} s (--budget): each setting is traced, and the first takes the longest")
        found = search.run()
    interrupted = found.stopped == INTERRUPTED
    verified = []
    if most and not interrupted:
        try_it = tried(path, given, target.world_size, folder / "runs", VERIFY_STEPS, cap_setting(memory_cap))
        verified = verify(found, most, try_it)
        if verified[0].trial.outcome != "ok":
            raise ConfigError(
                f"no setting ran: {verified[0].trial.message}", f"see the runs' logs in {folder / 'runs'}"
            )
    chosen = verified[0].setting if verified else found.best
    with writing(folder):
        (folder / "auto.json").write_text(json.dumps(to_json(found, verified), indent=1) + "\n")
        (folder / "config.yaml").write_text(load(chosen.settings).render())
    _save_plot(found, folder)
    if as_json:
        print(json.dumps(to_json(found, verified), indent=1))
    else:
        print(show_found("the defaults" if path is None else Path(path).name, found, target))
        if verified:
            print("\n" + show_verified(verified, found.samples))
        print(f"\nwritten: {folder / 'config.yaml'}: {named(chosen, found.samples)}")
    if interrupted:
        raise SystemExit(130)


def _save_plot(found: SearchResult, folder: Path) -> None:
    from ..report.plot import save_front

    try:
        save_front(found, folder)
    except ConfigError as error:
        print(f"note: no plot: {error.cause}; {error.fix}", file=sys.stderr)
