"""Models whose constructors draw their values, what an engine makes of them, and the exchange of written ranges."""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from shardkit.parallel.weights import Weights, even_range, exchange
from shardkit.run.job import start
from tests.parallel.drawing import Layers, counted

SEED = 7
_SIZES = {"vocab_size": 4200, "hidden_size": 64, "intermediate_size": 4200, "num_hidden_layers": 1}
_SIZES |= {"num_attention_heads": 4}


def llama() -> nn.Module:
    """Tied, and with a zero row in the embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZES, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=3))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_SIZES))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**_SIZES, num_key_value_heads=2, num_local_experts=4))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {key: value for key, value in _SIZES.items() if key != "vocab_size"}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8))


def swin2sr() -> nn.Module:
    from transformers import Swin2SRConfig, Swin2SRForImageSuperResolution

    sizes = {"image_size": 16, "embed_dim": 300, "depths": [1], "num_heads": [6], "window_size": 4}
    return Swin2SRForImageSuperResolution(Swin2SRConfig(**sizes, mlp_ratio=4.0))


OWN_SHAPES = {"below": (511, 512), "at_the_limit": (512, 512), "above": (600, 601)}


def of_own_generator() -> dict[str, torch.Tensor]:
    """Values of one generator that draws a tensor after the other."""
    generator, values = torch.Generator().manual_seed(5), {}
    for name, shape in OWN_SHAPES.items():
        values[name] = nn.init.xavier_normal_(torch.empty(shape), generator=generator)
        nn.init.trunc_normal_(values[name][:100], std=0.3, generator=generator)
    return values


class Own(Layers):
    """`Layers`, an LSTM that lists its parameters, a copy of another parameter, a norm of the weights, and parameters
    that a generator of the model's own draws."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(300, 300)
        self.copied = nn.Linear(502, 601)
        self.copied.weight.data.copy_(self.frozen.weight * 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(600, 600))
        self.turned_too = nn.utils.parametrizations.orthogonal(nn.Linear(600, 600))
        with torch.no_grad():
            self.down.weight[:7].fill_(1.5)
        self.seeded = nn.ParameterDict(of_own_generator())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama, "bert": bert, "mixtral": mixtral, "vit": vit, "swin2sr": swin2sr, "own": Own,
}  # fmt: skip


def digests(model: nn.Module) -> dict[str, str]:
    """Name → digest of the bytes of every parameter and buffer."""
    return {
        name: hashlib.sha256(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in model.state_dict().items()
    }


def constructed(strategies: list[str], models: list[str]) -> dict[str, dict[str, Any]]:
    """ "<strategy> <model>" → digests of the tensors that the wrapped model holds, and the values drawn for them."""
    out: dict[str, dict[str, Any]] = {}
    for strategy in strategies:
        for name in models:
            settings = {"parallel.strategy": strategy, "run.device": "cpu", "train.seed": SEED}
            with counted() as made, start(None, settings) as job:
                wrapped: Any = job.wrap(MODELS[name])
                model = wrapped.module
                lists = [module for module in model.modules() if isinstance(module, nn.LSTM)]
                for lstm in lists:
                    assert all(a is b for a, b in zip(lstm._flat_weights, lstm.parameters(), strict=True))
                out[f"{strategy} {name}"] = {"digests": digests(model), "drawn": made[0].values_drawn}
                del wrapped, model, lists
            gc.collect()
    return out


def large(name: str) -> tuple[dict[str, str], int, int]:
    """Digests of a model that one process draws at once; the values drawn for it, and those drawn in parts."""
    at_once, parts = Weights(SEED), Weights(SEED)
    model = at_once.build(MODELS[name], None)
    parts.build(MODELS[name], None, later="unwritten")
    return digests(model), at_once.values_drawn, at_once.values_drawn - parts.values_drawn


@contextmanager
def messages() -> Iterator[list[str]]:
    """The collectives that are called inside, and what is sent to one rank."""
    called: list[str] = []

    def noted(name: str, run: Any) -> Any:
        def noting(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return run(*args, **kwargs)

        return noting

    names = ("all_gather", "all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "isend")
    with patch.multiple(dist, **{name: noted(name, getattr(dist, name)) for name in names}):
        yield called


class Copied(nn.Module):
    """Two layers with the weight of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(600, 600) for _ in range(3))
        for layer in (self.second, self.third):
            layer.weight.data.copy_(self.first.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x) + self.second(x) + self.third(x)
        return out


def said() -> list[str]:
    """This rank's warnings about initial values while a model is wrapped."""
    messages: list[str] = []
    noting = logging.Handler()
    noting.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardkit.parallel.weights").addHandler(noting)
    with start(None, {"parallel.strategy": "ddp", "run.device": "cpu"}) as job:
        job.wrap(Copied)
    return messages


class Many(nn.Module):
    """Forty parameters, of 5.5 MB together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(261, 263) for _ in range(20)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x) for layer in self.layers), torch.zeros(()))


def exchanged() -> dict[str, int]:
    """Exchange ranges of tensors of several types, then those of engines; case → number of collectives."""
    out: dict[str, int] = {}
    with start(None, {"parallel.strategy": "ddp", "run.device": "cpu"}) as job:
        rank, size = job.world.rank, job.world.size
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(n, generator=generator) for n in (0, 1, 3, 1_400_003)]
        tensors += [tensors[-1] > 0, tensors[-1].bfloat16(), torch.arange(5), torch.tensor([torch.nan, -0.0, 0.0])]
        partial = [torch.full_like(part, 1) for part in tensors]
        for part, tensor in zip(partial, tensors, strict=True):
            start_at, end = even_range(len(part), rank, size)
            part[start_at:end] = tensor[start_at:end]
        with messages() as called:
            exchange(partial)
        for part, tensor in zip(partial, tensors, strict=True):
            assert torch.equal(part.view(torch.uint8), tensor.view(torch.uint8)), part.dtype
        out["tensors"] = len(called)
    for strategy in ("ddp", "zero1", "zero2"):
        with start(None, {"parallel.strategy": strategy, "run.device": "cpu"}) as job:
            wrapped: Any = job.wrap(Many)
            for shard in job.strategy.shards():
                if shard.name.startswith("model."):
                    shard.local.copy_(torch.arange(shard.start, shard.start + shard.local.numel()) * 2.0)
            with messages() as called:
                job.strategy.weights_changed()
            for name, param in wrapped.module.named_parameters():
                assert torch.equal(param.flatten(), torch.arange(param.numel()) * 2.0), name
            out[strategy] = len(called)
            del wrapped, shard, param
        gc.collect()
    return out
