"""`python -m tests.config.draws --seeds 0:100 [--minutes 10] [--record]`: counts by outcome, and what failed."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import Any

from benchmarks.common import RESULTS, environment, write_json
from tests import zero_ops

from .campaign import Campaign, Verdict

RECORD = RESULTS / "draws.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.config.draws", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="FIRST:LAST, or one seed")
    parser.add_argument("--minutes", type=float, help="begin no new draw after this time")
    parser.add_argument("--record", action="store_true", help=f"add the counts to {RECORD.name}")
    parser.add_argument("--verbose", action="store_true", help="say every outcome")
    args = parser.parse_args()
    zero_ops.main()  # a draw's time has no room for its compilation
    first, _, last = args.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    until = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    campaign = Campaign(verbose=args.verbose, record=_record if args.record else None)
    campaign.run(seeds, until)
    print(f"{len(campaign.verdicts)} draws:", dict(Counter(verdict.outcome for verdict in campaign.verdicts)))


def _record(verdict: Verdict) -> None:
    """Add one draw to the recorded ones: a campaign that is stopped has recorded what it found."""
    recorded: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"counts": {}, "failures": []}
    recorded["counts"][verdict.outcome] = recorded["counts"].get(verdict.outcome, 0) + 1
    if verdict.outcome not in ("equal", "refused"):
        recorded["failures"].append({"seed": verdict.seed, "outcome": verdict.outcome, "words": verdict.words[:300]})
    recorded["environment"] = environment()
    write_json(RECORD, recorded)


if __name__ == "__main__":
    main()
