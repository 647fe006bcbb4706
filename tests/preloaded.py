"""What ranks started by `run_ranks` need, imported once in the server that they are forked from.

Nothing here may start a thread or touch a GPU: neither survives a fork.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.ops.adam  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

import shardkit.config.load
import shardkit.run.trainer  # noqa: F401

torch.set_num_threads(1)
