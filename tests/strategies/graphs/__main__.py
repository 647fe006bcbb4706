"""`python -m tests.strategies.graphs --seeds 0:40 --engines fsdp,zero3`: a campaign; prints its counts and failures.

`--features tied_head,experts` gives every seed these features in place of its own, so that those at fault can be
found; `--towers` draws models with towers in place of graphs.
"""

from __future__ import annotations

import argparse
import time

from . import towers
from .campaign import OUTCOMES, Campaign
from .case import FEATURES, draw
from .engines import ENGINES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.strategies.graphs", description=__doc__)
    parser.add_argument("--seeds", default="0:40", help="FIRST:LAST, without LAST, or one seed")
    parser.add_argument("--engines", default="ddp,fsdp,zero2,zero3", help=f"all, or of {', '.join(ENGINES)}")
    parser.add_argument("--features", help=f"of {', '.join(FEATURES)}")
    parser.add_argument("--towers", action="store_true", help="models with towers")
    parser.add_argument("--minutes", type=float, help="begin no new seed after this time")
    args = parser.parse_args()
    first, _, last = args.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    features = None if args.features is None else tuple(filter(None, args.features.split(",")))
    cases = map(towers.draw, seeds) if args.towers else (draw(seed, features) for seed in seeds)
    began = time.monotonic()
    campaign = Campaign(say=lambda line: line.startswith("equal") or print(line, flush=True))
    until = None if args.minutes is None else began + 60 * args.minutes
    campaign.run(cases, [*ENGINES] if args.engines == "all" else args.engines.split(","), until)
    for engine, counts in campaign.counts().items():
        print(f"{engine:14}", "  ".join(f"{name} {counts[name]}" for name in OUTCOMES))
    print(f"{len(campaign.verdicts)} arms in {time.monotonic() - began:.0f} s, ranks started {campaign.starts} times")


if __name__ == "__main__":
    main()
