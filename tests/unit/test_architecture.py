"""docs/architecture.md leads to functions that exist: who follows a rollout by it must not arrive at nothing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py):(\w+)`", PAGE)))
FILES = sorted(set(re.findall(r"`((?:adapters|mismatch_ext|patches)/[\w/]+\.py)`", PAGE)))


@pytest.mark.parametrize(("file", "function"), NAMED, ids=lambda part: part)
def test_every_function_of_the_page_is_there(file: str, function: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def test_every_file_of_the_page_is_there_and_both_hosts_have_a_table() -> None:
    assert not [file for file in FILES if not (ROOT / file).is_file()]
    hops = [len(re.findall(r"^\| \d+ \|", part, re.MULTILINE)) for part in PAGE.split("\nIn verl, a folder")]
    assert len(hops) == 2 and min(hops) > 10
