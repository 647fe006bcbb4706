"""Random module graphs under every engine, compared with one process that trains the same graph in plain torch.

`python -m tests.strategies.graphs --seeds 0:40 --engines ddp,fsdp` runs a campaign.
"""
