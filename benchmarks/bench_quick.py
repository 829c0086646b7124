"""Figures of pages that take seconds: the gap of `python -m benchmarks.gpu --device cpu --quick`, and `examples.kl_placement`."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.gpu import QUICK, measure_gap
from examples.kl_placement import BETA, Toy, optimum
from examples.kl_placement import run as placements


def run() -> list[dict[str, Any]]:
    """Return the rows of both, as their own commands print them."""
    given = argparse.Namespace(device="cpu", model="", experts="", quick=True, seed=0)
    rows = [{"name": "benchmarks.gpu, gap", **row} for row in measure_gap(given, QUICK)]
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
