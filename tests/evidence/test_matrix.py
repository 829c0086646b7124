"""`make matrix QUICK=1`: one test of each thing that we hold on to in TRL and vLLM, at the ends of their supported ranges."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import matrix
from tests.readme import in_readme, shell

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def test_the_ends_of_the_ranges_pass(evidence: Callable[..., None]) -> None:
    """A test of each thing that we hold on to in TRL and vLLM passes at the ends of their supported ranges."""
    command = in_readme("make matrix QUICK=1")
    printed = shell(command, timeout=3500)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    head, *found = [row for row in rows if not set("".join(row)) <= {"-"}]
    assert head == [*matrix.VARIED.values(), *matrix.TESTS] and len(found) >= 2
    figures = {f"trl {row[0]}, vllm {row[1]}": dict(zip(head[2:], row[2:], strict=True)) for row in found}
    evidence("matrix", figures, command=command)
