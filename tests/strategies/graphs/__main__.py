"""`python -m tests.strategies.graphs --seeds 0:40 --engines fsdp,zero3`: a campaign; prints its counts and failures.

`--features tied_head,experts` gives every seed these features, `--features each` one after the other; `--smaller`
drops those that a failure does not need;
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import replace
from pathlib import Path

from .campaign import OUTCOMES, Campaign, Verdict, smaller
from .case import FEATURES, Case, draw
from .engines import ENGINES


def main() -> None:
    args = _arguments()
    first, _, last = args.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    engines = [*ENGINES] if args.engines == "all" else args.engines.split(",")
    sets = _feature_sets(args.features)
    began = time.monotonic()
    campaign = Campaign(args.limit, say=print if args.verbose else _say_failures)
    until = None if args.minutes is None else began + 60 * args.minutes
    extra = {
        key: json.loads(text) if re.fullmatch(r"null|true|false|[\d.e-]+", text) else text for key, text in args.set
    }
    cases = (draw(seed, features) for features in sets for seed in seeds)
    campaign.run((replace(case, settings=case.settings | extra) for case in cases), engines, until)
    took = time.monotonic() - began
    for engine, counts in campaign.counts().items():
        print(f"{engine:14}", "  ".join(f"{name} {counts[name]}" for name in OUTCOMES))
    print(f"{len(campaign.verdicts)} arms in {took:.0f} s, ranks started {campaign.starts} times")
    if args.smaller:
        for verdict in campaign.verdicts:
            if verdict.outcome not in ("equal", "refused"):
                _shrink(verdict, args.limit)
    if args.json:
        Path(args.json).write_text(json.dumps(campaign.record(), indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.strategies.graphs", description=__doc__)
    parser.add_argument("--seeds", default="0:40", help="FIRST:LAST, without LAST, or one seed")
    parser.add_argument("--engines", default="ddp,fsdp,zero2,zero3", help=f"all, or of {', '.join(ENGINES)}")
    parser.add_argument("--features", help=f"in place of those that a seed draws: each, or of {', '.join(FEATURES)}")
    parser.add_argument("--set", action="append", default=[], type=_pair, help="KEY=VALUE of the run's config")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds after which an arm hangs")
    parser.add_argument("--minutes", type=float, help="begin no new seed after this time")
    parser.add_argument("--smaller", action="store_true", help="look for the features that each failure needs")
    parser.add_argument("--verbose", action="store_true", help="say every outcome, not only failures")
    parser.add_argument("--json", help="a file for the counts and failures")
    return parser.parse_args()


def _pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


def _feature_sets(features: str | None) -> list[tuple[str, ...] | None]:
    if features is None:
        return [None]
    return [(name,) for name in FEATURES] if features == "each" else [tuple(filter(None, features.split(",")))]


def _say_failures(line: str) -> None:
    if not line.startswith("equal"):
        print(line, flush=True)


def _shrink(verdict: Verdict, limit: float) -> None:
    def fails(case: Case) -> bool:
        trial = Campaign(limit, say=lambda line: None)
        trial.run([case], [verdict.arm.engine])
        return trial.verdicts[0].outcome == verdict.outcome

    case = smaller(verdict.arm.case, fails)
    print(f"{verdict.outcome} {verdict.arm.engine} needs {'+'.join(case.features) or 'no feature'} (seed {case.seed})")


if __name__ == "__main__":
    main()
