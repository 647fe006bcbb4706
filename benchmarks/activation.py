"""The memory, recomputation and time of each activation policy, and the saving of chunked cross-entropy.

`python -m benchmarks.activation` runs the reference transformer at fixed sizes under every policy, on the CPU, once
with math attention (scores [B, heads, T, T] exist) and once with torch's fused one. Bytes are counted storage by
storage by the tensor tracker, FLOPs by torch's counter; times are interleaved, each against the step of the same round
that keeps everything.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from shardkit.activation import checkpoint_activations, offload_activations
from shardkit.config.schema import ActivationConfig, ModelConfig
from shardkit.memory import TensorTracker
from shardkit.models.transformer import Head, Transformer, init_parameter

from .common import in_turns, paired_ratio, publish
from .options import options, samples

BATCH, SEQ = 1, 1024
MODEL = ModelConfig(vocab_size=256, max_seq_len=SEQ, d_model=256, n_layers=6, n_heads=4, loss_chunk_size=1024)
SHOWN = {key: getattr(MODEL, key) for key in ("vocab_size", "d_model", "n_layers", "n_heads", "loss_chunk_size")}
LOSS = {"tokens": 8192, "d_model": 256, "vocab_size": 50257, "chunk_size": 1024}
GOALS = {"selective_share_of_full_math": 0.6, "logits_peak_reduction": 8}
BACKENDS = {"math": [SDPBackend.MATH], "sdpa": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"policy": "full"},
    "every_k": {"policy": "every_k", "every_k": 2},
    "sqrt": {"policy": "sqrt"},
    "selective": {"policy": "selective"},
    "selective_op": {"policy": "selective_op"},
    "none + offload": {"offload": "cpu"},
    "full + offload": {"offload": "cpu", "policy": "full"},
}
BUDGETS = (1.0, 0.5, 0.0)
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def build(settings: dict[str, Any], compiled: bool = False) -> Transformer:
    """The reference model, the same weights each time, with a technique applied."""
    model = Transformer(MODEL)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        init_parameter(MODEL, name, parameter.data, torch.Generator().manual_seed(index))
    config = ActivationConfig(**settings)
    blocks = list(model.blocks)
    checkpoint_activations(model, blocks, config, compiled=compiled)
    offload_activations(model, blocks, config, torch.device("cpu"))
    if compiled:
        for block in blocks:
            block.compile()
    return model.train()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, MODEL.vocab_size, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def step(model: nn.Module) -> float:
    """Seconds of one forward and backward."""
    tokens, targets = batch()
    began = time.perf_counter()
    model(tokens, targets).backward()
    return time.perf_counter() - began


def count_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes that a forward keeps for backward, on the device and on the host, and the step's peak above the state."""
    step(model)  # gradients exist, and count as state
    moved = moved_bytes(model)
    tokens, targets = batch()
    with TensorTracker() as tracker:
        tracker.see([model, tokens, targets])
        tracker.see(model)
        before = tracker.current("cpu")
        loss = model(tokens, targets)
        alive = tracker.current("cpu") - before
        loss.backward()
        peak = tracker.peak("cpu") - before
    moved = moved_bytes(model) - moved
    return {"saved": alive - moved, "on_host": moved, "peak": peak}


def moved_bytes(model: nn.Module) -> int:
    """Bytes copied to the host so far."""
    wrapped = model.blocks[0].forward  # type: ignore[index,union-attr]
    offloader = getattr(getattr(wrapped, "func", None), "__self__", None)
    return int(getattr(offloader, "moved_bytes", 0))


def count_flops(model: nn.Module, backward: bool = True) -> int:
    """FLOPs of matrix products and attention; a causal mask is not discounted."""
    formulas: dict[Any, Any] = {  # torch counts its GPU kernels only
        FUSED: lambda q, k, v, *rest, **more: sdpa_flop_count(q, k, v),  # type: ignore[no-untyped-call]
        FUSED_BACKWARD: lambda g, q, k, v, *rest, **more: sdpa_backward_flop_count(g, q, k, v),  # type: ignore[no-untyped-call]
    }
    tokens, targets = batch()
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        loss = model(tokens, targets)
        if backward:
            loss.backward()
    return int(counter.get_total_flops())


def time_rounds(models: dict[str, nn.Module], rounds: int, base: str) -> dict[str, dict[str, Any]]:
    """Seconds per step, interleaved, and the ratio to `base` round by round; the first one rotates."""
    warm = in_turns({name: partial(step, model) for name, model in models.items()}, rounds, warmup=1)
    return {
        name: {"ratio": paired_ratio(steps, warm[base]), "median_s": median(steps), "samples": steps}
        for name, steps in warm.items()
    }


def measure_backend(backend: str, rounds: int) -> dict[str, Any]:
    with sdpa_kernel(BACKENDS[backend]):
        models: dict[str, nn.Module] = {name: build(settings) for name, settings in POLICIES.items()}
        sizes = {name: count_bytes(model) for name, model in models.items()}
        flops = {name: count_flops(model) for name, model in models.items()}
        forward = count_flops(models["none"], backward=False)
        times = time_rounds(models, rounds, "none")
        gradients = {name: first_gradients(settings) for name, settings in POLICIES.items()}
    base = sizes["none"]["saved"]
    policies = {
        name: {
            **sizes[name],
            "recompute_share": (flops[name] - flops["none"]) / forward,
            "time": times[name],
            "gradients_equal": all(map(torch.equal, gradients[name], gradients["none"])),
        }
        for name in POLICIES
    }
    share = (base - sizes["selective"]["saved"]) / (base - sizes["full"]["saved"])
    return {"policies": policies, "forward_flops": forward, "selective_share_of_full": share}


def first_gradients(settings: dict[str, Any]) -> list[torch.Tensor]:
    model = build(settings)
    step(model)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def measure_budgets(backend: str, steps: int) -> dict[str, Any]:
    """Compiled blocks at each budget, one after the other, because a process shares compiled code."""
    results: dict[str, Any] = {}
    with sdpa_kernel(BACKENDS[backend]):
        for budget in BUDGETS:
            model = build({"policy": "budget", "budget": budget}, compiled=True)
            step(model)  # compiles
            saved = packed_bytes(model, *batch())
            samples = [step(model) for _ in range(steps)]
            results[f"{budget:g}"] = {"saved": saved, "median_s": median(samples), "samples": samples}
    torch.compiler.reset()
    for result in results.values():
        result["time"] = result["median_s"] / results["1"]["median_s"]
    return results


def packed_bytes(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> int:
    """Bytes of the storages that autograd saves, parameters aside: the tracker does not see into compiled code."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), tokens, targets)}
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(tokens, targets).backward()
    return sum(sizes.values())


def measure_loss(chunk_size: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Peak bytes of the output head with its loss, forward and backward, above its inputs."""
    sizes = ModelConfig(d_model=LOSS["d_model"], vocab_size=LOSS["vocab_size"], loss_chunk_size=chunk_size)
    head = Head(sizes).to(dtype)
    generator = torch.Generator().manual_seed(0)
    nn.init.normal_(head.weight, std=0.02, generator=generator)
    hidden = torch.randn(1, LOSS["tokens"], sizes.d_model, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, sizes.vocab_size, (1, LOSS["tokens"]), generator=generator)
    with TensorTracker() as tracker:
        tracker.see([head, hidden, targets])
        before = tracker.current("cpu")
        loss = head(hidden, targets)
        loss.backward()
        peak, gradients = tracker.peak("cpu") - before, tracker.current("cpu") - before
    began = time.perf_counter()
    head(hidden, targets).backward()
    return {"peak": peak, "gradients": gradients, "seconds": time.perf_counter() - began, "loss": loss.item()}


def main() -> None:
    args = options(__doc__, rounds=samples(7))
    attention = {backend: measure_backend(backend, args.rounds) for backend in BACKENDS}
    chunked, whole = measure_loss(LOSS["chunk_size"]), measure_loss(0)
    reduction = whole["peak"] / chunked["peak"]
    publish("activation", {
        "model": SHOWN, "batch": BATCH, "seq": SEQ, "dtype": "float32", "goals": GOALS, "attention": attention,
        "budget": {backend: measure_budgets(backend, args.rounds) for backend in BACKENDS},
        "loss": {**LOSS, "dtype": "float32", "chunked": chunked, "whole": whole, "peak_reduction": reduction},
    })  # fmt: skip


if __name__ == "__main__":
    main()
