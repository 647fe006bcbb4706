"""Print FSDP2's units of a small model: Accelerate's, and those of a plan of its loop. For `test_other_loops`."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


def units(model: nn.Module) -> list[Any]:
    """The parameters of each unit in model order, and whether it is resharded after its forward."""
    groups: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                groups[id(group)] = group
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        [sorted(names[id(param.sharded_param)] for param in group.fsdp_params), group._reshard_after_forward]
        for group in groups.values()
    ]


def main(tied: bool) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardkit.plan.simulate.engines import shard_tail

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}

    def model() -> Any:
        return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, tie_word_embeddings=tied))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
    )
    state: Any = SimpleNamespace(fsdp_plugin=plugin)
    job = SimpleNamespace(state=state, mixed_precision="no", is_main_process=True, device="cpu")
    print(json.dumps(units(fsdp2_prepare_model(job, model()))))

    planned = model()
    for block in planned.model.layers:
        fully_shard(block, reshard_after_forward=True)
    shard_tail(planned, True, {})
    fully_shard(planned, reshard_after_forward=False)
    print(json.dumps(units(planned)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] == "1")
