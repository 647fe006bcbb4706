"""The pages say what is there: links lead somewhere, the architecture names what exists, the README stays short."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGES = sorted([*REPO.glob("*.md"), *REPO.glob("docs/**/*.md"), REPO / "examples" / "README.md"])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Of a page's headings, as code hosts and the site's generator make them."""
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def links(text: str) -> list[str]:
    return [one or other for one, other in LINK.findall(FENCE.sub("", text))]


def broken(page: Path) -> list[str]:
    found = []
    for link in links(page.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = page if not name else Path(os.path.normpath(page.parent / name))
        if not target.is_file() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    assert {str(page.relative_to(REPO)): broken(page) for page in PAGES if broken(page)} == {}


def test_the_index_leads_to_every_page() -> None:
    text = (REPO / "docs" / "index.md").read_text(encoding="utf-8")
    named = {os.path.normpath(f"docs/{link.partition('#')[0]}") for link in links(text)}
    pages = {str(path.relative_to(REPO)) for path in (REPO / "docs").glob("*.*") if path.suffix in (".md", ".rst")}
    assert pages - named == {"docs/index.md"}


def test_the_readme_leads_only_to_files_that_are_in_the_sdist() -> None:
    """What MANIFEST.in adds beside the package (tests/test_packaging.py builds it)."""
    manifest = (REPO / "MANIFEST.in").read_text().split()
    for link in links((REPO / "README.md").read_text(encoding="utf-8")):
        name = link.partition("#")[0]
        assert name in manifest or name.partition("/")[0] in manifest, link


ARCHITECTURE = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
PATH = re.compile(r"\b(?:shardkit|launch|slurm)/[\w/.]+\.(?:py|sbatch)\b")


def test_every_file_of_the_architecture_exists() -> None:
    named = set(PATH.findall(ARCHITECTURE))
    assert len(named) > 30
    assert [name for name in sorted(named) if not (REPO / name).is_file()] == []


def test_every_function_and_class_of_a_drawing_is_in_its_file() -> None:
    missing, found = [], 0
    boxes = re.findall(r'^ +\w+\["(.+)"\]$', ARCHITECTURE, re.MULTILINE)
    for label, name in ((box, name) for box in boxes for name in PATH.findall(box)):
        text = (REPO / name).read_text(encoding="utf-8")
        said = label.partition("<br>")[2]
        for kind, names in (("def", re.findall(r"(\w+)\(\)", said)), ("class", re.findall(r"^([A-Z]\w+):", said))):
            found += len(names)
            missing += [f"{name}: {kind} {one}" for one in names if not re.search(rf"\b{kind} {one}\b", text)]
    assert missing == []
    assert found > 40


def test_every_variable_of_shardkit_is_in_the_architecture() -> None:
    used = set()
    for folder in ("launch", "shardkit", "slurm"):
        for path in (REPO / folder).rglob("*"):
            if path.suffix in (".py", ".sbatch"):
                used |= set(re.findall(r"\bSHARDKIT_[A-Z_]+\b", path.read_text(encoding="utf-8")))
    assert used == set(re.findall(r"\bSHARDKIT_[A-Z_]+\b", ARCHITECTURE))


@pytest.mark.parametrize("module", ["shardkit", "shardkit.memory", "shardkit.activation", "shardkit.strategies"])
def test_every_public_name_is_in_the_api_page(module: str) -> None:
    page = (REPO / "docs" / "api.rst").read_text(encoding="utf-8")
    names = set(import_module(module).__all__) - {"__version__", "EngineFactory", "OptimizerFactory"}
    documented_together = {"ConfigError", "ShardkitError"}  # automodule:: shardkit.errors
    assert [name for name in sorted(names - documented_together) if f":: {module}.{name}\n" not in page] == []
