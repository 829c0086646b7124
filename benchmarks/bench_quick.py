"""Figures of pages that take seconds: `python -m benchmarks.gpu --device cpu --quick`, and `python -m examples.kl_placement`."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.gpu import PARTS, QUICK
from examples.kl_placement import BETA, Toy, optimum
from examples.kl_placement import run as placements


def run() -> list[dict[str, Any]]:
    """Return the rows of both, as their own commands print them."""
    given = argparse.Namespace(device="cpu", model="", experts="", prompts="", quick=True, seed=0)
    rows = [
        {"name": f"benchmarks.gpu, {part}", **row}
        for part, (_, measure) in PARTS.items()
        for row in measure(given, QUICK)
    ]
    best = optimum(Toy.make(), BETA).j
    for found in placements():
        j = float(found.j.mean())
        rows.append(
            {
                "name": f"examples.kl_placement, {found.name}",
                "J": j,
                "below optimum": best - j,
                "KL": float(found.kl.mean()),
            }
        )
    return rows
