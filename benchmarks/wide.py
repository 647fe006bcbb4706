"""Tensor and expert parallelism over the shortest hand-written loops with the same collectives, on 2 CPU ranks.

`python -m benchmarks.wide` trains the same weights and rows on both sides, steps in turns: a Llama whose layers two
ranks share as Megatron-LM does, and a Qwen 3 MoE under FSDP2 whose ranks send each other rows. Runs that split nothing
are compared with the commit before parallel.tp and parallel.ep.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import bare
from .common import earlier, publish, stamp
from .context import GOAL, ROWS, SEQ, unsplit
from .models import llama
from .options import options, samples
from .overhead import WARMUP, on_two_ranks, overrides, paired_figures, paired_steps, write_tokens

BEFORE = "afb83096^"
"""The commit before both keys."""
VOCAB = 256
_SIZES: dict[str, Any] = {"depth": 4, "vocab": VOCAB, "positions": SEQ}
MODELS: dict[str, dict[str, Any]] = {
    **{
        part: llama(width, width * 43 // 16, heads=heads, kv_heads=heads, model_type="llama", **_SIZES)
        for part, width, heads in (("tp", 256, 4), ("tp_512", 512, 8), ("tp_1024", 1024, 16))
    },
    **{
        part: llama(
            width, width * 43 // 16, heads=heads, kv_heads=heads, model_type="qwen3_moe", **_SIZES,
            moe_intermediate_size=width, num_experts=8, num_experts_per_tok=2, head_dim=64,
        )
        for part, width, heads in (("ep", 256, 4), ("ep_512", 512, 8))
    },
}  # fmt: skip


def write_model(part: str, folder: str) -> str:
    """Save the model that both sides read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    path = f"{folder}/{part}"
    config = AutoConfig.for_model(**MODELS[part], tie_word_embeddings=False, use_cache=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def by_megatron(model: Any) -> bare.Step:
    """Two all-reduces a layer in forward and two in backward, and the loss from each rank's half of the vocabulary."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn

    rank, size = dist.get_rank(), 2

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            grad = grad.contiguous()
            dist.all_reduce(grad)
            return grad

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            dist.all_reduce(x)
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, targets: Any) -> Any:
            highest = logits.amax(1, keepdim=True)
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            logits = logits - highest
            here = (targets // (VOCAB // size) == rank)[:, None]
            columns = (targets % (VOCAB // size))[:, None]
            chosen = logits.gather(1, columns) * here
            exps = logits.exp_()
            sums, chosen = parts = torch.stack([exps.sum(1, keepdim=True), chosen])
            dist.all_reduce(parts)
            ctx.save_for_backward(exps.div_(sums).scatter_add_(1, columns, -here.float()))
            return (sums.log() - chosen).sum()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return ctx.saved_tensors[0] * grad, None

    cut: list[Any] = []

    def share(layer: Any, dim: int) -> None:
        layer.weight = nn.Parameter(layer.weight.detach().chunk(size, dim)[rank].clone())
        cut.append(layer.weight)

    decoder, embeddings = model.model, model.model.embed_tokens
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for column in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            share(column, 0)
        for row in (attention.o_proj, mlp.down_proj):
            share(row, 1)
            row.register_forward_hook(lambda module, args, out: Sum.apply(out))
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda module, args, out: Copy.apply(out))
    decoder.norm.register_forward_hook(lambda module, args, out: Copy.apply(out))
    share(embeddings, 0)
    share(model.lm_head, 0)

    def embed(tokens: Any) -> Any:
        here = (tokens // (VOCAB // size) == rank)[..., None]
        return Sum.apply(F.embedding(tokens % (VOCAB // size), embeddings.weight) * here)

    embeddings.forward = embed

    def loss(tokens: Any, targets: Any) -> Any:
        hidden = decoder(input_ids=tokens).last_hidden_state
        return Loss.apply(F.linear(hidden.flatten(0, 1), model.lm_head.weight), targets.flatten())

    def clip() -> None:
        norm = nn.utils.get_total_norm([param.grad for param in cut]).square()
        dist.all_reduce(norm)
        held = {id(param) for param in cut}
        norm += nn.utils.get_total_norm([p.grad for p in model.parameters() if id(p) not in held]).square()
        nn.utils.clip_grads_with_norm_(model.parameters(), bare.MAX_NORM, norm.sqrt())

    model.forward = loss
    return bare.loop(model, bare.adamw(model), clip=clip)


def by_exchange(model: Any) -> bare.Step:
    """Two all-to-alls of rows around a layer's experts each way, and FSDP2 for all else."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed._functional_collectives import all_to_all_single_autograd
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size, group = dist.get_rank(), 2, dist.group.WORLD
    held: list[Any] = []
    mesh = init_device_mesh("cpu", (size,))

    def exchanged(compute: Callable[..., Any], n: int) -> Callable[..., Any]:
        def forward(hidden: Any, index: Any, weights: Any) -> Any:
            experts, k = index.flatten(), index.shape[-1]
            order = experts.argsort(stable=True)
            counts = torch.bincount(experts, minlength=n * size)
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts)
            sent, received = torch.stack([counts, arriving]).view(2, size, n).sum(2).tolist()
            rows = all_to_all_single_autograd(hidden[order // k], received, sent, group)
            local = torch.arange(n).repeat(size).repeat_interleave(arriving)
            out = compute(rows, local[:, None], rows.new_ones(len(rows), 1))
            back = all_to_all_single_autograd(out, sent, received, group)
            return (back[order.argsort()].view(len(hidden), k, -1) * weights[..., None]).sum(1)

        return forward

    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name, param in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(param.detach().chunk(size)[rank].clone()))
        experts.num_experts //= size
        experts.forward = exchanged(experts.forward, experts.num_experts)
        held += experts.parameters()
        fully_shard(layer, mesh=mesh, ignored_params=set(experts.parameters()))
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=set(held))

    forward = model.forward

    def loss(tokens: Any, targets: Any) -> Any:
        logits = forward(input_ids=tokens).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    # torch updates tensors and DTensors of one group not together.
    groups = bare.groups(model)
    local = {id(param) for param in held}
    groups[0]["params"] = [param for param in groups[0]["params"] if id(param) not in local]
    groups.append({"params": held, "weight_decay": bare.WEIGHT_DECAY})
    dense_params = [param for group in groups[:2] for param in group["params"]]

    def clip() -> None:
        for param in held:
            param.grad /= size  # a sum over the ranks' rows, and FSDP2 averages all others
        norm = nn.utils.get_total_norm([param.grad for param in held]).square()
        dist.all_reduce(norm)
        dense: Any = nn.utils.get_total_norm([param.grad for param in dense_params])
        norm = (norm + dense.full_tensor().square()).sqrt()
        for params in (held, dense_params):
            nn.utils.clip_grads_with_norm_(params, bare.MAX_NORM, norm)

    model.forward = loss
    return bare.loop(model, bare.adamw_of(groups), clip=clip)


LOOPS: dict[str, Callable[[Any], bare.Step]] = {"tp": by_megatron, "ep": by_exchange}


def measure_pairs(part: str, model: str, tokens: str, folder: str, pairs: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    axis, reference = part[:2], [f"model.{key}={value}" for key, value in bare.SIZES.items()]
    settings = [
        *(word for word in overrides("fsdp", tokens, f"{folder}/run-{part}", pairs + WARMUP) if word not in reference),
        "task.name=hf_causal_lm", f"model.init_from={model}", f"parallel.{axis}=2", f"train.seq_len={SEQ}",
        f"train.micro_batch_size={ROWS}",
    ]  # fmt: skip
    theirs = LOOPS[axis](AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    # Ranks that share layers have the same rows; those that hold different experts have their own.
    ranks = (0, 1) if axis == "tp" else (dist.get_rank(), 2)
    micro = bare.micro_batches(tokens, SEQ, ROWS, *ranks)
    data = iter(lambda: [next(micro) for _ in range(bare.ACCUM)], None)
    return paired_steps(settings, theirs, data, pairs)


def main() -> None:
    args = options(__doc__, pairs=samples(40), parts=(*MODELS, "unsplit"))
    result = {**earlier("wide"), "goal": GOAL}
    result.pop("environment", None)
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(Path(folder))
        for part in args.parts:
            if part == "unsplit":
                result[part] = {"measured": stamp(), **unsplit(BEFORE, tokens, Path(folder), args.pairs)}
            else:
                arguments = {"model": write_model(part, folder), "tokens": tokens, "folder": folder}
                paired = on_two_ranks(measure_pairs, part=part, pairs=args.pairs, **arguments)
                result[part] = {"measured": stamp(), **paired_figures(paired)}
            publish("wide", result)


if __name__ == "__main__":
    main()
