"""Configs drawn at random over keys and tasks train on two ranks as on one, or are refused by name."""

from __future__ import annotations

import os
import time
from itertools import takewhile

import pytest

from shardkit.config.schema import section_fields
from tests.config.draws.campaign import Campaign
from tests.config.draws.keys import LEFT_OUT, NUMBERS, choices

EQUAL, MOST = 2, 20
"""The default suite draws until so many configs trained as in one process, at most `MOST`: most are refused."""
FRESH, FRESH_MINUTES = "SHARDKIT_DRAW_SEED", 10.0
"""The variable with the first fresh seed of the release tier; unset = the time."""


def told(campaign: Campaign) -> str:
    failed = [verdict for verdict in campaign.verdicts if verdict.outcome not in ("equal", "refused")]
    return "\n".join(f"{verdict.outcome} {verdict.seed}: {verdict.words}" for verdict in failed)


@pytest.mark.dist
@pytest.mark.deepspeed
def test_drawn_configs_train_as_in_one_process_or_are_refused() -> None:
    campaign = Campaign(limit_s=120)

    def n_equal() -> int:
        return sum(verdict.outcome == "equal" for verdict in campaign.verdicts)

    campaign.run(takewhile(lambda _: n_equal() < EQUAL, range(MOST)))
    assert not told(campaign), told(campaign)
    assert n_equal() == EQUAL, campaign.verdicts


@pytest.mark.release
@pytest.mark.dist
@pytest.mark.deepspeed
@pytest.mark.timeout(3600)
def test_fresh_draws_train_as_in_one_process_or_are_refused() -> None:
    first = int(os.environ.get(FRESH) or time.time())
    print(f"configs from seed {first} on ({FRESH}={first} draws them again)")
    campaign = Campaign(limit_s=120)
    campaign.run(range(first, first + 1000), until=time.monotonic() + 60 * FRESH_MINUTES)
    assert not told(campaign), told(campaign)


def test_every_key_is_drawn_or_left_out_for_a_reason() -> None:
    keys = {f"{section}.{name}" for section, fields in section_fields().items() for name in fields}
    assert set(choices()) | LEFT_OUT.keys() >= keys
    assert not NUMBERS.keys() - keys, "keys that are gone"
    assert len(choices()) > 80
