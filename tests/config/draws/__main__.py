"""`python -m tests.config.draws --seeds 0:100 [--minutes 10]`: counts by outcome, and what failed."""

from __future__ import annotations

import argparse
import time
from collections import Counter

from tests import zero_ops

from .campaign import Campaign


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.config.draws", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="FIRST:LAST, or one seed")
    parser.add_argument("--minutes", type=float, help="begin no new draw after this time")
    parser.add_argument("--verbose", action="store_true", help="say every outcome")
    args = parser.parse_args()
    zero_ops.main()  # a draw's time has no room for its compilation
    first, _, last = args.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    until = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    campaign = Campaign(verbose=args.verbose)
    campaign.run(seeds, until)
    print(f"{len(campaign.verdicts)} draws:", dict(Counter(verdict.outcome for verdict in campaign.verdicts)))


if __name__ == "__main__":
    main()
