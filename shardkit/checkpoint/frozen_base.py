"""The frozen model under an adapter. Checkpoints of the adapter leave the model out and identify it by a digest of its
weights."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ..errors import CheckpointError, ConfigError
from ..parallel.blocks import n_values
from ..strategies import Strategy

CHECKSUM = 2
"""How checksums of weights are taken; checkpoints name it. The first way, of versions before 0.3, was `element_sum`."""
_WORD, _BLOCK = 4, 2**16
"""Bytes of a word of a checksum, and words of a block, which fit into a core's cache with their factors."""
_AT_ONCE = 16
"""Blocks that are added up at once, for few launches on a device."""
_BITS = 48
_MIX = 0x1E3779B97F4A7C15
RangeSum = Callable[[torch.Tensor, int], torch.Tensor]
"""(a range of a flattened tensor, index of its first element in the tensor) → its checksum before its modulus."""


class WordSums:
    """Takes checksums of ranges of a flattened tensor, which add up to the tensor's, modulo 2^48 (`as_checksum`).

    A sum is an int64 on the range's device, and nobody waits for it. The whole tensor's bytes are taken as words of 4.
    Each is multiplied by an odd number for its index in its block of words, and by another one for the block. Bytes
    beyond a range count as 0, so that parts of a word add up.
    """

    def __init__(self) -> None:
        self._factors: dict[torch.device, torch.Tensor] = {}

    def __call__(self, flat: torch.Tensor, start: int) -> torch.Tensor:
        if flat.device not in self._factors:
            self._factors[flat.device] = _odd_numbers(-_BLOCK, _BLOCK, flat.device)
        factors, content = self._factors[flat.device], flat.detach().view(torch.uint8)
        offset, block = start * flat.element_size(), _WORD * _BLOCK
        sums = [torch.zeros(1, dtype=torch.int64, device=flat.device)]
        for begin in range(-(offset % block), content.numel(), _AT_ONCE * block):
            piece = content[max(begin, 0) : begin + _AT_ONCE * block]
            before = max(-begin, 0)
            after = -(before + piece.numel()) % block
            if before or after or piece.storage_offset() % _WORD:
                piece = functional.pad(piece, (before, after))  # a copy
            words = piece.view(torch.int32).view(-1, _BLOCK)  # their products with the factors, modulo 2^64, are added
            if words.is_cpu:  # one pass, without a copy in 64 bits: 2.5 times less CPU time than torch's three
                sums.append(torch.from_numpy(np.einsum("bw,w->b", words.numpy(), factors.numpy())))
            else:
                sums.append(words.long().mul_(factors).sum(1))
        of_blocks = torch.cat(sums[1:] or sums)
        return of_blocks.mul_(_odd_numbers(offset // block, of_blocks.numel(), flat.device)).sum()


def element_sum(flat: torch.Tensor, start: int) -> torch.Tensor:
    """The checksum of checkpoints before 0.3: as `WordSums`, with an element for a word and a number for each."""
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), _BLOCK):
        words = flat.detach()[begin : begin + _BLOCK].view(signed).long()
        total += words.mul_(_odd_numbers(start + begin, words.numel(), flat.device)).sum()
    return total


def _odd_numbers(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers of 64 bits, one for each index from `start` on."""
    mixed = torch.arange(start, start + count, device=device).mul_(_MIX)
    return mixed.bitwise_xor_(mixed >> 31).bitwise_or_(1)


def way_of(base: Mapping[str, Any]) -> RangeSum:
    """What takes the checksums behind a checkpoint's digest of its base."""
    number = base.get("checksum", 1)
    if number not in (1, CHECKSUM):
        raise CheckpointError(
            f"the digest of the adapter's base is of kind {number!r}, this version knows 1 and {CHECKSUM}",
            "use the version of shardkit that wrote the checkpoint, or a later one",
        )
    return element_sum if number == 1 else WordSums()


def as_checksum(total: torch.Tensor) -> int:
    """The checksum of added sums of ranges."""
    # A rehearsal, which computes nothing, hands out bytes, by which no program decides, and no whole number.
    content = bytes(total.view(1).view(torch.uint8).tolist())
    checksum: int = int.from_bytes(content, sys.byteorder) % 2**_BITS
    return checksum


def digest_of(sums: Mapping[str, int]) -> str:
    """One digest of all tensors, from each tensor's name and checksum."""
    text = "\n".join(f"{name} {value % 2**_BITS}" for name, value in sorted(sums.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@torch.no_grad()
def frozen_sums(
    strategy: Strategy, names: Mapping[str, str], group: dist.ProcessGroup, range_sum: RangeSum
) -> dict[str, int]:
    """The checksums of a wrapped model's frozen weights, in the types in which the model stores them; collective.

    `names`: `model.<fqn>` of each frozen parameter → its name in the model without the adapter. `group`: a gloo group
    of all ranks. `range_sum`: takes checksums, of `way_of`.
    """
    order = {name: index for index, name in enumerate(sorted(names))}
    sums = torch.zeros(len(order), dtype=torch.int64)
    for shard in strategy.shards():
        if shard.name in order and shard.replica == 0 and shard.local.numel():
            for start, part in shard.ranges():
                sums[order[shard.name]] += as_checksum(range_sum(part, start))
    dist.all_reduce(sums, group=group)
    return {names[name]: int(sums[index]) for name, index in order.items()}


def digest_of_pieces(tensors: Iterable[tuple[str, Iterable[torch.Tensor]]], range_sum: RangeSum) -> str:
    """The digest, as of `FrozenBase.identify`, of tensors that come as consecutive 1-D pieces."""
    sums = dict[str, int]()
    for name, pieces in tensors:
        at = 0
        sums[name] = 0
        for piece in pieces:
            sums[name] += as_checksum(range_sum(piece, at))
            at += piece.numel()
    return digest_of(sums)


class FrozenBase:
    """Identifies the frozen parameters under an adapter, and checks them against a checkpoint's entry."""

    def __init__(
        self, model: nn.Module, settings: Mapping[str, Any], base_name: Callable[[str], str | None], source: str | None
    ) -> None:
        """`model`: wrapped by any engine. `source`: path of the base's weights; `None` if they were drawn."""
        plain = {fqn.removeprefix("module."): param for fqn, param in model.named_parameters()}
        frozen = {fqn: param for fqn, param in plain.items() if not param.requires_grad}
        # `model.<fqn>` of each frozen parameter → its name in the model without the adapter
        self.names = {f"model.{fqn}": base_name(fqn) or fqn for fqn in frozen}
        self._packed = {name for name, param in frozen.items() if param.dtype == torch.uint8}
        # the type of the frozen weights; packed ones were packed from it
        self.dtype = next(param.dtype for param in frozen.values() if param.dtype != torch.uint8)
        self._source = None if source is None else os.path.abspath(os.path.expanduser(source))
        # entry for checkpoints: the adapter's settings and, after `identify`, the base's digest, dtype, source
        self.about: dict[str, Any] = {**settings}
        numel = [n_values(fqn, param) for fqn, param in plain.items()]
        trained = sum(n for n, param in zip(numel, plain.values(), strict=True) if param.requires_grad)
        # how many of the model's values are trained, as text
        self.line = f"{trained:,} of {sum(numel):,} values are trained ({trained / sum(numel):.2%})"

    def identify(
        self, strategy: Strategy, group: dist.ProcessGroup, unpacked_sums: Mapping[str, int] | None = None
    ) -> None:
        """Compute the base's digest and add it to `about`; collective.

        `unpacked_sums`: checksums of the weights that the model holds packed, before they were; their packed bytes get
        a digest of their own.
        """
        self._sums = partial(frozen_sums, strategy, self.names, group)
        sums = self._sums(WordSums())
        packed = {name: sums.pop(name) for name in [self.names[f"model.{fqn}"] for fqn in self._packed]}
        digest = digest_of({**sums, **(unpacked_sums or {})})
        dtype = str(self.dtype).removeprefix("torch.")
        self.about["base"] = {"digest": digest, "checksum": CHECKSUM, "dtype": dtype, "source": self._source}
        if packed:
            self.about["base"]["packed"] = digest_of(packed)

    def check(self, entry: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another adapter or base than this run's; `entry`: its run's `about`. Collective."""
        saved_base = entry.get("base")
        if not isinstance(saved_base, dict):
            raise CheckpointError("the checkpoint does not name its adapter's model", "use another checkpoint")
        if self.about.get("quantize") != entry.get("quantize"):
            run, saved = (
                "null"
                if (keys := about.get("quantize")) is None
                else "{" + ", ".join(f"{key}: {_shown(keys[key])}" for key in sorted(keys)) + "}"
                for about in (self.about, entry)
            )
            raise ConfigError(f"model.quantize={run}, but the checkpoint's is {saved}", f"set model.quantize='{saved}'")
        for key, value in self.about.items():
            if key not in ("base", "fan_in_fan_out", "quantize") and entry.get(key) != value:
                raise ConfigError(
                    f"adapter.{key}={_shown(value)}, but the checkpoint's is {_shown(entry.get(key))}",
                    f"set adapter.{key}={_shown(entry.get(key))}",
                )
        run_base = self.about["base"]
        if run_base["dtype"] != saved_base.get("dtype"):
            raise CheckpointError(
                f"the frozen model is {run_base['dtype']} in this run, "
                f"it was {saved_base.get('dtype')} under the saved adapter",
                "resume with the precision.mode that it was saved with",
            )
        range_sum = way_of(saved_base)
        digest = digest_of(self._sums(range_sum)) if range_sum is element_sum else run_base["digest"]
        if digest != saved_base.get("digest"):
            run_source, saved_source = (base.get("source") or "initial values" for base in (run_base, saved_base))
            raise CheckpointError(
                f"the frozen model is not the one that the saved adapter was trained on: here {run_source}, "
                f"there {saved_source}, and their weights differ",
                f"set model.init_from to the weights it was trained on ({saved_source})",
            )
        if run_base.get("packed") != saved_base.get("packed"):
            raise CheckpointError(
                "the same weights were packed to other bytes than those under the saved adapter: digest "
                f"{run_base.get('packed')} here, {saved_base.get('packed')} there",
                "resume with the bitsandbytes and on the kind of device that it was saved with",
            )


def _shown(value: object) -> str:
    """A setting's value as one writes it on the command line."""
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value).lower()


def check_adapter(base: FrozenBase | None, entry: Any) -> None:
    """Refuse a checkpoint with an adapter in a run without one (`base` is None), one without an adapter (`entry` is
    None) in a run with one, and one of another adapter or base."""
    if base is None and entry is not None:
        raise ConfigError("the checkpoint holds an adapter, and this run has none", "set adapter.type as it was")
    if base is not None and entry is None:
        raise ConfigError(
            "the checkpoint holds no adapter, but adapter.type is set",
            "start with its weights instead: model.init_from in place of run.resume",
        )
    if base is not None and entry is not None:
        base.check(entry if isinstance(entry, dict) else {})
