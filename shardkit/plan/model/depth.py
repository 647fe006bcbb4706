"""Predict deep models from shallow traces: memory at each edge of a step grows equally with every layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...config.schema import RunConfig
from ...memory.rows import CATEGORIES, Category
from ...memory.tracing.events import EventLog, Peak
from ...tasks.load import model_config

DEEP, DEEP_ROUGHLY = 49, 9
"""Models of at least so many layers are traced at two smaller depths, which misses some of the allocator's gaps."""
MUCH_DEEPER = 24
"""Models of at least so many layers are traced several times faster at two depths than whole."""
LAYERS_AT_ENDS, LAYERS_AT_ENDS_ROUGHLY = 2, 1
"""Layers at each end that edges tell apart; the layers between them do not exceed these."""
Edge = tuple[str, str]
Edges = Mapping[Edge, Peak]


@dataclass(frozen=True)
class Depth:
    layers: int
    traced: tuple[int, int]  # the two depths
    at: Callable[[int], RunConfig]  # returns the config with another number of layers
    layers_at_ends: int  # layers at each end of the model that edges tell apart

    @property
    def position(self) -> float:
        """The position of the whole depth on a line with the two traced depths at 0 and 1."""
        shallower, deeper = self.traced
        return (self.layers - shallower) / (deeper - shallower)


def find_depth(config: RunConfig, rough: bool = False) -> Depth | None:
    """Find the layer count in the config and choose two depths to trace; `None` = trace the whole model.

    Traced whole: shallow models, users' own tasks, unequal layers, and ZeRO (its buckets span layers) unless a rough
    answer will do.
    """
    spans_layers = config.parallel.sharding.stage > 0 and not rough
    if config.task.factory is not None or spans_layers:
        return None
    built_in = config.model.n_layers, lambda layers: _with_model(config, n_layers=layers)
    model = built_in if config.task.name == "causal_lm" else _transformers(config)
    if model is None or model[0] < (DEEP_ROUGHLY if rough else DEEP):
        return None
    layers, at = model
    every = config.activation.every_k if config.activation.policy == "every_k" else 1
    layers_at_ends = LAYERS_AT_ENDS_ROUGHLY if rough else LAYERS_AT_ENDS
    shallower = 2 * layers_at_ends + (layers - 2 * layers_at_ends) % every
    deeper = shallower + every
    return Depth(layers, (shallower, deeper), at, layers_at_ends) if deeper < layers else None


def is_slow(config: RunConfig) -> bool:
    """Whether the whole model is traced and so deep that a rough trace takes a fraction of the time."""
    rough = find_depth(config, rough=True)
    return find_depth(config) is None and rough is not None and rough.layers >= MUCH_DEEPER


def has_first_look(config: RunConfig) -> bool:
    """Whether a rough trace is much faster than an exact one and as good: not under ZeRO, whose buckets span layers."""
    return config.parallel.sharding.stage == 0 and is_slow(config)


def _with_model(config: RunConfig, **changes: object) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def _transformers(config: RunConfig) -> tuple[int, Callable[[int], RunConfig]] | None:
    model = model_config(config)
    layers = getattr(model, "num_hidden_layers", None)
    if not isinstance(layers, int) or "layer_types" in config.model.hf or hasattr(model, "depths"):
        return None
    if len(set(getattr(model, "layer_types", None) or [""])) > 1:
        return None
    key = model.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return layers, lambda n: _with_model(config, hf={**config.model.hf, key: n})


def edges(
    log: EventLog, device: str, rounding: int, layers: int | None = None, layers_at_ends: int = LAYERS_AT_ENDS
) -> dict[Edge, Peak]:
    """The largest total of live bytes by (phase, module).

    `layers`: the model's depth, if it is a shallow stand-in: layers are then numbered from the nearer end, and only the
    peaks of `layers_at_ends` layers at each end are returned.
    """
    peaks: dict[Edge, Peak] = {}
    for (phase, module), peak in log.peaks(device, rounding).items():
        edge_module = module if layers is None else _from_the_ends(module, layers, layers_at_ends)
        if edge_module is None:
            continue
        largest = peaks.get((phase, edge_module))
        if largest is None or peak.n_bytes > largest.n_bytes:
            peaks[phase, edge_module] = peak
    return peaks


def _from_the_ends(module: str, layers: int, layers_at_ends: int) -> str | None:
    match = re.search(r"(?<![^.])\d+(?![^.])", module)
    if match is None:
        return module
    index = int(match[0])
    if layers_at_ends <= index < layers - layers_at_ends:
        return None
    from_end = str(index) if index < layers_at_ends else f"-{layers - index}"
    return module[: match.start()] + from_end + module[match.end() :]


def extended(depth: Depth, shallower: Edges, deeper: Edges) -> dict[Edge, Peak]:
    """The whole model's edges, each extrapolated along a line through the edges of the two traced depths."""
    peaks: dict[Edge, Peak] = {}
    for edge in shallower.keys() & deeper.keys():
        shallower_peak, deeper_peak = shallower[edge], deeper[edge]
        ends = {c: (shallower_peak.categories.get(c, 0), deeper_peak.categories.get(c, 0)) for c in CATEGORIES}
        categories: dict[Category, int] = {c: n for c, pair in ends.items() if (n := line(depth, pair)) > 0}
        n_bytes = line(depth, (shallower_peak.n_bytes, deeper_peak.n_bytes))
        module = re.sub(r"(?<![^.])-(\d+)", lambda match: str(depth.layers - int(match[1])), edge[1])
        peaks[edge] = replace(deeper_peak, n_bytes=n_bytes, module=module, categories=categories)
    return peaks


def line(depth: Depth, values: Sequence[int]) -> int:
    """The value at the whole depth, on the line through the values at the two traced depths."""
    return round(values[0] + (values[1] - values[0]) * depth.position)
