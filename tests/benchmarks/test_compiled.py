"""The options of the benchmark of compiled training forget no more than is measured again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compiled
from tests.cuda.compiled import cases, write


@pytest.mark.parametrize(
    ("options", "forgotten"),
    [
        ([], "shared"),
        (["--isolated"], "isolated"),
        (["--plan"], None),
        (["--collect"], None),
    ],
)
def test_again_forgets_only_what_is_measured_next(
    options: list[str], forgotten: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, other, *_ = map(str, cases())
    folders = {"shared": tmp_path, "isolated": tmp_path / compiled.ISOLATED}
    for folder in folders.values():
        write(folder, name, {"error": "of an earlier run"})
        write(folder, other, {"error": "of an earlier run"})
    published: dict[str, Any] = {}
    monkeypatch.setattr(compiled, "take_over", lambda folder: None)
    monkeypatch.setattr(compiled, "run", lambda *_: None)
    monkeypatch.setattr(compiled, "plan_each", lambda *_: None)
    monkeypatch.setattr(compiled, "publish", lambda name, result, section: published.update(result))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["compiled", "--again", "--only", name, "--folder", str(tmp_path), *options])
    compiled.main()
    left = {"shared": published["cases"], "isolated": published["isolated"]}
    assert [place for place in folders if name not in left[place]] == ([] if forgotten is None else [forgotten])
    assert all(other in left[place] for place in folders)
