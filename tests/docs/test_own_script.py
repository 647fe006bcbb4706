"""docs/integrations.md, "Launch your own script": the examples run as they stand there, and print what is shown."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.test_integrations import PAGE, environment
from tests.docs.test_integrations import folder as folder  # a fixture

SECTION = PAGE.partition("\n## Launch your own script\n")[2].partition("\n## ")[0]
BASH = re.findall(r"^```bash\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
TEXT = re.findall(r"^```text\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.dist
def test_the_examples_print_what_the_page_shows(folder: Path) -> None:
    assert len(BASH) == len(TEXT) == 2
    for script, shown in zip(BASH, TEXT, strict=True):
        done = subprocess.run(
            ["bash", "-eu", "-c", script], cwd=folder, env=environment(folder), timeout=240,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        pattern = ".*".join(re.escape(piece) for piece in shown.split("…"))
        assert re.search(pattern, done.stdout, re.DOTALL), done.stdout
    assert "rank 1: step" not in done.stdout
