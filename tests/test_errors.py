from __future__ import annotations

import pickle

import pytest

from shardkit.errors import CheckpointError, ConfigError, LaunchError, ShardkitError, TrainingError, gib, report


@pytest.mark.parametrize(("kind", "code"), [(ConfigError, 2), (LaunchError, 2), (TrainingError, 1)])
def test_report_prints_cause_and_fix_and_returns_the_exit_code(
    kind: type[ShardkitError], code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARDKIT_DEBUG", raising=False)
    assert report(kind("what was found", "what to do")) == code
    captured = capsys.readouterr()
    assert captured.err == "error: what was found\n  fix: what to do\n"
    assert captured.out == ""


def test_report_without_a_fix_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDKIT_DEBUG", raising=False)
    report(CheckpointError("damaged"))
    assert capsys.readouterr().err == "error: damaged\n"


def test_debug_variable_adds_the_traceback_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDKIT_DEBUG", "1")
    try:
        try:
            int("x")
        except ValueError as reason:
            raise ConfigError("not a number") from reason
    except ConfigError as error:
        report(error)
    printed = capsys.readouterr().err
    assert "invalid literal for int()" in printed
    assert printed.endswith("error: not a number\n")


def test_errors_survive_the_way_between_processes() -> None:
    back = pickle.loads(pickle.dumps(LaunchError("cause", "fix")))
    assert (type(back), back.cause, back.fix, str(back)) == (LaunchError, "cause", "fix", "cause\n  fix: fix")


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0.0 MiB"),
        (102, "102 B"),
        (-103, "-0.1 KiB"),
        (4096, "4.0 KiB"),
        (0.1 * 2**20, "0.1 MiB"),
        (102 * 2**20, "102.0 MiB"),
        (0.1 * 2**30, "0.10 GiB"),
    ],
)
def test_bytes_are_never_told_as_none_where_there_are_some(n_bytes: float, text: str) -> None:
    assert gib(n_bytes) == text
