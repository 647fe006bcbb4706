"""The frozen model under an adapter: checkpoints leave it out, and name it by a digest of its weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import CheckpointError, ConfigError
from ..strategies import Strategy

_CHUNK = 2**18
_BITS = 48
_MIX = 0x1E3779B97F4A7C15


def tensor_sum(values: torch.Tensor, start: int = 0) -> int:
    """A number that stands for a range of a flattened tensor; the numbers of its ranges add up, modulo 2^48.

    Each element's bits are multiplied by an odd number that depends on its index.

    Args:
        values: 1-D.
        start: index of the first element in the whole tensor.
    """
    size = values.element_size()
    words = values.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for at in range(0, words.numel(), _CHUNK):
        bits = words[at : at + _CHUNK].long()
        keys = torch.arange(start + at, start + at + bits.numel(), device=values.device).mul_(_MIX)
        total += bits.mul_(keys.bitwise_xor_(keys >> 31).bitwise_or_(1)).sum()
    found: int = int(total.item()) % 2**_BITS
    return found


def digest_of(sums: Mapping[str, int]) -> str:
    """One digest for all tensors, by name."""
    text = "\n".join(f"{name} {value % 2**_BITS}" for name, value in sorted(sums.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@torch.no_grad()
def base_digest(strategy: Strategy, names: Mapping[str, str], group: dist.ProcessGroup) -> str:
    """Digest of a wrapped model's frozen weights, in the types that it keeps them in; collective.

    Args:
        names: `model.<fqn>` of each frozen parameter → its name in the model without the adapter.
        group: a gloo group of all ranks.
    """
    order = {name: index for index, name in enumerate(sorted(names))}
    sums = torch.zeros(len(order), dtype=torch.int64)
    for shard in strategy.shards():
        if shard.name in order and shard.replica == 0 and shard.local.numel():
            sums[order[shard.name]] += tensor_sum(shard.local, shard.start)
    dist.all_reduce(sums, group=group)
    return digest_of({names[name]: int(sums[index]) for name, index in order.items()})


def digest_of_pieces(tensors: Iterable[tuple[str, Iterable[torch.Tensor]]]) -> str:
    """The same digest of tensors that come as consecutive 1-D pieces."""
    sums = dict[str, int]()
    for name, pieces in tensors:
        at = 0
        sums[name] = 0
        for piece in pieces:
            sums[name] += tensor_sum(piece, at)
            at += piece.numel()
    return digest_of(sums)


class FrozenBase:
    """The frozen parameters of a run that trains an adapter, and the entry about them in its checkpoints.

    Attributes:
        names: `model.<fqn>` of each frozen parameter → its name in the model without the adapter.
        about: the adapter's settings and, once `identify` was called, the base's digest, type and source.
    """

    def __init__(
        self, model: nn.Module, settings: Mapping[str, Any], base_name: Callable[[str], str | None], source: str | None
    ) -> None:
        """
        Args:
            model: wrapped by any engine.
            source: path of the base's weights; `None` if they were drawn.
        """
        plain = {fqn.removeprefix("module."): param for fqn, param in model.named_parameters()}
        frozen = {fqn: param for fqn, param in plain.items() if not param.requires_grad}
        self.names = {f"model.{fqn}": base_name(fqn) or fqn for fqn in frozen}
        self._dtype = str(next(iter(frozen.values())).dtype).removeprefix("torch.")
        self._source = None if source is None else os.path.abspath(os.path.expanduser(source))
        self.about: dict[str, Any] = {**settings}
        numel = [int(getattr(param, "ds_numel", param.numel())) for param in plain.values()]
        trained = sum(n for n, param in zip(numel, plain.values(), strict=True) if param.requires_grad)
        self.line = f"{trained:,} of {sum(numel):,} values are trained ({trained / sum(numel):.2%})"

    def identify(self, strategy: Strategy, group: dist.ProcessGroup) -> None:
        """Compute the digest; collective."""
        digest = base_digest(strategy, self.names, group)
        self.about["base"] = {"digest": digest, "dtype": self._dtype, "source": self._source}

    def check(self, found: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another adapter, or of one over another base.

        Args:
            found: what the checkpoint says about its adapter.

        Raises:
            ConfigError: a setting differs.
            CheckpointError: the base's weights differ.
        """
        base = found.get("base")
        if not isinstance(base, dict):
            raise CheckpointError(
                "the checkpoint does not say which model its adapter is for", "use another checkpoint"
            )
        for key, value in self.about.items():
            if key not in ("base", "fan_in_fan_out") and found.get(key) != value:
                raise ConfigError(
                    f"adapter.{key}={_shown(value)}, but the checkpoint's is {_shown(found.get(key))}",
                    f"set adapter.{key}={_shown(found.get(key))}",
                )
        mine = self.about["base"]
        if mine["dtype"] != base.get("dtype"):
            raise CheckpointError(
                f"the frozen model is {mine['dtype']} in this run, it was {base.get('dtype')} under the saved adapter",
                "resume with the precision.mode that it was saved with",
            )
        if mine["digest"] != base.get("digest"):
            here, there = (one.get("source") or "initial values" for one in (mine, base))
            raise CheckpointError(
                f"the frozen model is not the one that the saved adapter was trained on: here {here}, there {there}, "
                "and their weights differ",
                f"set model.init_from to the weights it was trained on ({there})",
            )


def _shown(value: object) -> str:
    """A setting as a command line has it."""
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value).lower()


def check_adapter(base: FrozenBase | None, found: Any) -> None:
    """Refuse a checkpoint with an adapter in a run without one, and the other way round; see `FrozenBase.check`.

    Args:
        base: the run's; None if it trains the whole model.
        found: the entry in the checkpoint's manifest; None if it holds a whole model.

    Raises:
        ConfigError, CheckpointError: the checkpoint does not suit the run.
    """
    if base is None and found is not None:
        raise ConfigError(
            "the checkpoint holds an adapter, and this run has none", "set adapter.type and its keys as they were"
        )
    if base is not None and found is None:
        raise ConfigError(
            "the checkpoint holds no adapter, but adapter.type is set",
            "start with its weights instead: model.init_from in place of run.resume",
        )
    if base is not None and found is not None:
        base.check(found if isinstance(found, dict) else {})
