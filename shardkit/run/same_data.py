"""Check that every rank reads the same data."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sized
from typing import Any

from ..errors import SHOWN, DataError, listed
from ..parallel.world import World


def check_same_data(world: World, train: Sized | None, val: Mapping[str, Sized]) -> None:
    """Refuse data of different sizes: ranks would take different numbers of steps and wait for each other; collective.

    Raises:
        DataError: the sizes differ; names the ranks' numbers of samples.
    """
    everyone: list[Any] = world.gather(
        [None if train is None else len(train), sum(map(len, val.values())) if val else None]
    )
    for split, sizes in zip(("training", "validation"), zip(*everyone, strict=True), strict=True):
        if len(set(sizes)) > 1:
            shown = ", ".join("none" if size is None else str(size) for size in sizes[: 4 * SHOWN])
            raise DataError(
                f"ranks see different {split} data: {shown} samples on ranks 0 to {len(sizes[: 4 * SHOWN]) - 1}",
                "give every rank the whole data (the sampler splits it); check that its files are on all nodes",
            )


def check_same_digests(world: World, digests: Mapping[str, str]) -> None:
    """Refuse ranks whose data differ at the same size, or are tokenised differently: they would train on a mixture.

    Collective.

    Args:
        digests: of this rank's data, by name, as `Task.digests` gives them.

    Raises:
        DataError: the digests differ; names the ranks and hosts with each.
    """
    everyone: list[Any] = world.gather((platform.node(), dict(digests)))
    for name in sorted({name for _, rank_digests in everyone for name in rank_digests}):
        ranks_with: dict[str, list[str]] = {}
        for rank, (host, rank_digests) in enumerate(everyone):
            ranks_with.setdefault(rank_digests.get(name, "none"), []).append(f"{rank} ({host})")
        if len(ranks_with) > 1:
            parts = [
                f"digest {digest} on {len(ranks)} rank{'s' * (len(ranks) > 1)}: {listed(ranks)}"
                for digest, ranks in sorted(ranks_with.items(), key=lambda pair: -len(pair[1]))[:SHOWN]
            ]
            raise DataError(
                f"ranks do not have the same {name}, and would train a mixture: {'; '.join(parts)}",
                "give every node the same files: the digest is of their contents, not of where they are",
            )
