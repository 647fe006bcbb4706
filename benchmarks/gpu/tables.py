"""The GPU section of docs/benchmarks.md: every case has a row, measured or not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ..common import median_ci
from ..markdown import interval, machine, rows, section, table, templates
from . import EMULATED, PARTS, part_cases
from .accuracy import MARGIN, TIGHT, TOO_LITTLE, named_settings
from .cases import Found
from .categories import ARMS as CATEGORY_ARMS
from .choices import ASKED
from .ladder import CARDS, KINDS, rungs
from .largest import ARMS, BYTES_PER_PARAMETER, EMULATED_LIMIT
from .mfu import CEILING, GOALS, MODELS
from .packed import LARGE
from .qlora import ALONE, IN_TURNS, START, START_ARMS
from .qlora import ARMS as QLORA_ARMS
from .rehearsed import NAMED, SEEDS, drawn_name, trained_name
from .store import first_speed, kind

MISSING = "not yet measured"
_PEAKS = (("allocated", "peak"), ("reserved", "reserved"))
"""Keys of a peak: in a prediction, in a measurement."""
GIB = 2**30
Known = dict[str, dict[str, Found]]
"""Case → its complete results, under "predicted" and "measured"."""


def on_a_gpu(results: Path) -> str:
    """The section for the files in `results`; missing files leave rows without figures."""
    known = {part: read(results / f"gpu_{part}.json", part) for part in PARTS}
    # Memory alone: nothing that is measured on an emulated card says anything of speed.
    there = {
        part: read(results / "emulated" / f"gpu_{part}.json", part, "an emulated card's results") for part in EMULATED
    }
    values = {
        "goals": GOALS, "ceiling": _ceiling(known["mfu"]), "mfu": _mfu(known["mfu"]),
        "ladder": _ladder(known["ladder"], list(CARDS)), "largest": _largest(known["largest"]),
        "bytes_per_parameter": BYTES_PER_PARAMETER, "margin": MARGIN, "too_little": TOO_LITTLE,
        "accuracy": _errors(known["accuracy"]), "provenance": _provenance(known),
        "emulated_accuracy": _errors(there["accuracy"]), "emulated_ranks": _errors(there["ranks"], "ranks"),
        "choices": _choices(there["choices"]), "attributed": _attributed(there), "limit": _gib(EMULATED_LIMIT),
        "emulated_mfu": rows([one, *_cells(_measured(there["mfu"], one), _started, 1)] for one in (CEILING, *MODELS)),
        "emulated_ladder": _emulated_ladder(there["ladder"]), "emulated_provenance": _provenance(there),
        "emulated_largest": rows([name, _emulated_largest(there["largest"], name)] for name in ARMS),
    }  # fmt: skip
    values["rehearsed"], values["drawn"] = _rehearsed(known["rehearsed"])
    values["trained"], values["trained_errors"] = _trained(known["rehearsed"], known["accuracy"])
    values["qlora"] = _qlora(known["qlora"])
    values["packed"] = rows(_packed(known["packed"], there["packed"]))
    values["categories"], values["checkpointing"] = _categories(known["categories"])
    values["emulated_categories"], values["emulated_checkpointing"] = _categories(there["categories"])
    return section(templates()["gpu"], {**values, "measured": "at the end"})


def read(path: Path, part: str, wanted: str = "measurements") -> Known:
    """The complete cases of a file, without those that the part no longer has.

    Raises:
        ValueError: the file holds results of another kind, or a speed of an emulated card.
    """
    if not path.exists():
        return {}
    held = json.loads(path.read_text())
    if kind(held) != wanted:
        raise ValueError(f"{path} holds {kind(held)}, not {wanted}: delete it")
    if held.get("emulated") and (speed := first_speed(held["cases"])):
        raise ValueError(f"{path}: an emulated card has no speed, but {speed} has one: delete the case")
    names = part_cases(part, dry=False)
    complete = {
        name: {what: found for what, found in case.items() if found["complete"]} for name, case in held["cases"].items()
    }
    return {name: complete[name] for name in names if name in complete}


def _predicted(known: Known, case: str) -> Found:
    return known.get(case, {}).get("predicted", {})


def _measured(known: Known, case: str) -> Found | None:
    return known.get(case, {}).get("measured")


def _cells(found: Found | None, cells: Callable[[Found], list[str]], columns: int) -> list[str]:
    """A row's measured cells, or its outcome if it did not succeed."""
    if found is None:
        return [MISSING, *[""] * (columns - 1)]
    if found["outcome"] != "ok":
        message = f": {found['message']}" if found["outcome"] == "failed" else ""
        return [found["outcome"] + message.replace("|", "/"), *[""] * (columns - 1)]
    return cells(found)


def _gib(n_bytes: int | None) -> str:
    return "–" if n_bytes is None else f"{n_bytes / GIB:.2f}"


def _ceiling(known: Known) -> str:
    return _cells(_measured(known, CEILING), lambda found: [f"{found['best_flops'] / 1e12:.0f} TFLOP/s"], 1)[0]


def _mfu(known: Known) -> str:
    ceiling = _measured(known, CEILING)

    def cells(found: Found) -> list[str]:
        times = found["step_s"]
        ratio = [bare / ours for ours, bare in zip(times["shardkit"], times["bare"], strict=True)]
        speed = found["tokens_per_step"] / median(times["shardkit"])
        flops = speed * found["flops_per_token"]
        peak, best = found["peak_flops"], ceiling and ceiling.get("best_flops")
        return [
            f"{speed:,.0f}", interval(median_ci(ratio), 3), f"{100 * flops / peak:.1f} %" if peak else "–",
            f"{100 * flops / best:.1f} %" if best else "–", f"{found['loss_difference']:.0e}",
        ]  # fmt: skip

    return rows(
        [name, f"{model.micro} × {model.seq} × {model.accum}", model.precision,
         *_cells(_measured(known, name), cells, 5)]
        for name, model in MODELS.items()
    )  # fmt: skip


def _ladder(known: Known, cards: Sequence[str]) -> str:
    def cells(found: Found) -> list[str]:
        speed = "–" if found["tokens_per_s"] is None else f"{found['tokens_per_s']:,.0f}"
        return [_gib(found["peak"]), _gib(found["reserved"]), speed, f"{found['losses'][-1]:.3f}"]

    parts = []
    for name in cards:
        settings = ", ".join(f"`{item}`" for item in CARDS[name].base)
        head = ("allocated", "reserved", "tokens/s", "loss")
        parts += [f"~{name[0].upper()}{name[1:]}: {settings}", _rungs(known, name, head, cells)]
    return "\n\n".join(parts)


def _rungs(known: Known, card: str, head: Sequence[str], cells: Callable[[Found], list[str]]) -> str:
    """A card's ladder; `head` names the cells."""
    lines = []
    for rung in rungs(dry=False):
        step, batch, model = (f"{card}: {rung}: {kind}" for kind in KINDS)
        plan = _predicted(known, step)
        lines.append([
            rung, _gib(plan["required"] + plan["overhead"]) if "required" in plan else "–",
            *_cells(_measured(known, step), cells, len(head)), _size(known, batch, "{:,}"),
            _size(known, model, "{:.2e}"),
        ])  # fmt: skip
    return table(("rung", "predicted", *head, "micro-batch", "parameters"), lines)


def _size(known: Known, case: str, form: str) -> str:
    """`12 → 12 (13)`: the sizes predicted, trained, and out of memory."""
    plan, found = _predicted(known, case), _measured(known, case)
    amount = plan.get("amount")
    shown = plan.get("outcome", "–") if amount is None else form.format(amount)
    if plan.get("limited_by") == "host":
        shown += " (host)"
    if found is None:
        return f"{shown} → {MISSING}"
    if found.get("amount") is None:
        return f"{shown} → {found['outcome']}"
    failed_at = found.get("out_of_memory_at")
    return f"{shown} → {form.format(found['amount'])}" + (f" ({form.format(failed_at)})" if failed_at else "")


def _largest(known: Known) -> str:
    def cells(found: Found) -> list[str]:
        best = max((t for t in found["trials"].values() if t["outcome"] == "ok"), key=lambda t: float(t["n_params"]))
        limit = (found["hbm"] + found["host_usable"]) / BYTES_PER_PARAMETER
        speed = "–" if best["tokens_per_s"] is None else f"{best['tokens_per_s']:,.0f}"
        return [
            f"{found['n_params'] / 1e9:.2f}", f"{100 * found['n_params'] / limit:.0f} %", speed,
            f"{best['losses'][0]:.2f} → {best['losses'][-1]:.2f}",
        ]  # fmt: skip

    lines = []
    for name in ARMS:
        plan = _predicted(known, name)
        predicted = (
            [f"{plan['n_params'] / 1e9:.2f}", f"{100 * plan['offload_ratio']:.0f} %"] if "layers" in plan else ["–"] * 2
        )
        lines.append([name, *predicted, *_cells(_measured(known, name), cells, 4)])
    return rows(lines)


def _choices(known: Known) -> str:
    def sizes(found: Found) -> list[str]:
        choice = found["choice"]
        too_large = found.get("out_of_memory_at")
        worked = f"{found['amount'] / 1e6:,.0f}" if found.get("amount") else "none"
        return [_gib(choice["reserved"]), worked, f"{too_large / 1e6:,.0f}" if too_large else "–"]

    lines = []
    for name in ASKED:
        plan = _predicted(known, name)
        shown = [", ".join(f"`{one}`" for one in plan["settings"]), _gib(plan["needed"])] if "settings" in plan else []
        fits = [f"{plan['amount'] / 1e6:,.0f}"] if "amount" in plan else ["–"]
        lines.append([name, *(shown or ["–", "–"]), *fits, *_cells(_measured(known, name), sizes, 3)])
    return rows(lines)


def _attributed(known: dict[str, Known]) -> str:
    """The traced step's categories beside the allocator's peak, for each setting whose trace was kept."""
    lines, shares = [], []
    for cases in known.values():
        for name in (name for name in cases if ": " not in name):
            runs = (_measured(cases, one) or {} for one in (name, f"{name}: required"))
            run = next((run for run in runs if "traced" in run), None)
            if run is None:
                continue
            traced = run["traced"]
            held = ", ".join(
                f"{category} {_gib(n_bytes)}"
                for category, n_bytes in traced["categories"].items()
                if category != "unattributed"
            )
            shares.append(traced["categories"].get("unattributed", 0) / traced["bytes"])
            lines.append([name, _gib(run["peak"]), _gib(traced["bytes"]), held, f"{100 * shares[-1]:.2f} %"])
    if not lines:
        return ""
    about = (
        "The traced step's categories at its peak, GiB, and the allocator's bytes beyond them (goal ≤ 2 %): "
        f"{sum(share <= 0.02 for share in shares)} of {len(shares)} settings reach it. "
        "Found by it: cuBLAS's workspaces (64 MiB) had no category, ddp's buckets were counted twice (vit-l, ddp then "
        "had 9.77 %), and the buffers that DeepSpeed keeps had none until a step used them (355m, zero3 + offload then "
        "had 8.36 %)."
    )
    head = ("setting", "allocator's peak", "traced peak", "categories", "unattributed")
    return "\n\n".join(["### Categories beside the emulated card's allocator", about, table(head, lines)])


def _started(found: Found) -> list[str]:
    return [_gib(found["peak_allocated"]) if "peak_allocated" in found else "started, no speeds"]


def _emulated_ladder(known: Known) -> str:
    def cells(found: Found) -> list[str]:
        return [_gib(found["peak"]), _gib(found["reserved"])]

    head = ("allocated", "reserved")
    return "\n\n".join(f"The ladder, {name}:\n\n{_rungs(known, name, head, cells)}" for name in CARDS)


def _emulated_largest(known: Known, arm: str) -> str:
    plan, found = _predicted(known, arm), _measured(known, arm)
    if found is None or not found.get("trials"):
        return MISSING if found is None else found["outcome"]

    def size(outcome: str, choose: Callable[[list[float]], float]) -> str | None:
        sizes = [trial["n_params"] / 1e6 for trial in found["trials"].values() if trial["outcome"] == outcome]
        return f"{choose(sizes):.0f}" if sizes else None

    too_large = size("out of memory", min)
    return f"{plan['n_params'] / 1e6:.0f} → {size('ok', max) or '–'}" + (f" ({too_large})" if too_large else "")


def _shortage(message: str) -> str:
    """Where a run was out of memory, and of what size: from the run's error, empty if it says something else."""
    said = re.search(r"ran out of memory in (.+?): it asked for (.+?) of .+?, (.+?) were free", message)
    return f": {said[1]}, {said[2]} with {said[3]} free" if said else ""


def _errors(known: Known, part: str = "accuracy") -> str:
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    outcomes: dict[str, list[str]] = {limit: [] for limit in TIGHT}

    def limited(name: str, limit: str) -> str:
        found = _measured(known, f"{name}: {limit}")
        if found is None:
            return MISSING
        if found["outcome"] in ("ok", "out of memory"):  # others could not be tried here
            outcomes[limit].append(found["outcome"])
        if found["outcome"] == "out of memory":
            return f"no{_shortage(found.get('message', ''))}"
        return "yes" if found["outcome"] == "ok" else str(found["outcome"])

    def row(name: str) -> list[str]:
        plan, found = _predicted(known, name), _measured(known, name)

        def cells(found: Found) -> list[str]:
            shown = []
            for key, measured in (("allocated", found["peak"]), ("reserved", found["reserved"])):
                if key in plan:
                    errors[key].append(plan[key] / measured - 1)
                shown += [_gib(measured), f"{100 * errors[key][-1]:+.2f} %" if key in plan else "–"]
            return shown

        planned = [_gib(plan.get(key)) for key in ("allocated", "reserved", "required")]
        return [name, " / ".join(planned), *_cells(found, cells, 4), *(limited(name, limit) for limit in TIGHT)]

    names = part_cases(part, dry=False)
    lines = [row(name) for name in names if not name.endswith(tuple(f": {limit}" for limit in TIGHT))]
    parts = []
    if errors["allocated"]:
        medians = ", ".join(
            f"{key} {100 * median(map(abs, found)):.2f} % ({100 * min(found):+.2f} to {100 * max(found):+.2f} %)"
            for key, found in errors.items()
        )
        worked = "".join(
            f"; with {share} × the required bytes {outcomes[limit].count('ok')} of {len(outcomes[limit])} work"
            for limit, share in TIGHT.items()
            if outcomes[limit]
        )
        parts.append(
            f"~Median error over {len(errors['allocated'])} settings (smallest to largest): {medians}{worked}."
        )
    head = (
        "setting", "predicted: allocated / reserved / required", "allocated", "error", "reserved", "error",
        *(f"works with {share} × required" for share in TIGHT.values()),
    )  # fmt: skip
    return "\n\n".join([*parts, table(head, lines)])


def _rehearsed(known: Known) -> tuple[str, str]:
    """The named programs' rows, and a sentence about the random ones."""
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}

    def cells(plan: Found, found: Found) -> list[str]:
        shown = []
        for key in ("allocated", "reserved"):
            different = plan[key] / found[key] - 1 if key in plan else None
            shown += [_gib(found[key]), "–" if different is None else f"{100 * different:+.2f} %"]
        used = found["used_by_process"]
        return [*shown, "–" if used is None else _gib(used - found["reserved_at_end"])]

    lines = []
    for name in NAMED:
        plan = _predicted(known, name)
        planned = (
            f"{_gib(plan['allocated'])} / {_gib(plan['reserved'])}" if "allocated" in plan else plan.get("outcome")
        )
        lines.append([name, planned or "–", *_cells(_measured(known, name), partial(cells, plan), 5)])
    for seed in SEEDS:
        plan, found = _predicted(known, drawn_name(seed)), _measured(known, drawn_name(seed)) or {}
        for key, different in errors.items():
            if key in plan and key in found:
                different.append(plan[key] / found[key] - 1)
    if not errors["allocated"]:
        return rows(lines), f"{len(SEEDS)} random programs: {MISSING}."
    equal = {key: sum(not error for error in different) for key, different in errors.items()}
    ranges = ", ".join(
        f"{key} {equal[key]} to the byte, the others {100 * min(different):+.2f} to {100 * max(different):+.2f} %"
        for key, different in errors.items()
    )
    return rows(lines), f"Of {len(SEEDS)} random programs {len(errors['allocated'])} ran on both sides: {ranges}."


def _trained(known: Known, accuracy: Known) -> tuple[str, str]:
    """`shardkit.train` rehearsed beside its plan and the GPU, and the largest differences."""
    keys = ("allocated", "reserved")
    lines, differences = [], dict[str, list[float]]()
    for setting in named_settings(dry=False):
        rehearsal, measured = _predicted(known, trained_name(setting)), _measured(accuracy, setting) or {}
        if rehearsal.get("outcome") != "ok":
            lines.append([setting, rehearsal.get("outcome", MISSING), *[""] * 4])
            continue
        on_card = {"allocated": measured.get("peak"), "reserved": measured.get("reserved")}
        line = [setting, " / ".join(_gib(rehearsal[key]) for key in keys)]
        for beside, figures in (("plan", rehearsal["planned"]), ("GPU", on_card)):
            for key in keys:
                different = rehearsal[key] / figures[key] - 1 if figures[key] else None
                line.append("–" if different is None else f"{100 * different:+.2f} %")
                if different is not None:
                    differences.setdefault(f"{key} beside the {beside}", []).append(different)
        lines.append(line)
    largest = "; ".join(
        f"{kind} {100 * median(map(abs, found)):.3f} % ({100 * min(found):+.2f} to {100 * max(found):+.2f} %, "
        f"{len(found)} settings)"
        for kind, found in differences.items()
    )
    return rows(lines), f"Median difference: {largest}." if largest else f"Differences: {MISSING}."


def _qlora(known: Known) -> str:
    together, alone = _measured(known, IN_TURNS), _measured(known, ALONE)
    if together is None or together["outcome"] != "ok":
        return _cells(together, lambda _: [], 1)[0] + "."
    ours, plain = (together["step_s"][arm] for arm in QLORA_ARMS)
    ratio = interval(median_ci([a / b for a, b in zip(ours, plain, strict=True)]), 2)
    first, largest = together["loss_differences"][0], max(together["loss_differences"])
    words = (
        f"A step takes {1e3 * median(ours):.0f} ms, the plain loop's {1e3 * median(plain):.0f} ms: {ratio} times as "
        "long. "
        f"The first loss differs by {first:.0e}, later ones by {largest:.0e} at most"
    )
    if alone is not None and alone["outcome"] == "ok":
        again = zip(together["losses"][QLORA_ARMS[0]], alone["losses"][QLORA_ARMS[0]], strict=True)
        words += f"; those of two runs of shardkit by {max(abs(a - b) for a, b in again):.0e}"
    started = {name: found for name in START.values() if (found := _measured(known, name)) and "start_s" in found}
    starts = [f"{name}: {_start(found)}" for name, found in started.items()]
    return ". ".join([words, *starts]) + "."


def _start(found: Found) -> str:
    """Seconds of reading and packing a base, and how often as long as both alone they take."""
    ours, read, quantize = (found["start_s"][arm] for arm in START_ARMS)
    ratio = interval(median_ci([a / (b + c) for a, b, c in zip(ours, read, quantize, strict=True)]), 2)
    return (
        f"{median(ours):.2f} s; reading its files alone {median(read):.2f} s, `quantize_4bit` alone "
        f"{median(quantize):.2f} s: {ratio} times as long as both"
    )


def _packed(known: Known, emulated: Known) -> Iterator[list[str]]:
    """A row for each large base: predicted, measured, and measured on an emulated card."""
    for name in LARGE:
        plan = _predicted(known, name) or _predicted(emulated, name)

        def cells(found: Found, plan: Found = plan) -> list[str]:
            errors = (f"{100 * (plan[key] / found[of] - 1):+.2f} %" for key, of in _PEAKS) if plan else ("–", "–")
            shown = [cell for (_, of), error in zip(_PEAKS, errors, strict=True) for cell in (_gib(found[of]), error)]
            return [*shown, f"{found['tokens_per_s']:,.0f}" if found.get("tokens_per_s") else "–"]

        planned = " / ".join(_gib(plan.get(key)) for key, _ in _PEAKS)
        for card, there in (("GPU", known), ("emulated", emulated)):
            yield [f"{name}, {card}", planned, *_cells(_measured(there, name), cells, 5)]


def _categories(known: Known) -> tuple[str, str]:
    """The rows, and the cost of checkpointing."""
    found = _measured(known, "SwinIR")

    def row(arm: str) -> list[str]:
        def cells(found: Found) -> list[str]:
            traced = found["arms"][arm][0]["traced"]
            held = traced["categories"]
            parts = ", ".join(f"{name} {_gib(size)}" for name, size in held.items() if name != "unattributed")
            unknown = held.get("unattributed", 0)
            peak = median(trial["peak"] for trial in found["arms"][arm])
            return [_gib(round(peak)), _gib(traced["bytes"]), parts, f"{100 * unknown / traced['bytes']:.2f} %"]

        return [arm, *_cells(found, cells, 4)]

    ratios = ""
    if found is not None and found["outcome"] == "ok":
        times = found.get("time_ratios")
        time = f", {interval(median_ci(times), 2)} of the time" if times else ""
        ratios = f"Checkpointing: {found['memory_ratio']:.2f} of the memory{time}."
    return rows(map(row, CATEGORY_ARMS)), ratios


def _provenance(known: dict[str, Known]) -> str:
    """The places and dates of measurements and predictions, each once."""
    said: dict[str, Any] = {}
    for cases in known.values():
        for case in cases.values():
            for what, found in case.items():
                env = found["environment"]
                line = machine(env)
                if what == "predicted":
                    line = (
                        f"Predicted for {found['card']} on {env['date'][:10]} at commit {str(env['commit'])[:10]} with "
                        f"torch {env['torch']}."
                    )
                said[line] = None
    return "\n\n".join(f"~{line}" for line in said)
