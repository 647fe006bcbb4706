"""Configs drawn at random over all keys and tasks: trained on two ranks as on one, or refused by name.

`SHARDKIT_DRAW_SEED=0 pytest -m release tests/config/test_draws.py` runs a campaign.
"""
