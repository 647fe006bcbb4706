"""The strategies, and what a key of the config asks of them: declared on the key's field, as a `Capability`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

StrategyName = Literal["single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)


@dataclass(frozen=True)
class Sharding:
    """What a strategy shares out among ranks, and by which library: known by its name, before there is an engine."""

    by_fsdp: bool = False  # by torch's FSDP2
    stage: int = 0  # by DeepSpeed's ZeRO at this stage; 0 = not by it
    replicates: bool = False  # groups of ranks have copies of the shards

    @property
    def parameters(self) -> bool:
        """A rank holds a part of each parameter."""
        return self.by_fsdp or self.stage == 3

    @property
    def state(self) -> bool:
        """A rank holds a part of the weights or of their optimizer state."""
        return self.by_fsdp or self.stage > 0


SHARDING: dict[str, Sharding] = {
    "single": Sharding(), "ddp": Sharding(), "fsdp": Sharding(by_fsdp=True),
    "hsdp": Sharding(by_fsdp=True, replicates=True),
    "zero1": Sharding(stage=1), "zero2": Sharding(stage=2), "zero3": Sharding(stage=3),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Capability:
    """A row of docs/capability.md: something that some strategies can do, and the config's values that ask for it.

    It annotates the field of the key (`Annotated[bool, Capability(…)]`). The refusals of `capability.check`, the table
    and the tests follow from it.
    """

    words: str  # the row's title
    # names of strategies, separated by spaces → the reason why they cannot do it
    refused: Mapping[str, str] = field(default_factory=dict)
    name: str = ""  # the row's short name; empty = the key's, without its section
    choices: tuple[Any, ...] = ()  # the values that ask for it; empty = all but the default
    beside: Callable[[Any], bool] = lambda section: True  # whether the section's other keys leave the value in force
    # the error's fix; `{works}` stands for the strategies that can do it, `{key}` for the key. Empty = remove the key.
    fix: str = ""
    on_cpu: str = ""  # the reason why it does not work without a GPU, and what to use instead; empty = it works

    def __post_init__(self) -> None:
        unknown = set(" ".join(self.refused).split()) - {*STRATEGIES}
        if unknown:
            raise ValueError(f"{self.words!r} is refused by unknown strategies: {sorted(unknown)}")

    @property
    def reasons(self) -> dict[StrategyName, str]:
        """The reason of each strategy that cannot do it."""
        by_name = {name: reason for names, reason in self.refused.items() for name in names.split()}
        return {name: by_name[name] for name in STRATEGIES if name in by_name}

    @property
    def works(self) -> list[StrategyName]:
        """The strategies that can do it."""
        return [name for name in STRATEGIES if name not in self.reasons]
