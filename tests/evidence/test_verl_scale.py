"""`benchmarks.bench_verl_scale`: what gap and KL cost, all of it in verl's driver and by parts on its workers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.readme import shell

pytestmark = pytest.mark.timeout(900)
COMMAND = "python -m benchmarks.bench_verl_scale"


def test_the_drivers_share_does_not_grow_with_tokens(evidence: Callable[..., None]) -> None:
    """In verl's driver, gap and KL cost what ranks and responses cost, not tokens: seconds and bytes, before over after."""
    rows = [json.loads(line) for line in shell(COMMAND).splitlines() if line.startswith("{")]
    assert rows and all(set(row) == {"name", "ours", "theirs", "ratio", "equal"} and row["equal"] for row in rows)
    sizes = [row for row in rows if "peak bytes" in row["name"]]
    assert len(sizes) == 3
    # What the driver holds are states of a few kilobytes, against four fields of every token and their float64 copies.
    assert sizes[0]["ratio"] > 20, sizes[0]
    figures = {row["name"]: {"after": row["ours"], "before": row["theirs"], "ratio": row["ratio"]} for row in rows}
    evidence("verl_scale", figures, command=COMMAND)
