"""Every metric of a step, declared once: metrics.jsonl's documentation, Prometheus and the report follow from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A field of `metrics.jsonl`."""

    key: str  # its name in `metrics.jsonl`, and under `train/` in TensorBoard
    unit: str  # empty for a plain number
    meaning: str  # one line for the documentation and for Prometheus
    absent: str = ""  # the steps that lack it; empty if every step has it
    prometheus: str = ""  # its name there, without `shardkit_`; empty if it is not served
    kind: Literal["gauge", "counter"] = "gauge"  # its type for Prometheus
    label: str = ""  # its words in the report and the progress line; empty if they do not show it


STARVED = 0.1
"""An expert with less than this share of its layer's average starves: its weights hardly learn."""
_EVALUATIONS = "steps without an evaluation"
_FP16 = "all but fp16"
_NO_EXPERTS = "all but the first, the last and every `memory.interval`-th; models without experts; `compile`"
_NO_EP = "the same; all without `parallel.ep`"
_TEXT = "all but text tasks"

METRICS = (
    Metric("step", "", "optimizer step, from 1", prometheus="step"),
    Metric("loss", "", "mean over all target tokens of the step, all ranks", prometheus="loss"),
    Metric(
        "grad_norm", "", "global 2-norm of the gradients before clipping; null in a skipped step",
        prometheus="grad_norm",
    ),
    Metric("lr", "", "learning rate of the step", prometheus="learning_rate"),
    Metric("tokens", "tokens", "target tokens of the step, all ranks"),
    Metric("tokens_total", "tokens", "target tokens so far, all ranks", prometheus="tokens_total", kind="counter"),
    Metric(
        "step_time_s", "s",
        "time from the end of the previous update to the end of this one, on rank 0; on a GPU by its clock",
        prometheus="step_seconds",
    ),
    Metric(
        "data_wait_s", "s",
        "part of `step_time_s` in which the device had no work because data were not read yet; on the CPU the time to "
        "read them",
        label="waiting for data",
    ),
    Metric(
        "forward_s", "s",
        "part of `step_time_s` in forward, over all micro-batches: the batch's copy to the device and the loss",
        prometheus="forward_seconds", label="forward",
    ),
    Metric(
        "backward_s", "s",
        "part of `step_time_s` in backward, over all micro-batches: gradients and their reduction, and with "
        "`optim.in_backward` the update",
        prometheus="backward_seconds", label="backward",
    ),
    Metric(
        "update_s", "s", "part of `step_time_s` in clipping and the update, until the device is done with it",
        prometheus="update_seconds", label="update",
    ),
    Metric(
        "tokens_per_s", "tokens/s", "`tokens / step_time_s`: the useful tokens, which the loss counts",
        prometheus="tokens_per_second",
    ),
    Metric("positions", "tokens", "tokens that the model computed, with padding and tokens without a target", _TEXT),
    Metric("positions_per_s", "tokens/s", "`positions / step_time_s`", _TEXT),
    Metric("val_loss", "", "mean loss of the last evaluation", _EVALUATIONS, "validation_loss"),
    Metric("val_loss_NAME", "", "the same for the part NAME of the validation data, if it has parts", _EVALUATIONS),
    Metric("val_accuracy", "", "share of images that are classified right", f"{_EVALUATIONS}; all but image tasks"),
    Metric("val_psnr", "dB", "peak signal-to-noise ratio of the images", f"{_EVALUATIONS}; all but image tasks"),
    Metric("loss_scale", "", "scale of the loss after this step", _FP16),
    Metric("skipped", "", "1 if a gradient overflowed and the step was skipped", _FP16),
    Metric(
        "busiest_expert", "", "rows of the busiest expert over the average of its layer, since the last such figure",
        _NO_EXPERTS,
    ),
    Metric(
        "starved_experts", "", "number of experts, of all layers, with less than a tenth of their layer's average",
        _NO_EXPERTS,
    ),
    Metric("ep_busiest_rank", "", "rows of the busiest rank's experts over the ranks' average", _NO_EP),
    Metric(
        "ep_peak", "", "the most rows that a rank's experts got in one layer of a micro-batch, over an even share",
        _NO_EP,
    ),
    Metric("save_s", "s", "how long training stood still for a save before this step", "steps without one before them"),
    Metric(
        "end_save_s", "s",
        "how long the run stood still for saves after this step, those in the background included",
        "all but the last step of a start",
    ),
    Metric("eval_s", "s", "duration of the evaluation after this step", _EVALUATIONS),
    Metric("profile_s", "s", "duration of a profile's export after this step", "steps without one"),
)  # fmt: skip
STEP_PARTS = {metric.key: metric.label for metric in METRICS if metric.label}
"""The parts of `step_time_s`, with their words."""
