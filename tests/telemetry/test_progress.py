"""What rank 0 shows, on a terminal and in a log."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest

from shardkit.telemetry import metrics
from shardkit.telemetry.metrics import RunProgress
from tests.memory.samples import gpu_row


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """From now on stdout and stderr are terminals of 120 columns, stderr the one returned; for the body of a test."""
    found = Terminal()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setattr(metrics, "REFRESH_S", 0.0)
    return found


def record(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "loss": 2.0, "tokens_per_s": 1000.0, **more}


def test_a_log_gets_a_line_every_few_steps_with_the_worst_and_the_slow(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [gpu_row(0), gpu_row(1, 5 * 2**30, "node2"), replace(gpu_row(2), busy_s=0.9)]
    shown = RunProgress(20, 0, 10, None, None)
    for step in range(1, 21):
        shown.update(record(step, save_s=0.5) if step == 3 else record(step), 3, rows)
    shown.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/20", "10/20", "20/20"]
    figures = ("loss 2.0000", "1,000 tokens/s", "5.00 GiB (rank 1@node2, 1.36 ×", "slow: rank 2@node1")
    assert all(figure in lines[0] for figure in figures), lines[0]
    assert "saves" not in lines[0] and "saves 0.5 s" in lines[1]
    assert all(line.isprintable() for line in lines)


def test_slow_steps_get_a_line_every_30_s(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    shown = RunProgress(100, 0, 50)
    for step in range(1, 8):
        now = 16.0 * step
        shown.update(record(step), 1, [])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", "3/100", "5/100", "7/100"]


def test_losses_go_to_stdout_unless_both_streams_are_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m shardkit.train … > train.log` from a terminal leaves the losses in the file."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = RunProgress(1, 0, 10)
    shown.update(record(1), 1, [])
    shown.close()
    out, err = capsys.readouterr()
    assert out.startswith("step 1/1  loss 2.0000") and err == ""


def test_a_terminal_gets_a_bar_per_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = use_terminal(monkeypatch)
    shown = RunProgress(20, 0, 10, None, None)
    times = {"step_time_s": 0.4, "data_wait_s": 0.008, "forward_s": 0.1, "backward_s": 0.24, "update_s": 0.04}
    shown.update(record(1, **times), 2, [gpu_row(0), gpu_row(1, 127 * 2**30, "[red]node2")])
    shown.close()
    text = terminal.getvalue()
    assert "step 400 ms: waiting for data 2 %, forward 25 %, backward 60 %, update 10 %" in text
    assert "1/20" in text and "loss 2.0000" in text
    assert "rank 0@node1" in text and "3.00 GiB of 128.00 GiB" in text and "500 ms" in text
    assert "\nrank 1@[red]node2" in text.replace("\r", "")  # a name is no markup
    assert "\x1b[31m" in text  # 127 of 128 GiB: red
    assert capsys.readouterr().out == ""


def test_a_watched_loop_with_a_bar_of_its_own_gets_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    import tqdm

    terminal = use_terminal(monkeypatch)
    shown = RunProgress(20, 0, every=None)
    with tqdm.tqdm(total=20, file=io.StringIO()):
        shown.update(record(1), 1, [gpu_row(0)])
        assert terminal.getvalue() == ""
    shown.update(record(2), 1, [gpu_row(0)])
    shown.close()
    assert "2/20" in terminal.getvalue()


def test_the_speed_says_which_tokens_it_counts(capsys: pytest.CaptureFixture[str]) -> None:
    shown = RunProgress(2, 0, 1, None, None)
    shown.update({"step": 1, "loss": 2.0, "tokens_per_s": 25.0, "positions_per_s": 323.0}, 1, [])
    shown.update({"step": 2, "loss": 2.0, "tokens_per_s": 323.0, "positions_per_s": 323.0}, 1, [])
    first, second = capsys.readouterr().out.splitlines()
    assert "25 tokens/s in the loss (323 with prompts and padding)" in first
    assert "323 tokens/s" in second and "padding" not in second
