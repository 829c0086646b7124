"""Tests that are named outside of themselves, by what users install and by planted faults, are there."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.stacks import ROOT, STACKS

FAULTS = tomllib.loads((ROOT / "tests/mutants.toml").read_text(encoding="utf-8"))["fault"]
NAMED = {**{f"stack {name}": tests for name, tests in STACKS.items()}, **{f["name"]: f["tests"] for f in FAULTS}}


@cache
def defined(file: Path) -> set[str]:
    """Return the classes, functions and methods of a file, as pytest's ids name them."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}::{inner.name}" for inner in methods}
    return found


@pytest.mark.parametrize("who", NAMED)
def test_every_named_test_exists(who: str) -> None:
    for test in NAMED[who]:
        file, _, name = test.partition("[")[0].partition("::")
        assert (ROOT / file).exists(), test
        assert not name or name in defined(ROOT / file), f"{test} is not there"
