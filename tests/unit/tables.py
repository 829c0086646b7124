"""Tables of cases that a parametrised test reads: `tables/NAME.jsonl`, one case a line, its keys the test's arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TABLES = Path(__file__).with_name("tables")


def table(name: str) -> tuple[list[str], list[Any]]:
    """Return what `pytest.mark.parametrize` takes; a case's key `why` is its id, and no argument."""
    rows = []
    for line in (TABLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        why = case.pop("why", None)
        rows.append(pytest.param(*case.values(), id=why))
    return list(case), rows
