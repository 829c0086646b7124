"""docs/architecture.md leads to functions that are there and call one another as it says, for whoever follows a rollout by it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.unit.test_imports import product_modules

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
NAME = re.compile(r"`([\w/]+\.py):(\w+)`")
NAMED = sorted(set(NAME.findall(PAGE)))
FILES = sorted(set(re.findall(r"`((?:adapters|mismatch_ext|patches)/[\w/]+\.py)`", PAGE)))
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def definitions(file: str) -> dict[str, list[Function]]:
    """Return the functions and classes of a file by name."""
    found: dict[str, list[Function]] = {}
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            found.setdefault(node.name, []).append(node)
    return found


def mentioned(function: Function) -> set[str]:
    """Return every name that a function reads, as a variable or as an attribute of something."""
    nodes = list(ast.walk(function))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def calls(page: str) -> list[tuple[list[tuple[str, str]], tuple[str, str]]]:
    """Return the calls that the page's tables claim: of `a`, `b` › `c`, `d` that `a` or `b` calls `c`, and one of them `d`."""
    found = []
    for cell in (cell for line in page.splitlines() if re.match(r"\| \d+ \|", line) for cell in line.split("|")):
        for chain in cell.split(";"):
            steps = [NAME.findall(step) for step in chain.split("›")]
            for callers, called in zip(steps, steps[1:], strict=False):
                found += [(callers, one) for one in called]
    return found


@pytest.mark.parametrize(("file", "function"), NAMED, ids=lambda part: part)
def test_every_function_of_the_page_is_there(file: str, function: str) -> None:
    assert function in definitions(file)


@pytest.mark.parametrize(("callers", "called"), calls(PAGE), ids=lambda part: str(part[-1]))
def test_each_hop_calls_what_the_page_says(callers: list[tuple[str, str]], called: tuple[str, str]) -> None:
    functions = [node for file, name in callers for node in definitions(file)[name]]
    assert any(called[1] in mentioned(node) for node in functions), (callers, called)


def test_the_search_for_calls_sees_every_claim_and_can_fail() -> None:
    assert len(calls(PAGE)) > 40
    row = "| 1 | hop | `a.py:f`, `a.py:g` › `b.py:h`, `b.py:i` › `c.py:j`; `d.py:k` | |"
    first, second = [("a.py", "f"), ("a.py", "g")], [("b.py", "h"), ("b.py", "i")]
    assert calls(row) == [(first, ("b.py", "h")), (first, ("b.py", "i")), (second, ("c.py", "j"))]
    (function,) = ast.parse("def f():\n    self.g(h)").body
    assert isinstance(function, ast.FunctionDef) and mentioned(function) == {"self", "g", "h"}


def test_every_file_of_the_page_is_there_and_both_hosts_have_a_table() -> None:
    assert not [file for file in FILES if not (ROOT / file).is_file()]
    hops = [len(re.findall(r"^\| \d+ \|", part, re.MULTILINE)) for part in PAGE.split("\n### In verl\n")]
    assert len(hops) == 2 and min(hops) > 10


def test_every_module_of_the_product_is_read_in_one_sitting() -> None:
    found = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in product_modules().values()}
    assert len(found) > 400
    assert not {str(file): lines for file, lines in found.items() if lines > 400}
