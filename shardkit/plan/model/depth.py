"""Predict deep models from shallow traces: memory at each edge of a step grows equally with every layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...config.schema import RunConfig
from ...memory.rows import CATEGORIES, Category
from ...memory.tracing.events import EventLog, Peak
from ...strategies.zero.config import STAGES
from ...tasks.load import model_config

DEEP, DEEP_ROUGHLY = 49, 9
"""Models of at least so many layers are traced at two smaller depths, which misses some of the allocator's gaps."""
MUCH_DEEPER = 24
"""Models of at least so many layers are traced several times faster at two depths than whole."""
KEPT, KEPT_ROUGHLY = 2, 1
"""Layers at each end that edges tell apart; the layers between them do not exceed these."""
Edge = tuple[str, str]
Edges = Mapping[Edge, Peak]


@dataclass(frozen=True)
class Depth:
    """How to trace a model of `layers` equal layers at two depths; edges tell `kept` layers apart at each end."""

    layers: int
    traced: tuple[int, int]
    at: Callable[[int], RunConfig]
    kept: int

    @property
    def position(self) -> float:
        """The position of the whole depth on a line with the two traced depths at 0 and 1."""
        first, second = self.traced
        return (self.layers - first) / (second - first)


def find_depth(config: RunConfig, rough: bool = False) -> Depth | None:
    """Find the layer count in the config and choose two depths to trace; `None` = trace the whole model.

    Traced whole: shallow models, users' own tasks, unequal layers, √n segments (their length depends on the depth),
    and ZeRO (its buckets span layers) unless a rough answer will do.
    """
    spans_layers = config.parallel.strategy in STAGES and not rough
    if config.task.factory is not None or spans_layers or config.activation.policy == "sqrt":
        return None
    found = _built_in(config) if config.task.name == "causal_lm" else _transformers(config)
    if found is None or found[0] < (DEEP_ROUGHLY if rough else DEEP):
        return None
    layers, at = found
    every = config.activation.every_k if config.activation.policy == "every_k" else 1
    kept = KEPT_ROUGHLY if rough else KEPT
    first = 2 * kept + (layers - 2 * kept) % every
    second = first + every
    return Depth(layers, (first, second), at, kept) if second < layers else None


def has_first_look(config: RunConfig) -> bool:
    """Whether a rough trace takes a fraction of the time of an exact one, and is as good as one of a deep model.

    It is not under ZeRO, whose buckets span layers.
    """
    if config.parallel.strategy in STAGES or find_depth(config) is not None:
        return False
    rough = find_depth(config, rough=True)
    return rough is not None and rough.layers >= MUCH_DEEPER


def _with_model(config: RunConfig, **changes: object) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def _built_in(config: RunConfig) -> tuple[int, Callable[[int], RunConfig]]:
    return config.model.n_layers, lambda layers: _with_model(config, n_layers=layers)


def _transformers(config: RunConfig) -> tuple[int, Callable[[int], RunConfig]] | None:
    model = model_config(config)
    layers = getattr(model, "num_hidden_layers", None)
    if not isinstance(layers, int) or "layer_types" in config.model.hf or hasattr(model, "depths"):
        return None
    if len(set(getattr(model, "layer_types", None) or [""])) > 1:
        return None
    key = model.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return layers, lambda n: _with_model(config, hf={**config.model.hf, key: n})


def edges(log: EventLog, device: str, rounding: int, layers: int | None = None, kept: int = KEPT) -> dict[Edge, Peak]:
    """Peaks by (phase, module); with `layers`, the model's depth, only `kept` layers at each end, counted from it."""
    found: dict[Edge, Peak] = {}
    for (phase, module), peak in log.peaks(device, rounding).items():
        name = module if layers is None else _from_the_ends(module, layers, kept)
        if name is None:
            continue
        known = found.get((phase, name))
        if known is None or peak.n_bytes > known.n_bytes:
            found[phase, name] = peak
    return found


def _from_the_ends(module: str, layers: int, kept: int) -> str | None:
    match = re.search(r"(?<![^.])\d+(?![^.])", module)
    if match is None:
        return module
    index = int(match[0])
    if kept <= index < layers - kept:
        return None
    from_end = str(index) if index < kept else f"-{layers - index}"
    return module[: match.start()] + from_end + module[match.end() :]


def extended(depth: Depth, first: Edges, second: Edges) -> dict[Edge, Peak]:
    """The whole model's edges, each extrapolated along a line through the edges of the two traced depths."""
    found: dict[Edge, Peak] = {}
    for edge in first.keys() & second.keys():
        one, other = first[edge], second[edge]
        categories: dict[Category, int] = {}
        for category in CATEGORIES:
            n_bytes = line(depth, (one.categories.get(category, 0), other.categories.get(category, 0)))
            if n_bytes > 0:
                categories[category] = n_bytes
        n_bytes = line(depth, (one.n_bytes, other.n_bytes))
        module = re.sub(r"(?<![^.])-(\d+)", lambda match: str(depth.layers - int(match[1])), edge[1])
        found[edge] = replace(other, n_bytes=n_bytes, module=module, categories=categories)
    return found


def line(depth: Depth, values: Sequence[int]) -> int:
    """The value at the whole depth, on the line through the values at the two traced depths."""
    return round(values[0] + (values[1] - values[0]) * depth.position)
