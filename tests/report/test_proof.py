"""The report of a proof, as its reader sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardkit.cli.__main__ import main
from shardkit.prove.verdict import NOT_SAME, ROWS, SAME, ProofVerdict

GRADIENTS: dict[str, dict[str, object]] = {
    "emb.weight": {"times": 0.8, "cause": ""}, "head.weight": {"times": 52300.0, "cause": "another direction"},
}  # fmt: skip
WEIGHTS = {
    f"rank {rank} micro-batch {micro}": {"parallel": float(micro == 2) / 2, "one process": 0.25}
    for rank in range(2) for micro in (1, 2)
}  # fmt: skip
RIGHT = {"emb.weight": {"times": 0.8, "cause": ""}, "<b>": {"times": 0.0, "cause": ""}}
VERDICTS = {
    "same": (
        ProofVerdict(SAME, "THE SAME: 2 steps, 2 parameters", step=2, gradients=RIGHT),
        ["THE SAME: 2 steps", 'data-value="0.8"', "within rounding", "&lt;b&gt;", "Step 2"], ["Weights of the micro"],
    ),
    "last": (
        ProofVerdict(
            NOT_SAME, "NOT THE SAME as one process (2 ranks)", ("step 1: 1 of 2 gradients differ",),
            ("only the last micro-batch of a step counts",), word="micro-batches", weights=WEIGHTS, step=1,
            gradients=GRADIENTS,
        ),
        ["⇒ only the last micro-batch", "rank 1 micro-batch 2", "+0.5000", "+0.2500", "another direction", "5.23e+04"],
        [],
    ),
    "rows": (
        ProofVerdict(ROWS, "THE SAME for the rows", ("step 1: several ranks draw rows 3, 7",), word="rows"),
        ["<h3>Rows</h3>", "several ranks draw rows 3, 7"], ["Weights of the micro", "Gradients by layer"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_a_report_shows_the_verdict_its_weights_and_gradients(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict, shown, absent = VERDICTS[name]
    (tmp_path / "verdict.json").write_text(json.dumps(verdict.as_json()))
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{verdict.headline}; report: {tmp_path / 'report.html'}\n"
    page = (tmp_path / "report.html").read_text()
    assert [text for text in shown if text not in page] == [] and not [text for text in absent if text in page]


def figures(page: str) -> dict[str, Any]:
    """The traces of each figure of a page."""
    text = page.rpartition("const REPORT = ")[2]
    return {name: traces for name, traces, _ in json.JSONDecoder().raw_decode(text)[0]["figures"]}


def test_its_pictures_hold_the_weights_and_the_distances(tmp_path: Path) -> None:
    (tmp_path / "verdict.json").write_text(json.dumps(VERDICTS["last"][0].as_json()))
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path)])
    drawn = figures((tmp_path / "report.html").read_text())
    ranks, process = drawn["figure-weights"]
    assert ranks["x"] == [["rank 0", "rank 0", "rank 1", "rank 1"], ["micro-batch 1", "micro-batch 2"] * 2]
    assert ranks["y"] == [0, 0.5, 0, 0.5] and process["y"] == [0.25] * 4
    (distances,) = drawn["figure-gradients"]
    assert distances["y"] == [*GRADIENTS] and distances["x"] == [0.8, 52300.0]
    assert distances["marker"]["color"][0] != distances["marker"]["color"][1]
