"""What ranks started by `run_ranks` need, imported once in the server that they are forked from.

Nothing here may start a thread or touch a GPU: neither survives a fork.
"""

from __future__ import annotations

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DS_ACCELERATOR"] = "cpu"

import cpuinfo
import deepspeed
import deepspeed.ops.adam
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - with torch.compile: by every ZeRO engine
import torch
import torch._dynamo  # by every optimizer
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.cpp_extension

import shardkit.config.load
import shardkit.run.trainer  # noqa: F401
from shardkit.strategies.zero import config

torch.set_num_threads(1)
config.remember_cpu()
cpuinfo.get_cpu_info()
# A rank's collections would go through everything above, and copy the pages of it.
gc.collect()
gc.freeze()
