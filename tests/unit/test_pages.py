"""README and docs lead somewhere: every link of theirs has a target, and the README stays one page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def plain(path: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", plain(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", plain(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_the_readme_is_one_page() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150, "move what is long to a page of docs"
    tables = [line for line, before in zip(lines[1:], lines, strict=False) if line.startswith("|---") and before]
    pictures = [line for line in lines if line.startswith("![")]
    assert (len(tables), len(pictures)) == (1, 1)
