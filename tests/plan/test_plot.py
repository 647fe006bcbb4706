"""The ladder as a picture: what was predicted, measured and tried, in a browser, and nothing else asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardkit.errors import ConfigError
from shardkit.plan.search.ladder import Rung, Step
from shardkit.plan.search.trial import Trial
from shardkit.report.plot import ladder_plot, save_ladder
from tests.report.samples import EVIL
from tests.report.test_page import CHROMIUM, Opened, browser, opened  # noqa: F401 - fixtures

MIB = 2**20
STEPS = [
    Step(Rung("fp32", ()), (), 50 * MIB, "does not fit", trial=Trial("out of memory")),
    Step(Rung(EVIL, ()), (), 26 * MIB, "fits", trial=Trial("ok", 25 * MIB, None, 3690.0, (5.1, 5.0)), same_loss=True),
    Step(Rung("refused", ()), (), None, None, "not with this engine"),
]


def test_bars_are_the_peaks_and_rungs_that_ran_out_of_memory_are_marked() -> None:
    drawn = ladder_plot(STEPS, 40 * MIB)
    traces = {trace["name"]: trace for trace in drawn.data}
    assert traces["predicted"]["y"] == [50, 26, None]
    assert traces["measured"]["y"] == [None, 25, None]
    assert traces["tokens/s"]["y"] == [None, 3690.0, None]
    assert traces["out of memory"]["x"] == ["fp32"]
    assert drawn.layout["shapes"][0]["y0"] == 40
    dry = ladder_plot([Step(Rung("fp32", ()), (), 50 * MIB, None)], None)
    assert [trace["name"] for trace in dry.data] == ["predicted"]


def test_without_plotly_there_is_a_reason_and_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match="Plotly") as error:
        save_ladder(STEPS, 40 * MIB, tmp_path)
    assert "shardkit[report]" in error.value.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt-get install chromium)")
def test_the_page_draws_and_asks_for_nothing(opened: Opened, tmp_path: Path) -> None:  # noqa: F811
    path = save_ladder(STEPS, 40 * MIB, tmp_path)
    opened.show(path)
    drawn = {trace["name"]: trace["y"] for trace in opened.traces("plot")}
    assert (drawn["predicted"], drawn["measured"]) == ([50, 26, None], [None, 25, None])
    assert opened.page.locator("#figure-plot .barlayer .trace").count() == 2
    assert opened.page.locator("#table tbody tr").count() == len(STEPS)
    assert "out of memory" in opened.page.locator("#table").text_content()
    assert opened.said == [] and opened.asked == [path.as_uri()]
