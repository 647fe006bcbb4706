from __future__ import annotations

import pickle

import pytest

from shardkit.errors import CheckpointError, ConfigError, LaunchError, ShardkitError, TrainingError, gib, report


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (ConfigError("what was found", "what to do"), 2, "error: what was found\n  fix: what to do\n"),
        (LaunchError("what was found", "what to do"), 2, "error: what was found\n  fix: what to do\n"),
        (TrainingError("what was found", "what to do"), 1, "error: what was found\n  fix: what to do\n"),
        (CheckpointError("damaged"), 2, "error: damaged\n"),
    ],
)
def test_report_prints_cause_and_fix_and_returns_the_exit_code(
    error: ShardkitError, code: int, lines: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHARDKIT_DEBUG", raising=False)
    assert report(error) == code
    assert capsys.readouterr() == ("", lines)


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
    assert "invalid literal for int()" in printed and printed.endswith("error: not a number\n")


def test_errors_survive_the_way_between_processes() -> None:
    back = pickle.loads(pickle.dumps(LaunchError("cause", "fix")))
    assert (type(back), back.cause, back.fix, str(back)) == (LaunchError, "cause", "fix", "cause\n  fix: fix")


def test_bytes_are_never_told_as_none_where_there_are_some() -> None:
    sizes = [0, 102, -103, 4096, 0.1 * 2**20, 102 * 2**20, 0.1 * 2**30]
    assert [gib(n) for n in sizes] == ["0.0 MiB", "102 B", "-0.1 KiB", "4.0 KiB", "0.1 MiB", "102.0 MiB", "0.10 GiB"]
