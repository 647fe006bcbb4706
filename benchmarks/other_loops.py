"""Plans from other tools' files against real runs of the Trainer, Accelerate and DeepSpeed in loops of their own.

`python -m benchmarks.other_loops` runs the cases on CPUs, `--emulated` (in the environment of `make test-cuda`) those
on emulated cards that compute nothing. A result is on disk as soon as it is known; what is measured is not run again
unless `--again` asks for it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .common import REPO, RESULTS, earlier, environ, environment, output_of, publish, write_json
from .options import AGAIN, LIMIT, ONLY, PREDICT, Option, chosen, options
from .other_loops_jobs import LOOPS, Loop

GOALS = {"cpu": {"allocated": 0.03}, "emulated": {"allocated": 0.01, "reserved": 0.05}}
CARD = "h100"
TIME_LIMIT_S = 600


def measure(loop: Loop, folder: Path) -> dict[str, Any]:
    """Peaks of a real run on the rank that takes the most, in bytes, or the last words of one that failed."""
    loop.files(folder)
    request = {"seq_len": loop.seq_len, "tool": loop.tool, "masked": loop.model == "bert", "peft": loop.peft,
             "on": loop.on}  # fmt: skip
    (folder / "request.json").write_text(json.dumps(request))
    began = time.perf_counter()
    code, output = output_of(_command(loop, folder), TIME_LIMIT_S, cwd=REPO, env=_environment(loop))
    lines = output.splitlines()
    peaks = [json.loads(line) for line in lines if line.startswith('{"allocated"')]
    if code is None:
        return {"failed": f"not done after {TIME_LIMIT_S} s"}
    if code or len(peaks) < loop.ranks:
        errors = [line.strip() for line in lines if "Error" in line]
        return {"failed": (errors[-1] if errors else "it said nothing")[:300]}
    most = {key: max(peak[key] for peak in peaks) for key in peaks[0]}
    return {**most, "seconds": round(time.perf_counter() - began, 1)}


def _command(loop: Loop, folder: Path) -> list[str]:
    """The job's command, as its user types it."""
    python, program = [sys.executable, "-W", "ignore"], ["-m", "benchmarks.other_loops_run", str(folder)]
    if loop.tool == "accelerate" and loop.on != "cpu":
        config = ["--config_file", str(folder / "accelerate.yaml"), "--main_process_port", "0"]
        return [*python, "-m", "accelerate.commands.launch", *config, "--num_processes", str(loop.ranks), *program]
    if loop.ranks == 1:
        return [*python, *program]
    return [*python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(loop.ranks), *program]


def _environment(loop: Loop) -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "DEEPSPEED_LOG_LEVEL": "error", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    if loop.on == "cpu":
        device = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    else:
        from shardkit.hardware.cards import GPUS

        from .gpu.child import emulated_card

        device = emulated_card(GPUS[CARD], expandable=False)  # torch's default: their launchers set nothing
        device["EMUCUDA_DEVICES"] = str(loop.ranks)
    return environ(**quiet, **device)


def predict(loop: Loop, folder: Path) -> dict[str, Any]:
    """Peaks that `shardkit plan --from` predicts, or the reason why it does not."""
    from shardkit.errors import ShardkitError
    from shardkit.foreign.translate import read_job
    from shardkit.plan.client import plan
    from shardkit.plan.target import choose_target

    names = loop.files(folder)
    more = {} if loop.peft is None else {"peft": str(folder / "adapter_config.json")}
    overrides = [f"train.seq_len={loop.seq_len}"]
    overrides += ["train.micro_batch_size=2"] if loop.tool == "accelerate" else []
    overrides += ["run.device=cpu"] if loop.tool == "deepspeed" and loop.on == "cpu" else []
    try:
        job = read_job(names, str(folder), loop.ranks, **more)
        config = job.load(overrides).config
        card = None if loop.on == "cpu" else CARD
        target = choose_target(config, loop.ranks, loop.ranks, card, expandable=job.expandable)
        estimate = plan(config, target, loop=job.loop)
    except (ShardkitError, TypeError) as error:
        return {"failed": str(error)[:300]}
    peak = estimate.peak
    return {"allocated": peak.allocated, "reserved": peak.reserved, "phase": peak.phase}


RESULT_OF = {"cpu": "other_loops", "emulated": "emulated/other_loops"}
SECTION_OF = {"cpu": "other_loops", "emulated": "other_loops_on_cards"}


def main() -> None:
    args = options(
        __doc__,
        emulated=Option(False, "the cases on emulated cards"),
        only=ONLY,
        again=AGAIN,
        predict=PREDICT,
        measure=Option(False, "measure, predict nothing"),
        limit=LIMIT,
    )
    until_s = time.monotonic() + args.limit
    on = "emulated" if args.emulated else "cpu"
    loops = {loop.name: loop for loop in LOOPS if loop.on == on}
    known: dict[str, Any] = {"cases": {}, **earlier(RESULT_OF[on])}
    for name in chosen(loops, args.only):
        if time.monotonic() > until_s:
            break
        loop = loops[name]
        case = known["cases"].setdefault(name, {"model": loop.model, "ranks": loop.ranks})
        measures = not args.predict and (args.again or "allocated" not in case.get("measured", {}))
        predicts = args.predict or (not args.measure and "allocated" not in case.get("predicted", {}))
        with tempfile.TemporaryDirectory() as folder:
            if measures:
                case["measured"] = measure(loop, Path(folder))
                known["measured_at"] = environment()
            if predicts:
                case["predicted"] = predict(loop, Path(folder))
        if measures or predicts:
            known["environment"] = environment()
            write_json(RESULTS / f"{RESULT_OF[on]}.json", known)
            print(f"{name:45s} {loop.model:11s} {loop.ranks}  {_errors(case)}", flush=True)
    publish(RESULT_OF[on], known, SECTION_OF[on])


def _errors(case: dict[str, Any]) -> str:
    for kind in ("measured", "predicted"):
        if "failed" in case.get(kind, {"failed": "not run"}):
            return f"{kind}: {case.get(kind, {}).get('failed', 'not run')}"
    shown = [
        f"{key} {100 * (case['predicted'][key] / case['measured'][key] - 1):+7.3f} %"
        for key in ("allocated", "reserved")
        if case["measured"].get(key)
    ]
    return "  ".join(shown) + f"  in {case['predicted']['phase']}"


if __name__ == "__main__":
    main()
