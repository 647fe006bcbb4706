"""`python -m tests.generated` writes what is made from declarations: tables of docs, and the schema of the config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from shardkit.config.capability import markdown_table
from shardkit.config.errors import json_schema
from shardkit.telemetry import catalog

REPO = Path(__file__).resolve().parents[1]
SCHEMA = REPO / "configs" / "schema.json"


def metrics_table() -> str:
    """One line per field of `metrics.jsonl`."""
    lines = ["| field | unit | meaning | absent in | Prometheus |", "|---|---|---|---|---|"]
    for metric in catalog.METRICS:
        served = f"`shardkit_{metric.prometheus}` ({metric.kind})" if metric.prometheus else ""
        lines.append(f"| `{metric.key}` | {metric.unit} | {metric.meaning} | {metric.absent} | {served} |")
    return "\n".join(lines)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "capability": ("docs/capability.md", markdown_table),
    "metrics": ("docs/reference.md", metrics_table),
}


def parts_of(name: str) -> tuple[str, str, str]:
    """The page of a table: what is before, between and after its two markers."""
    before, begin, marked = (REPO / TABLES[name][0]).read_text(encoding="utf-8").partition(f"<!-- {name}:begin -->\n")
    table, end, after = marked.partition(f"\n<!-- {name}:end -->")
    return before + begin, table, end + after


def is_current(name: str) -> bool:
    return parts_of(name)[1] == TABLES[name][1]()


if __name__ == "__main__":
    for name, (page, make) in TABLES.items():
        before, _, after = parts_of(name)
        (REPO / page).write_text(before + make() + after, encoding="utf-8")
    SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
