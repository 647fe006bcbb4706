"""Programs of threads in which a release trained wrongly: the smallest that show it, for the release that is installed.

`shardkit prove --against 'python tests/prove/found.py trainer --batch 12' -- torchrun --nproc-per-node 2
tests/prove/found.py trainer --batch 2 --accumulate 3`; docs/prove.md has the table of what it answers.
"""

from __future__ import annotations

import argparse
import os
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

warnings.filterwarnings("ignore")
VOCABULARY = 97


class Rows(Dataset[torch.Tensor]):
    """96 texts of random tokens, of 4 to 24 unless `even`."""

    def __init__(self, *, even: bool) -> None:
        self.even = even

    def __len__(self) -> int:
        return 96

    def __getitem__(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        size = 16 if self.even else int(torch.randint(4, 25, (1,), generator=generator))
        return torch.randint(3, VOCABULARY, (size,), generator=generator)


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=4, vocab_size=VOCABULARY, **settings))


class Plain(nn.Module):
    """A model of one's own for the Trainer: it takes no keyword arguments for its loss, which is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64)
        self.down, self.head = nn.Linear(64, 64), nn.Linear(64, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
        logits = self.head(self.down(F.gelu(self.up(self.embed(input_ids)))))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def trainer(a: argparse.Namespace, model: Any, **settings: Any) -> None:
    """transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="trained", per_device_train_batch_size=a.batch, gradient_accumulation_steps=a.accumulate,
        max_steps=8, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-3,
        remove_unused_columns=False, max_grad_norm=0.0, **settings,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Rows(even=a.even), data_collator=collate).train()


def adapter(a: argparse.Namespace) -> None:
    """LoRA on a model that `from_pretrained` has sharded: with the Trainer, or in a loop of one's own (`--manual`)."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    world, path = int(os.environ.get("WORLD_SIZE", 1)), "found_lora"
    if world > 1:
        dist.init_process_group("gloo")
    if int(os.environ.get("RANK", 0)) == 0 and not os.path.exists(f"{path}/model.safetensors"):
        torch.manual_seed(0)
        llama().save_pretrained(path)
    sharding: dict[str, Any] = {}
    if world > 1:
        from transformers.distributed import DistributedConfig

        dist.barrier()
        sharding["distributed_config"] = DistributedConfig(fsdp_size=world)
    model = LlamaForCausalLM.from_pretrained(path, **sharding)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    if not a.manual:
        trainer(a, model)
        return
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    rows = Rows(even=True)
    sampler: Any = DistributedSampler(rows, world, int(os.environ.get("RANK", 0)))
    for batch in DataLoader(rows, a.batch, collate_fn=collate, sampler=sampler):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(a: argparse.Namespace) -> None:
    """An adapter under FSDP2 that Accelerate gathers for rank 0 to save: prove it with `--until save`."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator(cpu=True)  # which shards nothing on the CPU by itself
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="FULL_STATE_DICT")
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = Rows(even=True)
    for batch in DataLoader(rows, a.batch, collate_fn=collate, sampler=DistributedSampler(rows)):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        save_fsdp_model(plugin, accelerator, model, "trained", adapter_only=True)


def efficient(a: argparse.Namespace) -> None:
    """LoRA under FSDP2 whose other ranks load nothing, as axolotl does it: needs cards, as Accelerate shards there."""
    import axolotl.loaders.utils
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, init_empty_weights
    from peft import LoraConfig, get_peft_model

    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    )  # fmt: skip
    with init_empty_weights() if accelerator.process_index else nullcontext():
        model = llama()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    materialize = getattr(axolotl.loaders.utils, "materialize_trainable_meta_params", None)
    if materialize is not None and accelerator.process_index:  # the faulty release has no such function
        materialize(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    loader = DataLoader(Rows(even=True), a.batch, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


def megatron(a: argparse.Namespace) -> None:
    """Megatron-core's tensor parallel layers, on the CPU: all ranks share the rows. `--smooth` smooths labels."""
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core import tensor_parallel as tp

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    settings = {"config": ModelParallelConfig(use_cpu_initialization=True), "init_method": nn.init.xavier_normal_}

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = tp.VocabParallelEmbedding(96, 32, **settings)
            self.up = tp.ColumnParallelLinear(32, 64, gather_output=False, **settings)
            linear = {"input_is_parallel": True, "bias": True, "skip_bias_add": False}
            self.down = tp.RowParallelLinear(64, 32, **linear, **settings)
            self.head = tp.ColumnParallelLinear(32, 96, gather_output=False, **settings)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            logits, _ = self.head(x + self.down(F.gelu(self.up(x)[0]))[0])
            smoothing = 0.1 if a.smooth else 0.0
            loss: torch.Tensor = tp.vocab_parallel_cross_entropy(logits[:, :-1].contiguous(), tokens[:, 1:], smoothing)
            return loss.mean()

    model, rows = Parallel(), Rows(even=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in DataLoader(rows, a.batch, shuffle=True, generator=torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        model(tokens - 1).backward()
        optimizer.step()


def replicas(a: argparse.Namespace) -> None:
    """AutoModel's seeds by rank, and what it does with weights that tensor parallelism does not split."""
    from nemo_automodel.components.training.rng import StatefulRNG
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    StatefulRNG(seed=0, ranked=True)
    model = Plain()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    try:
        from nemo_automodel.components.distributed import tp_replicas
    except ImportError:  # the faulty release has no such module
        tp_replicas = None
    if tp_replicas is not None:
        tp_replicas.broadcast_tp_replicas([model], mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in DataLoader(Rows(even=True), a.batch, collate_fn=collate):
        model(**batch)["loss"].backward()
        if tp_replicas is not None:
            tp_replicas.synchronize_tp_replica_gradients([model], mesh)
        optimizer.step()
        optimizer.zero_grad()


def zero(a: argparse.Namespace) -> None:
    """DeepSpeed's ZeRO: its own accumulation, or several backwards before a step (`--manual`)."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its extension would be compiled for minutes
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    manual = a.manual and not a.mended
    config = {
        "train_micro_batch_size_per_gpu": a.batch, "gradient_accumulation_steps": 1 if a.manual else a.accumulate,
        "zero_optimization": {"stage": a.stage}, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }  # fmt: skip
    model = Plain()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    sampler: Any = DistributedSampler(Rows(even=True), world, rank, seed=1)
    batches = iter(DataLoader(Rows(even=True), a.batch, collate_fn=collate, sampler=sampler, drop_last=True))
    for _ in range(3):
        for number in range(a.accumulate):
            loss = engine(**{name: tensor.to(engine.device) for name, tensor in next(batches).items()})["loss"]
            if not a.manual:
                engine.backward(loss)
                engine.step()
                continue
            if not manual:
                engine.set_gradient_accumulation_boundary(number == a.accumulate - 1)
            engine.backward(loss / a.accumulate)
        if a.manual:
            engine.step()


def ppo(a: argparse.Namespace) -> None:
    """verl's actor under FSDP2, as it is or with the counts of tokens that its engine gives (`--mended`)."""
    from torch.distributed.fsdp import fully_shard
    from verl import DataProto
    from verl.workers.actor.dp_actor import DataParallelPPOActor
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig

    dist.init_process_group("gloo")
    model, rows = llama(), Rows(even=False)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=a.batch * a.accumulate, ppo_micro_batch_size_per_gpu=a.batch,
        use_torch_compile=False, fsdp_config=FSDPEngineConfig(dtype="float32", strategy="fsdp2"),
    )  # fmt: skip
    actor = DataParallelPPOActor(config, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    sampler: Any = DistributedSampler(rows, dist.get_world_size(), dist.get_rank(), seed=1)
    batches = iter(DataLoader(rows, a.batch, sampler=sampler, drop_last=True, collate_fn=list))
    for _ in range(3):
        batch = collate([row for _ in range(a.accumulate) for row in next(batches)])
        ids, mask = batch["input_ids"], batch["attention_mask"]
        tokens = mask[:, 4:].sum()
        dist.all_reduce(tokens)
        if a.mended:  # the actor divides by the number of micro-batches, too
            ranks = dist.get_world_size() * a.accumulate
            config.global_batch_info.update(batch_num_tokens=tokens.item(), dp_size=ranks)
        tensors = {
            "input_ids": ids, "attention_mask": mask, "responses": ids[:, 4:], "response_mask": mask[:, 4:],
            "position_ids": torch.arange(ids.shape[1]).expand_as(ids), "old_log_probs": torch.zeros(ids[:, 4:].shape),
            "advantages": (ids[:, :1] / VOCABULARY).expand(-1, ids.shape[1] - 4),
        }  # fmt: skip
        actor.update_policy(DataProto.from_dict(tensors, meta_info={"temperature": 1.0}))


def plain(a: argparse.Namespace) -> None:
    """One process, for `zero`."""
    torch.manual_seed(0)
    model = Plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in DataLoader(Rows(even=True), a.batch, collate_fn=collate, shuffle=True):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    for name, default in (("batch", 2), ("accumulate", 1), ("stage", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for flag in ("even", "mended", "manual", "smooth"):
        parser.add_argument(f"--{flag}", action="store_true")
    a = parser.parse_args()
    torch.manual_seed(0)
    programs = {
        "trainer": lambda: trainer(a, llama()), "own-model": lambda: trainer(a, Plain()),
        "adapter": lambda: adapter(a), "saved": lambda: saved(a), "efficient": lambda: efficient(a),
        "megatron": lambda: megatron(a), "replicas": lambda: replicas(a), "zero": lambda: zero(a),
        "ppo": lambda: ppo(a), "plain": lambda: plain(a),
    }  # fmt: skip
    programs[a.program]()


if __name__ == "__main__":
    main()
