"""Chat templates that ask for memory, time or output without end: two lines, and the process goes on."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from shardkit.data.chat import RowError, Template, limits
from shardkit.data.loader import StepLoader
from shardkit.data.order import BatchSchedule
from shardkit.data.tokenize import pool
from shardkit.errors import DataError
from shardkit.files import bounded

from .chats import PLAIN, conversation, write_lines, write_tokenizer
from .test_streaming import alarm, stream_of
from .test_text import opened

pytest.importorskip("transformers")
needs_limits = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where memory can be limited")

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}"
END = "{% endfor %}{% endfor %}"
HUNGRY = {
    "product": "{{ 'a' * 10**10 }}",
    "product of the input": "{{ messages[0].role * 10**10 }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "filter": "{{ 'a' | center(10**10) }}",
    "replace": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "list": "{% set l = [0] * 10**10 %}",
    "join": "{{ (['a' * 10**6] * 10**6) | join }}",
    "doubling": "{% set ns = namespace(s='a') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "appending": "{% set ns = namespace(l=[]) %}"
    + LOOP
    + "{% set ns.l = [ns.l, 'x' ~ i * 10**6 ~ messages[0].role * 10**6] %}"
    + END,
    "output": LOOP + "{{ 'x' * 10**6 }}" + END,
    "constant that nobody reads": "{% set x = 'a' * 9 * 10**8 %}ok",
}
"""More memory than a machine has, in one operation or in many."""
HARMLESS_SIZE = {
    "too much output": ("{{ 'x' * 10**6 }}", "it makes 1,000,000 characters of one conversation"),
    "too many marks": ("{% generation %}" * 9 + "x" + "{% endgeneration %}" * 9, "it marks 9 parts of 1 characters"),
}

_EACH = """
import json, re, resource, sys
from shardkit.data.chat import Template, limits, renderer
from shardkit.errors import DataError
from shardkit.files import bounded
templates, n_bytes = json.load(sys.stdin), 1 << 28
bounded.LIMITS["chat template"] = bounded.Limit(n_bytes, 0, 20, 1)
renderer()
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # spares the machine if the limit is not there
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
before = resource.getrlimit(resource.RLIMIT_DATA)
for name, source in templates.items():
    open("/proc/self/clear_refs", "w").write("5")  # the peak is that of now
    start, says = peak(), "nothing"
    try:
        with limits():
            Template(source, {}).render([{"role": "user", "content": "a"}])
    except DataError as error:
        says = f"{error.cause}\\n{error.fix}"
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    print(json.dumps([name, says, (peak() - start) / n_bytes]))
"""


@pytest.mark.slow
@needs_limits
def test_a_template_gets_no_more_memory_than_it_may_have() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EACH], input=json.dumps(HUNGRY), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in found] == list(HUNGRY)
    for name, says, share in found:
        cause, fix = says.split("\n")
        assert cause.endswith("takes it more memory than it may have, 0.25 GiB at most"), (name, says)
        assert "data.chat_template" in fix
        assert share < 1.1, name


@needs_limits
def test_workers_refuse_it_in_two_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_SMALL", 0)
    path = write_lines(tmp_path / "chat.jsonl", ({"messages": conversation(i)} for i in range(9)))
    write_tokenizer(tmp_path / "tok", HUNGRY["product of the input"])
    with pytest.raises(DataError, match=r"more memory than it may have, 1 GiB at most") as caught:
        opened(tmp_path, path)
    assert "\n" not in caught.value.cause + caught.value.fix
    assert not [found for found in (tmp_path / "cache").glob("*") if found.is_dir()], "nothing half-written"


@needs_limits
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_refuses_it_in_two_lines(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bounded.LIMITS, "chat template", bounded.Limit(1 << 28, 0, 20, 1))
    path = write_lines(tmp_path / "chat.jsonl", ({"messages": conversation(i)} for i in range(9)))
    val = write_lines(tmp_path / "val.jsonl", ({"prompt": "ask", "completion": "answer"} for _ in range(9)))
    write_tokenizer(tmp_path / "hostile", HUNGRY["doubling"])
    before = resource.getrlimit(resource.RLIMIT_DATA), alarm()
    data = stream_of(tmp_path, path, monkeypatch, val_path=str(val), tokenizer=str(tmp_path / "hostile"))
    schedule = BatchSchedule(len(data), 1, 1, 1, 0, 1, 0, False, False)
    loader = StepLoader(data, schedule, workers=workers)
    with pytest.raises(DataError, match=r"more memory than it may have, 0.25 GiB at most"):
        next(loader)
    loader.close()
    assert (resource.getrlimit(resource.RLIMIT_DATA), alarm()) == before


@pytest.mark.parametrize("case", HARMLESS_SIZE)
def test_output_out_of_proportion_is_refused(case: str) -> None:
    source, says = HARMLESS_SIZE[case]
    with pytest.raises(DataError, match=re.escape(says)):
        Template(source, {}).render([{"role": "user", "content": "a"}])


def test_long_conversations_and_tools_are_not_out_of_proportion() -> None:
    long = [*conversation(1), {"role": "user", "content": "word " * 10**6}]
    assert len(Template(PLAIN, {}).render(long)[0]) > 5 * 10**6
    tools = [{"name": f"tool {i}", "parameters": {"a": {"b": [{"c": i}] * 9}}} for i in range(99)]
    text, _ = Template("{{ tools | tojson(indent=8) }}" * 2, {}).render(conversation(1), tools)
    assert len(text) > 4 * len(json.dumps(tools))


def test_a_templates_own_message_is_cut() -> None:
    with pytest.raises(RowError) as caught:
        Template("{{ raise_exception('x ' * 10**6) }}", {}).render(conversation(1))
    assert len(str(caught.value)) < 400


@needs_limits
def test_limits_leave_a_lower_limit_and_other_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = bounded.used_bytes()
    assert used is not None
    lower = used + (1 << 29)

    def limited(n_bytes: int) -> AbstractContextManager[None]:
        monkeypatch.setitem(bounded.LIMITS, "chat template", bounded.Limit(n_bytes, 0, 20, 1))
        return limits()

    resource.setrlimit(resource.RLIMIT_DATA, (lower, hard))
    try:
        with limited(1 << 30):
            assert resource.getrlimit(resource.RLIMIT_DATA) == (lower, hard)
        with limited(1 << 20):
            assert used <= resource.getrlimit(resource.RLIMIT_DATA)[0] < lower
        assert resource.getrlimit(resource.RLIMIT_DATA) == (lower, hard)
        with pytest.raises(KeyError), limited(1 << 20):
            raise KeyError
        assert resource.getrlimit(resource.RLIMIT_DATA) == (lower, hard)
        with pytest.raises(DataError, match="more memory"), limited(1 << 31):
            bytearray(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    seen: list[int] = []

    def look() -> None:
        with limited(1 << 20):
            seen.append(resource.getrlimit(resource.RLIMIT_DATA)[0])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [soft]


def test_a_system_that_does_not_tell_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "used_bytes", lambda limit: None)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limits():
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
