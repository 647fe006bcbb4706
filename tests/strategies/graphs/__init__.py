"""Random module graphs under every engine, compared with one process that trains the same graph in plain torch.

`SHARDKIT_GRAPHS=0:40 pytest -m release tests/strategies/test_graphs.py` runs a campaign.
"""
