"""The ranks of a rehearsal that are processes; the others of its world are pretended."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import LaunchError

MOST_LIVE = 64
"""Of live ranks, by the emulated NCCL's memory in which they meet."""
MOST_DISCOVERED = 8
"""Live ranks that a rehearsal starts by itself, since others asked them for what nobody can invent."""
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "ds", "axolotl", "llamafactory-cli", "torch.distributed.run")


@dataclass(frozen=True)
class RehearsedWorld:
    world_size: int  # of the program
    per_node: int  # GPUs of each machine
    live: tuple[int, ...] = (0,)  # ranks that are processes, ascending
    fixed: bool = False  # whether the user named them, so that no other is started

    def variables(self) -> list[dict[str, str]]:
        """The environment of each live rank, as torchrun would set it."""
        return [
            {
                "RANK": str(rank), "WORLD_SIZE": str(self.world_size), "LOCAL_RANK": str(rank % self.per_node),
                "LOCAL_WORLD_SIZE": str(self.per_node), "GROUP_RANK": str(rank // self.per_node),
                "NODE_RANK": str(rank // self.per_node), "EMUCUDA_MACHINE": str(rank // self.per_node),
            }
            for rank in self.live
        ]  # fmt: skip

    @property
    def numbers(self) -> str:
        return ",".join(map(str, self.live))

    def with_live(self, rank: int) -> RehearsedWorld:
        return replace(self, live=tuple(sorted({*self.live, rank})))

    def may_grow(self, rank: int | None) -> bool:
        """Whether a rank that was asked for more than can be invented is to be started as well."""
        return rank is not None and not self.fixed and rank not in self.live and len(self.live) < MOST_DISCOVERED


def parse_ranks(world_size: int, per_node: int | None, live: str | None) -> RehearsedWorld:
    per_node = min(8, world_size) if per_node is None else per_node
    if world_size % per_node:
        cause = f"{world_size} ranks do not fill machines of {per_node} GPUs"
        raise LaunchError(cause, "give --gpus, the GPUs of a machine, so that it divides --ranks")
    if live is None:
        return RehearsedWorld(world_size, per_node)
    try:
        numbers = tuple(sorted({int(word) for word in live.split(",")}))
    except ValueError:
        raise LaunchError(f"--live {live} is no list of ranks", "--live 0,64") from None
    if numbers[0] < 0 or numbers[-1] >= world_size or len(numbers) > MOST_LIVE:
        cause = f"--live {live}: of {world_size} ranks, 0 to {world_size - 1}, at most {MOST_LIVE} can be live"
        raise LaunchError(cause, "--live 0, or the lowest rank of each group of the program's mesh")
    return RehearsedWorld(world_size, per_node, numbers, fixed=True)


def command_of_rank(command: Sequence[str]) -> list[str]:
    """The command that each live rank runs: a script is run by `python`, as torchrun does."""
    names = [word.rpartition("/")[2] for word in command[:4]]
    launcher = next((name for name in names if name in LAUNCHERS), None)
    if launcher is not None:
        cause = f"{launcher} starts ranks by itself, and with --ranks the rehearsal does"
        raise LaunchError(cause, "name the program that each rank runs: shardkit rehearse --ranks 128 -- train.py …")
    return ["python", *command] if command[0].endswith(".py") and shutil.which(command[0]) is None else list(command)
