"""Configs drawn at random over all keys and tasks: trained on two ranks as on one, or refused by name.

`python -m tests.config.draws --seeds 0:100` runs a campaign.
"""
