"""README and docs: every link has a target, every Python block compiles, and every `mismatch` block is one that is taken."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from mismatch_ext.config import MismatchConfig

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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_is_what_it_claims_to_be(page: Path) -> None:
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for language, block in blocks:
        if language == "python":
            compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif "mismatch" in (settings := yaml.safe_load(block)):
            MismatchConfig.parse(settings["mismatch"])
