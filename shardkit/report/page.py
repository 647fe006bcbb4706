"""A run as a page: a summary, the memory of each rank, then config and versions; pages of two runs, and of scripts."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from ..errors import ShardkitError, listed, system_errors
from ..files import write_whole
from ..launch.failures import exit_codes, failure, job_starts
from ..memory.rows import KINDS, LABELS, growing, pressure, quantized_bytes, summary
from ..telemetry.catalog import STARVED
from . import figures, measure, planned, traced
from .html import Cell, Page, folded, heading, n_bytes, paragraph, percent, quantity, table, words
from .read import Run, mapping, number, sequence

_MOST_SAMPLES = 1000
"""Texts of evaluations between the first and the last."""
_MOST_DRAWN = 64
"""Ranks of the drawing of the mesh."""
_TENSORS = 25
"""Tensors of a post-mortem, the largest first."""
# The fields of a post-mortem that are sizes, and those among them that only sound like one.
_BYTES = re.compile(
    r"bytes|request|alloc|reserved|fragment|limit|free|missing|total|rss|peak|saving|capacity|memory|staging|in_use"
)
_COUNT = re.compile(r"retries|ooms|count|rank|step")


def run_page(run: Run, out: Path) -> str:
    """The HTML file of one run; links to other files of the run are relative to `out`."""
    well, how = measure.status(run)
    badge = Markup('<p><span class="badge{}" id="status">{}</span></p>').format("" if well else " bad", how)
    page = Page(run.name, badge)
    page.section("summary", "Summary", *_summary(run))
    page.section("training", "Loss and throughput", page.figure("training", figures.training({"": run})))
    if run.samples:
        page.section("samples", "Samples", *_samples(run))
    if run.experts:
        page.section("experts", "Experts", *_experts(run, run.experts, page))
    page.section("memory", "Memory over time", *_memory(run, page))
    page.section("categories", "Where the memory is", *_categories(run, page))
    page.section("phases", "Peak by phase", *_phases(run, page))
    page.section("ranks", "Ranks", *_ranks(run, page))
    if run.traces:
        page.section("traced", "The traced step", *_traced(run, page))
    if run.plan is not None:
        page.section("plan", "Predicted and measured", *_planned(run, run.plan, page))
    if run.ooms:
        page.section("oom", "Out of memory", *(show_post_mortem(rank, record) for rank, record in run.ooms.items()))
    if run.profiles:
        page.section("profile", "Profiler", *_profiles(run, out))
    page.section("config", "Config and versions", *_config(run))
    return page.render()


def facts(run: Run) -> list[tuple[str, str]]:
    """The task, model, strategy and world of a run, in words."""
    hosts = {row.identity.host for row in run.last_rows}
    devices = Counter(row.identity.device for row in run.last_rows)
    on = ", ".join(f"{count} × {name}" for name, count in devices.items())
    task, model = mapping(run.config.get("task")), mapping(run.config.get("model"))
    sizes = _sizes(task, model)
    named = model.get("preset") or model.get("init_from") or model.get("hf_config") or ("" if sizes else "not named")
    named_facts = [
        ("task", task.get("factory") or task.get("name")),
        ("model", f"{named} ({sizes})" if named and sizes else named or sizes),
        ("strategy", run.setting("parallel.strategy")),
        ("precision", run.setting("precision.mode")),
        ("world", f"{_count(run.last_rows, 'rank')} on {_count(hosts, 'host')}: {on}" if run.last_rows else None),
        ("started", run.environment.get("time")),
        ("run directory", run.path),
    ]
    return [(name, str(fact)) for name, fact in named_facts if fact]


def _sizes(task: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """The model's sizes as far as the config states them; keys that the task does not read are left out."""
    if task.get("factory"):
        return ""
    values, keys = model, ["d_model", "n_layers", "n_heads", "vocab_size"]
    if task.get("name") not in ("causal_lm", None):
        values = mapping(model.get("hf"))
        keys = ["model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    return ", ".join(f"{key} {values[key]}" for key in keys if values.get(key))


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _summary(run: Run) -> list[Markup]:
    settings = table(["", ""], [[words(name), words(fact)] for name, fact in facts(run)])
    figures = [figure for figure in measure.key_figures(run) if figure.value is not None]
    figured = table(["", ">", ""], [[words(f.label), quantity(f.value, f.unit), words(f.remark)] for f in figures])
    parts = [Markup('<div class="columns">{}{}</div>').format(settings, figured)]
    for slow, times in islice(measure.stragglers(run), 8):
        often = "bad" if 4 * times >= len(run.gathers) else "faint"
        busy = f"Slow: rank {slow.name} is busy for up to {slow.ratio:.2f} × the median of a step"
        parts.append(paragraph(f"{busy} (in {times} of {len(run.gathers)} gathers).", often))
    parts += [paragraph(sentence, "bad") for sentence in growing(run.gathers[-1].rows if run.gathers else [])]
    if run.restarts:
        parts.append(paragraph(f"Started {len(run.restarts) + 1} times; why the earlier starts ended:"))
        parts.append(table(["", "reason"], [[Cell(f"{i}"), words(reason)] for i, reason in enumerate(run.restarts, 1)]))
    parts += [paragraph(f"Note: {note}", "faint") for note in run.notes]
    return parts


def _samples(run: Run) -> list[Markup]:
    """The texts of the first and of the last evaluation; the others folded."""
    steps = sorted({sample["step"] for sample in run.samples})
    parts = []
    for step in dict.fromkeys((steps[-1], steps[0])):
        rows = [[words(s.get("prompt", "–")), words(s.get("text", "–"))] for s in run.samples if s["step"] == step]
        parts += [heading(f"Step {step}"), table(["prompt", "continued"], rows)]
    between = [s for s in run.samples if s["step"] in steps[1:-1]]
    if between:
        text = "\n\n".join(f"step {s['step']}: {s.get('prompt')} → {s.get('text')}" for s in between[-_MOST_SAMPLES:])
        parts.append(folded("Evaluations between them", text))
    return parts


def _experts(run: Run, experts: Mapping[str, Any], page: Page) -> list[Markup]:
    """How evenly the routers used the experts: over time, and of each layer at last."""
    loads = {
        name: [number(load) or 0.0 for load in sequence(layer)] for name, layer in mapping(experts.get("loads")).items()
    }
    lines = [
        [
            words(name),
            Cell(f"{layer.index(max(layer))}", layer.index(max(layer))),
            quantity(max(layer), "plain"),
            quantity(sum(load < STARVED for load in layer), "count"),
            words(listed([expert for expert, load in enumerate(layer) if load < STARVED]) or "–"),
        ]
        for name, layer in loads.items()
        if layer
    ]
    caption = f"Rows of each expert over the average of its layer, in the last steps up to {experts.get('step')}. An "
    caption += f"expert with less than {STARVED} starves: it hardly learns."
    return [
        page.figure("balance", figures.balance(run)),
        heading("Each layer"),
        paragraph(caption, "faint"),
        page.figure("experts", figures.experts(loads)),
        table(["layer", ">busiest expert", ">its load", ">starving", "which"], lines),
    ]


def _memory(run: Run, page: Page) -> list[Markup]:
    shown, world = len(measure.shown(run.last_rows)), len(run.last_rows)
    parts = [page.figure("memory", figures.memory(run))]
    if shown < world:
        parts.append(paragraph(f"The {shown} ranks with the largest and smallest peaks, of {world}.", "faint"))
    if run.last_rows and not measure.on_gpu(run):
        parts.append(paragraph("The CPU allocator keeps no statistics: resident memory is shown.", "faint"))
    return parts


def _categories(run: Run, page: Page) -> list[Markup]:
    rows = measure.shown(run.last_rows)
    counted = {f"rank {row.name}": measure.parts(row) for row in rows if row.state is not None}
    peak = "peak RSS" if not measure.on_gpu(run) else "peak allocated on the device and the peak RSS on the host"
    state = {name: measure.state_alone(places) for name, places in counted.items()}
    parts = [
        heading("State, counted from the tensors that hold it"),
        page.figure("state", figures.categories(state)),
        heading(f"All of the {peak}"),
        paragraph(
            "Unattributed bytes are not state: activations, communication and workspace, and on the host the "
            "interpreter and its libraries."
        ),
        page.figure("categories", figures.categories(counted)),
    ]
    by_rank = {rank: traced.categories_of(trace) for rank, trace in run.traces.items()}
    if any(by_rank.values()):
        bars = {
            f"rank {rank}": {"at the traced peak": categories} for rank, categories in by_rank.items() if categories
        }
        parts += [heading("At the peak of the traced step"), page.figure("traced-categories", figures.categories(bars))]
    return parts


def _phases(run: Run, page: Page) -> list[Markup]:
    rows = measure.shown(run.last_rows)
    peaks = {f"rank {row.name}": measure.phase_peaks(run.gathers, row.identity.rank) for row in rows}
    metric = "peak allocated" if measure.on_gpu(run) else "peak RSS"
    names = list(dict.fromkeys(phase for peak_by_phase in peaks.values() for phase in peak_by_phase))
    cells = [
        [words(name), *(n_bytes(peak_by_phase.get(phase)) for phase in names)] for name, peak_by_phase in peaks.items()
    ]
    return [page.figure("phases", figures.phases(peaks, metric)), table(["", *(f">{name}" for name in names)], cells)]


def _ranks(run: Run, page: Page) -> list[Markup]:
    times = measure.step_times(run)
    parts = [page.figure("ranks", figures.ranks(measure.shown(run.last_rows), times))]
    on_gpu = measure.on_gpu(run)  # the CPU's allocator has no figures: columns of dashes tell nobody anything
    of_device = [">peak allocated", ">peak reserved"] if on_gpu else []
    kinds = [kind for kind in KINDS if kind != "quantized" or any(quantized_bytes(row) for row in run.last_rows)]
    head = ["rank", "host", *(f">{kind.replace('_', ' ')}" for kind in kinds), *of_device, ">peak RSS", ">step",
            ">waiting for data", *([">retries"] if on_gpu else [])]  # fmt: skip
    lines = []
    for row in run.last_rows:
        state, device, time = row.state or {}, row.device_mem, times.get(row.identity.rank)
        lines.append([
            Cell(str(row.identity.rank), row.identity.rank), words(row.identity.host),
            *(n_bytes(state[kind].total if kind in state else None) for kind in kinds),
            *(n_bytes(getattr(device, key, None)) for key in ("peak_allocated", "peak_reserved") if on_gpu),
            n_bytes(row.host_mem.peak_rss), quantity(time.total if time else None, "s"),
            quantity(time.data if time else None, "s"),
            *([quantity(row.alloc_retries, "count")] if on_gpu else []),
        ])  # fmt: skip
    worst = max(range(len(run.last_rows)), key=lambda i: pressure(run.last_rows[i]), default=None)
    parts.append(table(head, lines, mark=worst if len(lines) > 1 else None))
    return [*parts, *_mesh(run), *_nodes(run)]


def coordinates(run: Run) -> list[dict[str, int]]:
    """Along which axes of the mesh the ranks differ, and each rank's number there; empty if the config is not known."""
    world, strategy = len(run.last_rows), run.setting("parallel.strategy")
    keys = ("tp", "cp", "ep", "dp_replicate", "dp_shard")
    tp, cp, ep, replicas, group = (int(number(run.setting(f"parallel.{key}")) or 0) for key in keys)
    tp, cp, ep = max(1, tp), max(1, cp), max(1, ep)
    if world < 2 or world % (tp * cp) or not strategy:
        return []
    holders = world // tp  # of parts of the state; ranks that share sequences are some of them
    shards = holders if strategy in ("fsdp", "zero1", "zero2", "zero3") else 1
    if strategy == "hsdp":
        on_a_node = Counter(row.identity.host for row in run.last_rows).most_common(1)[0][1]
        shards = group or (holders // replicas if replicas else on_a_node // tp)
    if not shards or holders % shards or shards * tp % ep:
        return []
    sizes = {"samples": world // (tp * cp), "replica": holders // shards, "shard": shards, "cp": cp, "ep": ep, "tp": tp}
    several = [name for name, size in sizes.items() if size > 1]
    coordinates_by_rank = []
    for rank in range(world):
        holder, part = divmod(rank, tp)
        samples, sequence_part = divmod(holder, cp)
        replica, shard = divmod(holder, shards)
        numbers = {"samples": samples, "replica": replica, "shard": shard}
        numbers |= {"cp": sequence_part, "ep": rank % ep, "tp": part}  # neighbours hold different experts
        coordinates_by_rank.append({name: numbers[name] for name in several})
    return coordinates_by_rank


def _mesh(run: Run) -> list[Markup]:
    """A drawing of what each rank holds, node by node."""
    ranks = coordinates(run)[:_MOST_DRAWN]
    if not ranks or not ranks[0]:
        return []
    width, height = 96, 22 + 15 * len(ranks[0])
    boxes, x, y, host = list[Markup](), 0, 0, None
    box = Markup('<rect x="{}" y="{}" width="{}" height="{}" rx="4" fill="hsl({}, 60%, 85%)" stroke="#888"/>')
    line = Markup('<text x="{}" y="{}">{}</text>')
    dark = Markup('<text x="{}" y="{}" fill="#111" style="fill: #111">{}</text>')
    for row, numbers in zip(run.last_rows, ranks, strict=False):
        if row.identity.host != host or x == 8 * width:
            y, x = y + (height + 8 if boxes else 0), 0
        if row.identity.host != host:
            host, y = row.identity.host, y + 18
            boxes.append(line.format(0, y - 4, host))
        boxes.append(box.format(x, y, width - 6, height, numbers.get("samples", 0) * 67 % 360))
        texts = [f"rank {row.identity.rank}", *(f"{name} {number}" for name, number in numbers.items())]
        boxes += [dark.format(x + 6, y + 16 + 15 * at, text) for at, text in enumerate(texts)]
        x += width
    chart = Markup('<svg class="chart mesh" style="max-width: {0}px" viewBox="0 0 {0} {1}">{2}</svg>')
    caption = "Which rank holds what, as far as there are several: samples (a colour each), replica and shard of the "
    caption += "state, part of each sequence (cp), of each layer's experts (ep) and of each layer (tp)."
    if len(run.last_rows) > _MOST_DRAWN:
        caption += f" The first {_MOST_DRAWN} of {len(run.last_rows)} ranks."
    drawn = chart.format(8 * width, y + height + 2, Markup("").join(boxes))
    return [heading("Mesh"), paragraph(caption, "faint"), drawn]


def _nodes(run: Run) -> list[Markup]:
    """The spread of peaks and step times over each node's ranks; a single node needs only the table above."""
    condensed = summary(run.last_rows)
    if condensed.peak is None or len(condensed.nodes) < 2:
        return []
    metric = condensed.peak[0]
    lines = []
    for host, spreads in condensed.nodes.items():
        peak, step = spreads[metric], spreads.get("step_time_s")
        lines.append([
            words(host), n_bytes(peak.max), n_bytes(peak.min), quantity(peak.skew, "plain"),
            words(f"rank {peak.worst}"),
            quantity(step.max if step else None, "s"), quantity(step.min if step else None, "s"),
        ])  # fmt: skip
    name = LABELS[metric]
    head = ["node", f">largest {name}", ">smallest", ">largest / mean", "worst", ">longest step", ">shortest"]
    return [heading("Nodes"), table(head, lines)]


def _traced(run: Run, page: Page) -> list[Markup]:
    peaks = {rank: traced.peak_of(trace) for rank, trace in run.traces.items()}
    worst = max(peaks, key=lambda rank: number(peaks[rank].get("bytes")) or 0)
    trace = run.traces[worst]
    head = ["rank", "step", "device", ">peak", "in", "module"]
    lines = [
        [Cell(str(rank), rank), *(words(run.traces[rank].get(key, "–")) for key in ("step", "device")),
         n_bytes(number(peak.get("bytes"))), words(peak.get("phase", "–")), words(peak.get("module") or "–")]
        for rank, peak in peaks.items()
    ]  # fmt: skip
    largest = [
        [
            n_bytes(number(t.get("bytes"))),
            *(words(t.get(key) or "–") for key in ("category", "phase", "module", "op", "shape")),
        ]
        for t in map(mapping, sequence(trace.get("largest")))
    ]
    return [
        table(head, lines, mark=list(peaks).index(worst) if len(lines) > 1 else None),
        heading(f"Rank {worst}, with the largest peak: bytes alive, and the modules that ran"),
        page.figure("timeline", traced.timeline(trace)),
        heading("Its peak in each phase"),
        page.figure("traced-phases", figures.categories(traced.by_phase(trace))),
        heading("Its largest tensors at the peak"),
        table([">bytes", "category", "phase", "module", "made by", "shape"], largest),
    ]


def _planned(run: Run, plan: Mapping[str, Any], page: Page) -> list[Markup]:
    alone = {row.identity.rank for row in measure.shown(run.last_rows)}
    comparisons = planned.compared(plan, run.gathers, run.traces)
    comparisons = [c for c in comparisons if c.rank in alone or not alone]
    lines = [
        [Cell(str(c.rank), c.rank), words(c.figure), n_bytes(c.predicted), n_bytes(c.measured), percent(c.error)]
        for c in comparisons
    ]
    capacity = plan.get("device_memory")
    sentences = [f"The plan said: {plan.get('verdict') or 'no limit was given'}"]
    if isinstance(plan.get("uncertainty"), int | float):
        sentences.append(f"its figures were expected to be right within {100 * plan['uncertainty']:.0f} %")
    if isinstance(capacity, int):
        sentences.append(f"a device has {n_bytes(capacity).text}")
    return [
        paragraph(f"{'; '.join(sentences)}."),
        page.figure("plan", planned.predicted(comparisons)),
        table(["rank", "", ">predicted", ">measured", ">off by"], lines),
    ]


def show_post_mortem(rank: int, record: Mapping[str, Any]) -> Markup:
    """One rank's out-of-memory post-mortem: its whole file, whatever that holds."""
    plain, parts = dict[str, Any](), list[Markup]()
    for key, entry in record.items():
        if isinstance(entry, list) and entry and all(isinstance(each, dict) for each in entry):
            columns = list(dict.fromkeys(column for each in entry for column in each))
            rows = [[_named(column, each.get(column)) for column in columns] for each in entry[:_TENSORS]]
            parts += [heading(_spaced(key)), table(list(map(_spaced, columns)), rows)]
        elif isinstance(entry, dict) and not any(isinstance(inner, dict | list) for inner in entry.values()):
            plain |= {f"{key}: {inner}": value for inner, value in entry.items()}
        elif isinstance(entry, dict | list):
            parts += [folded(_spaced(key), json.dumps(entry, indent=1, ensure_ascii=False))] if entry else []
        elif key != "schema":
            plain[key] = entry
    risk = ": the host's memory was almost used up" if record.get("kind") == "host-risk" else ""
    rows = [[words(_spaced(key)), replace(_named(key, value), numeric=False)] for key, value in plain.items()]
    return Markup("\n").join([heading(f"Rank {rank}{risk}"), table(["", ""], rows), *parts])


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _named(name: str, value: Any) -> Cell:
    """A value formatted by its name: sizes in GiB, times as dates, everything else unchanged."""
    if isinstance(value, int) and not isinstance(value, bool) and _BYTES.search(name) and not _COUNT.search(name):
        return n_bytes(value)
    if name == "time" and isinstance(value, float) and 0 <= value < 2**32:
        return words(datetime.fromtimestamp(value, timezone.utc).isoformat(timespec="seconds"))
    if isinstance(value, float):
        return Cell(f"{value:.4g}", value)
    return words("–" if value is None else value)


def _profiles(run: Run, out: Path) -> list[Markup]:
    hints = {
        ".txt": "operators by time and by memory",
        ".gz": "open in ui.perfetto.dev",
        ".html": "open in a browser",
        ".pickle": "open in pytorch.org/memory_viz",
    }
    item, items = Markup('<li><a href="{}">{}</a> <span class="faint">{}</span></li>'), Markup("")
    for path in run.profiles:
        link = quote(os.path.relpath(path.resolve(), out.resolve().parent))
        items += item.format(link, path.name, hints.get(path.suffix, ""))
    return [
        Markup("<ul>{}</ul>").format(items),
        paragraph("Relative links: they break when the report moves.", "faint"),
    ]


def _config(run: Run) -> list[Markup]:
    env = run.environment
    packages = mapping(env.get("packages"))
    rows = [(name, version) for name, version in packages.items() if version]
    rows += [(key.replace("_", " "), env[key]) for key in ("python", "cuda", "platform", "git_commit") if env.get(key)]
    if env.get("gpus"):
        rows.append(("GPUs", ", ".join(map(str, sequence(env["gpus"])))))
    if env.get("command"):
        rows.append(("command", " ".join(map(str, sequence(env["command"])))))
    return [
        table(["", "version"], [[words(name), words(value)] for name, value in rows]),
        folded("config.yaml", run.config_text),
    ]


# Two runs on one page: their differences in settings and in results.

NAMES = ("A", "B")
UNIMPORTANT = ("run.dir", "run.overwrite", "run.resume", "logging.prometheus_port")
"""Settings that differ between any two runs and do not affect results."""


def compare_page(a: Run, b: Run) -> str:
    """The HTML file that shows two runs side by side; ratios are B over A."""
    runs = dict(zip(NAMES, (a, b), strict=True))
    lead = Markup("").join(
        Markup('<p>{}: {} <span class="faint">({})</span></p>').format(name, run.path, measure.status(run)[1])
        for name, run in runs.items()
    )
    page = Page(f"{a.name} and {b.name}", lead)
    notes = [paragraph(f"{name}: {note}", "faint") for name, run in runs.items() for note in run.notes]
    page.section("summary", "Key figures", _key_figures(a, b), *notes)
    page.section("settings", "What differs", _settings(a, b))
    page.section("training", "Loss and throughput", page.figure("training", figures.training(runs)))
    page.section("memory", "Memory over time", page.figure("memory", figures.worst_memory(runs)))
    page.section("categories", "Where the memory is, on the worst rank", *_worst(page, runs))
    return page.render()


def _key_figures(a: Run, b: Run) -> Markup:
    before, after = ({figure.label: figure for figure in measure.key_figures(run)} for run in (a, b))
    lines = []
    for label in dict.fromkeys([*before, *after]):
        pair = [side.get(label) for side in (before, after)]
        if any(figure is not None and figure.value is not None for figure in pair):
            cells = [Cell("–") if figure is None else quantity(figure.value, figure.unit) for figure in pair]
            x, y = (None if figure is None else figure.value for figure in pair)
            lines.append([words(label), *cells, Cell("–") if not x or y is None else Cell(f"{y / x:.3f}", y / x)])
    return table(["", ">A", ">B", ">B / A"], lines)


def _settings(a: Run, b: Run) -> Markup:
    sides = []
    for run in (a, b):
        settings = {key: value for key, value in measure.flat(run.config).items() if key not in UNIMPORTANT}
        world = {name: fact for name, fact in facts(run) if name == "world"}
        versions = {**mapping(run.environment.get("packages")), "git commit": run.environment.get("git_commit")}
        sides.append([settings, world, {name: version for name, version in versions.items() if version}])
    lines = [
        [words(name), words(before.get(name, "–")), words(after.get(name, "–"))]
        for before, after in zip(*sides, strict=True)
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    return table(["", "A", "B"], lines) if lines else paragraph("Nothing: same settings, world and versions.")


def _worst(page: Page, runs: dict[str, Run]) -> list[Markup]:
    rows = {name: max(run.last_rows, key=pressure) for name, run in runs.items() if run.last_rows}
    names = {name: f"{name}: rank {row.name}" for name, row in rows.items()}
    bars = {names[name]: measure.parts(row) for name, row in rows.items() if row.state is not None}
    peaks = {names[name]: measure.phase_peaks(runs[name].gathers, row.identity.rank) for name, row in rows.items()}
    kinds = {"peak allocated" if row.device_mem else "peak RSS" for row in rows.values()}
    return [
        heading("State"),
        page.figure(
            "state", figures.categories({name: measure.state_alone(locations) for name, locations in bars.items()})
        ),
        heading("State and the rest of the peak"),
        page.figure("categories", figures.categories(bars)),
        heading("Peak by phase"),
        page.figure("phases", figures.phases(peaks, " and ".join(sorted(kinds)))),
    ]


# The run directory of a script, which holds the logs of its starts and nothing else.

RUN_FILES = ("config.yaml", "metrics.jsonl", "memory.jsonl")
"""A directory with one of these is the run of a config."""
_TIME = re.compile(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)-node(\d+)-\d+")


@dataclass(frozen=True)
class ScriptStart:
    """One launcher's start of the script, on one node."""

    folder: Path
    began: str  # local time; empty if the folder's name does not tell it
    node: str
    attempts: int  # how often the launcher started the ranks
    failures: Sequence[failure.Failure]  # of the last attempt, likely origin first

    def log_of(self, failed: failure.Failure) -> Path | None:
        """The failed rank's stderr, if it is here."""
        attempt = failure.attempts(self.folder)[-1]
        for log in sorted(attempt.glob("*/stderr.log")):
            if log.parent.name == str(failed.local_rank if failed.local_rank is not None else failed.rank):
                return log
        return None


@dataclass(frozen=True)
class ScriptRun:
    """The run directory of a script: its launchers' starts in order of time, and why earlier jobs ended."""

    path: Path
    starts: Sequence[ScriptStart]
    ended: Sequence[str]

    @property
    def status(self) -> tuple[bool, str]:
        """(whether no rank of the last start failed, how the last start ended)."""
        newest = self.starts[-1]
        if not newest.failures:
            return True, "no rank of the last start reported an error"
        origin = newest.failures[0]
        return False, f"rank {origin.rank} failed: {_reason(origin)}"


def read_script(path: Path) -> ScriptRun | None:
    """The directory's starts; None if it is the run of a config, or no launcher has written there."""
    if any((path / name).exists() for name in RUN_FILES):
        return None
    folders = [*path.glob("logs/*"), *path.glob("logs/*/*")]
    starts = [_start(folder) for folder in folders if folder.is_dir() and failure.attempts(folder)]
    if not starts:
        return None
    ended = [start.ended for start in job_starts.history(path, {})[0]]
    ended += [reason for _, reason in job_starts.restarts(path)]
    return ScriptRun(path, sorted(starts, key=lambda start: (start.began, start.node)), ended)


def _start(folder: Path) -> ScriptStart:
    parts = _TIME.fullmatch(folder.name)
    began = "{}-{}-{} {}:{}:{}".format(*parts.groups()[:6]) if parts else ""
    failures = [failed for failed in failure.of_launcher(folder) if failed.exit_code != exit_codes.PREEMPTED]
    return ScriptStart(folder, began, parts[7] if parts else "", len(failure.attempts(folder)), failures)


def _reason(failed: failure.Failure) -> str:
    first_line = failed.message.partition("\n")[0]
    return first_line or exit_codes.describe(failed.exit_code)


def script_page(run: ScriptRun) -> str:
    well, how = run.status
    badge = Markup('<p><span class="badge{}" id="status">{}</span></p>').format("" if well else " bad", how)
    page = Page(run.path.resolve().name, badge)
    rows = [
        [words(start.began or start.folder.name), words(start.node), Cell(str(start.attempts), start.attempts),
         words(f"rank {start.failures[0].rank}: {_reason(start.failures[0])}" if start.failures
               else "no rank reported an error"), words(start.folder)]
        for start in run.starts
    ]  # fmt: skip
    parts = [table(["began", "node", ">starts of the ranks", "how it ended", "logs"], rows)]
    if run.ended:
        reasons = [[Cell(f"{number}"), words(reason)] for number, reason in enumerate(run.ended, 1)]
        parts += [heading("Why earlier starts ended"), table(["", "reason"], reasons)]
    parts.append(paragraph("A script has no metrics here: shardkit knows its starts and its ranks' logs.", "faint"))
    page.section("starts", "Starts", *parts)
    if run.starts[-1].failures:
        page.section("failure", "The last start's failure", *_failures(run.starts[-1]))
    return page.render()


def _failures(start: ScriptStart) -> list[Markup]:
    rows = []
    for failed in start.failures:
        log = start.log_of(failed)
        code = exit_codes.describe(failed.exit_code)
        rows.append([Cell(str(failed.rank), failed.rank), words(code), words(_reason(failed)), words(log or "–")])
    origin = start.failures[0]
    log = start.log_of(origin)
    text = origin.trace or ("" if log is None else failure.last_lines(failure.tail(log)))
    shown = [folded(f"Last lines of rank {origin.rank}", text)] if text else []
    return [table(["rank", "ended with", "reason", "log"], rows), *shown]


def save(text: str, path: Path) -> None:
    with system_errors(ShardkitError, f"cannot write {path}", "pass --out with a place you can write"):
        write_whole(path, text.encode(errors="replace"))
