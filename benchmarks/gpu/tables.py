"""The GPU section of docs/benchmarks.md: every case has a row, measured or not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from ..common import median_ci
from ..markdown import interval, machine, paragraph, table
from . import EMULATED, PARTS, part_cases
from .accuracy import MARGIN, TIGHT, TOO_LITTLE
from .cases import Found
from .categories import ARMS as CATEGORY_ARMS
from .choices import ASKED
from .ladder import CARDS, KINDS, rungs
from .largest import ARMS, BYTES_PER_PARAMETER, EMULATED_LIMIT
from .mfu import CEILING, GOALS, MODELS
from .store import first_speed, kind

MISSING = "not yet measured"
GIB = 2**30
TAUGHT = [
    ("takes the free end of a growing segment last, as torch's best fit does", "gpt2, fp32, full", "reserved +13.0 %"),
    ("empties the allocator's cache where the engine does", "bert-large, zero2, full", "reserved +11.8 %"),
    ("traces up to 48 layers whole: two depths miss gaps between blocks", "gpt2, fp32, full", "reserved −2.8 %"),
    ("counts the partial sums of a bias's gradient: 132 MiB at vit-l", "vit-l, ddp", "allocated −0.44 %"),
    ("adds two gradients of a tensor in place, as autograd does", "355m, fsdp, full", "reserved −2.6 %, with the next"),
    ("takes cuBLAS's workspace at a thread's first product", "355m, fsdp, full", "reserved −2.6 %, with the last"),
    ("makes a dropout's mask before its result", "gpt2, fp32, full", "layout only"),
    ("replays a full card, over three steps, for fixed segments", "llama-0.5b, fsdp, full", "required −3.2 %"),
    ("replays a full card for fixed segments", "bert-large, zero2, full", "required +5.8 %"),
    ("keeps SiLU's backward whole on a CPU build of torch", "llama-0.5b, fsdp, full", "allocated +3.4 %"),
    ("is of the last rank too under zero1 and zero2", "1.3b, 4 ranks, zero2, full", "allocated −4.8 %"),
]
"""What the planner learnt from the emulated card: now, the case that showed it, its error before."""
Known = dict[str, dict[str, Found]]
"""Case → its complete results, under "predicted" and "measured"."""


def on_a_gpu(results: Path) -> str:
    """The section for the files in `results`; missing files leave rows without figures."""
    known = {part: read(results / f"gpu_{part}.json", part) for part in PARTS}
    parts = [
        "## On a GPU",
        paragraph(
            "`python -m benchmarks gpu` ([gpu.md](gpu.md)): every case in fresh processes; running out of memory is a "
            "result. Predicted columns are the planner's, made without the GPU."
        ),
        *_mfu(known["mfu"]), *_ladder(known["ladder"]), *_largest(known["largest"]), *_accuracy(known["accuracy"]),
        *_categories(known["categories"]), *_provenance(known), *_emulated(results / "emulated"),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


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


def _mfu(known: Known) -> list[str]:
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

    rows = [
        [
            name,
            f"{model.micro} × {model.seq} × {model.accum}",
            model.precision,
            *_cells(_measured(known, name), cells, 5),
        ]
        for name, model in MODELS.items()
    ]
    shown = _cells(ceiling, lambda found: [f"{found['best_flops'] / 1e12:.0f} TFLOP/s"], 1)[0]
    head = ("model", "samples × tokens × accumulation", "precision", "tokens/s", "over the bare loop", "MFU",
            "of the ceiling", "loss difference")  # fmt: skip
    return [
        "### Model FLOPs utilisation",
        paragraph(
            "Compiled blocks, recomputed attention, chunked cross-entropy, through shardkit with ledger and metrics "
            "on, and in a hand-written loop, in turns. MFU: 6 N_matmul + 12 L d T FLOPs per token, no recompute, "
            f"over the card's dense bf16 peak. Goals: ≥ {GOALS['over_bare']} of the bare loop's throughput, "
            f"≥ {GOALS['mfu']:.0%} MFU. Ceiling, the best of a sweep of bf16 products: {shown}."
        ),
        table(head, rows),
    ]


def _ladder(known: Known) -> list[str]:
    def step(found: Found) -> list[str]:
        speed = "–" if found["tokens_per_s"] is None else f"{found['tokens_per_s']:,.0f}"
        return [_gib(found["peak"]), _gib(found["reserved"]), speed, f"{found['losses'][-1]:.3f}"]

    parts = [
        "### The ladder",
        paragraph(
            "Each rung on top of those above it; GiB. Predicted: required bytes, including those outside torch's "
            "allocator. Largest: predicted → trained, in brackets the next size, which ran out of memory."
        ),
    ]
    for name, card in CARDS.items():
        rows = []
        for rung in rungs(dry=False):
            step_case, batch, model = (f"{name}: {rung}: {kind}" for kind in KINDS)
            plan = _predicted(known, step_case)
            rows.append([
                rung, _gib(plan["required"] + plan["overhead"]) if "required" in plan else "–",
                *_cells(_measured(known, step_case), step, 4),
                _size(known, batch, "{:,}"), _size(known, model, "{:.2e}"),
            ])  # fmt: skip
        head = ("rung", "predicted", "allocated", "reserved", "tokens/s", "loss", "micro-batch", "parameters")
        shown = ", ".join(f"`{item}`" for item in card.base)
        parts += [f"{name[0].upper()}{name[1:]}: {shown}", table(head, rows)]
    return parts


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


def _largest(known: Known) -> list[str]:
    def cells(found: Found) -> list[str]:
        best = max((t for t in found["trials"].values() if t["outcome"] == "ok"), key=lambda t: float(t["n_params"]))
        limit = (found["hbm"] + found["host_usable"]) / BYTES_PER_PARAMETER
        speed = "–" if best["tokens_per_s"] is None else f"{best['tokens_per_s']:,.0f}"
        return [
            f"{found['n_params'] / 1e9:.2f}", f"{100 * found['n_params'] / limit:.0f} %", speed,
            f"{best['losses'][0]:.2f} → {best['losses'][-1]:.2f}",
        ]  # fmt: skip

    rows = []
    for name in ARMS:
        plan = _predicted(known, name)
        predicted = (
            [f"{plan['n_params'] / 1e9:.2f}", f"{100 * plan['offload_ratio']:.0f} %"] if "layers" in plan else ["–"] * 2
        )
        rows.append([name, *predicted, *_cells(_measured(known, name), cells, 4)])
    head = ("", "predicted, 10⁹ parameters", "of the states on the host", "trained, 10⁹ parameters", "of the limit",
            "tokens/s", "loss")  # fmt: skip
    return [
        "### The largest model on one card with host memory",
        paragraph(
            "fp32 masters and moments, bf16 weights and gradients, real steps with a finite, falling loss; one width, "
            f"growing depth. The limit is (HBM + usable host memory) / {BYTES_PER_PARAMETER} bytes per parameter."
        ),
        table(head, rows),
    ]


def _accuracy(known: Known) -> list[str]:
    about = paragraph(
        "World size 1, GiB. Last columns: whether the run works on a card limited to this share of the predicted "
        f"required bytes (goals: always with {MARGIN}, never with {TOO_LITTLE}). Goals: median error ≤ 1 % allocated, "
        "≤ 5 % reserved."
    )
    return ["### Predicted against measured on a GPU", about, *_errors(known)]


def _emulated(results: Path) -> list[str]:
    """Memory alone: nothing that is measured on an emulated card says anything of speed."""
    known = {part: read(results / f"gpu_{part}.json", part, "an emulated card's results") for part in EMULATED}
    about = paragraph(
        "`make bench-emulated`: the CUDA build of torch trains the same settings on a card that computes nothing "
        "([gpu.md](gpu.md)). Both allocators, autograd and the engines are the real ones; scratch memory of cuDNN's "
        "and cuBLAS's kernels beyond the workspace is missing by construction: on these cards torch takes cuDNN's "
        "attention, which keeps what the planned flash attention keeps; for its backward flash's scratch is planned. "
        "Columns as above. Goals: allocated "
        "within 1 %, reserved within 5 %, neither more than 2 % too low."
    )
    several = paragraph(
        "Several ranks on the cards of one machine, the largest rank's figures. *Fixed segments*: without expandable "
        "segments; *whole loss*: `model.loss_chunk_size=0`. Plans are of the rank that takes the most: with 1.3b "
        "under zero2 on 4 ranks it is rank 3, with 0.48 GiB more than rank 0; older ones under zero1 and zero2, of "
        "two ranks, are of rank 0. ZeRO-3's two cases of 8 ranks need more host memory than this machine "
        "has; Swin2SR under zero2 is refused by name, by plan and run alike."
    )
    learnt = table(("the plan now", "found by", "error before"), TAUGHT)
    return [
        "### Predicted against an emulated card", about, *_errors(known["accuracy"]),
        "The comparison taught the planner:", learnt,
        "### Predicted against emulated cards, several ranks", several, *_errors(known["ranks"], "ranks"),
        *_choices(known["choices"]), *_attributed(known), *_mechanics(known), *_provenance(known),
    ]  # fmt: skip


def _choices(known: Known) -> list[str]:
    def sizes(found: Found) -> list[str]:
        choice = found["choice"]
        too_large = found.get("out_of_memory_at")
        worked = f"{found['amount'] / 1e6:,.0f}" if found.get("amount") else "none"
        return [_gib(choice["reserved"]), worked, f"{too_large / 1e6:,.0f}" if too_large else "–"]

    rows = []
    for name in ASKED:
        plan = _predicted(known, name)
        shown = [", ".join(f"`{one}`" for one in plan["settings"]), _gib(plan["needed"])] if "settings" in plan else []
        fits = [f"{plan['amount'] / 1e6:,.0f}"] if "amount" in plan else ["–"]
        rows.append([name, *(shown or ["–", "–"]), *fits, *_cells(_measured(known, name), sizes, 3)])
    about = paragraph(
        "`plan --auto` chooses everything but the precision; its choice trains on such cards, and then `max-model`'s "
        "sizes with the chosen settings do, in steps of at most 2 %, until one runs out of memory: parameters in "
        "millions. A card's memory outside of torch's allocator (context, communicators) is taken as planned. GiB."
    )
    head = ("model, cards", "choice", "planned", "largest planned", "reserved", "largest trained", "out of memory")
    return ["### Choices on emulated cards", about, table(head, rows)]


def _attributed(known: dict[str, Known]) -> list[str]:
    """The traced step's categories beside the allocator's peak, for each setting whose trace was kept."""
    rows, shares = [], []
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
            rows.append([name, _gib(run["peak"]), _gib(traced["bytes"]), held, f"{100 * shares[-1]:.2f} %"])
    if not rows:
        return []
    about = paragraph(
        "The traced step's categories at its peak, GiB, and the allocator's bytes beyond them (goal ≤ 2 %): "
        f"{sum(share <= 0.02 for share in shares)} of {len(shares)} settings reach it. "
        "Found by it: cuBLAS's workspaces (64 MiB) had no category, ddp's buckets were counted twice (vit-l, ddp then "
        "had 9.77 %), and the buffers that DeepSpeed keeps had none until a step used them (355m, zero3 + offload then "
        "had 8.36 %)."
    )
    head = ("setting", "allocator's peak", "traced peak", "categories", "unattributed")
    return ["### Categories beside the emulated card's allocator", about, table(head, rows)]


def _mechanics(known: dict[str, Known]) -> list[str]:
    """The parts that measure speeds too: their memory, and how far they came."""
    about = paragraph(
        "`make bench-emulated` runs these parts whole as well. Losses, speeds and everything that is made of them are "
        "left out of their files; GiB."
    )
    largest = paragraph(
        f"The largest model: a card of {_gib(EMULATED_LIMIT)} GiB with as much host memory, since what is offloaded "
        "is real there; parameters in millions, predicted → trained (out of memory)."
    )
    return [
        "### The other parts on emulated cards", about,
        "Model FLOPs utilisation, both arms in one process:",
        table(("", "allocated"), [[name, *_cells(_measured(known["mfu"], name), _started, 1)]
                                  for name in (CEILING, *MODELS)]),
        *_emulated_ladder(known["ladder"]), largest,
        table(("", "parameters"), [[name, _emulated_largest(known["largest"], name)] for name in ARMS]),
        *_categories(known["categories"], heading="Categories beside the allocator, SwinIR's size:"),
    ]  # fmt: skip


def _started(found: Found) -> list[str]:
    return [_gib(found["peak_allocated"]) if "peak_allocated" in found else "started, no speeds"]


def _emulated_ladder(known: Known) -> Iterator[str]:
    for name in CARDS:
        rows = []
        for rung in rungs(dry=False):
            step, batch, model = (f"{name}: {rung}: {kind}" for kind in KINDS)
            plan = _predicted(known, step)
            memory = _cells(_measured(known, step), lambda found: [_gib(found["peak"]), _gib(found["reserved"])], 2)
            rows.append([
                rung, _gib(plan["required"] + plan["overhead"]) if "required" in plan else "–", *memory,
                _size(known, batch, "{:,}"), _size(known, model, "{:.2e}"),
            ])  # fmt: skip
        yield f"The ladder, {name}:"
        yield table(("rung", "predicted", "allocated", "reserved", "micro-batch", "parameters"), rows)


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


def _errors(known: Known, part: str = "accuracy") -> list[str]:
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
    rows = [row(name) for name in names if not name.endswith(tuple(f": {limit}" for limit in TIGHT))]
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
        parts.append(f"Median error over {len(errors['allocated'])} settings (smallest to largest): {medians}{worked}.")
    head = (
        "setting", "predicted: allocated / reserved / required", "allocated", "error", "reserved", "error",
        *(f"works with {share} × required" for share in TIGHT.values()),
    )  # fmt: skip
    return [*parts, table(head, rows)]


def _categories(known: Known, heading: str = "### Categories beside the allocator") -> list[str]:
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

    parts = [
        heading,
        paragraph(
            "SwinIR's size (Swin2SR): the traced step's categories at its peak, GiB, and the allocator's bytes "
            "beyond them (goal ≤ 2 %)."
        ),
        table(("", "allocator's peak", "traced peak", "categories", "unattributed"), list(map(row, CATEGORY_ARMS))),
    ]
    if found is not None and found["outcome"] == "ok":
        times = found.get("time_ratios")
        time = f", {interval(median_ci(times), 2)} of the time" if times else ""
        parts.append(f"Checkpointing: {found['memory_ratio']:.2f} of the memory{time}.")
    return parts


def _provenance(known: dict[str, Known]) -> Iterator[str]:
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
    yield from said
