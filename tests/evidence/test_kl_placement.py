"""`examples.kl_placement`: every placement of the KL term on a toy whose optimum is known."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.readme import ROOT, in_readme, shell


def test_where_the_kl_term_goes_decides(evidence: Callable[..., None]) -> None:
    """On a toy with a known optimum, K1 in the reward stays by it, and K3 in the reward runs away."""
    command = in_readme("python -m examples.kl_placement")
    printed = shell(command)
    assert (ROOT / "runs/kl_placement.html").stat().st_size > 1_000_000
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if line.startswith("│")
    ]
    found = {
        row[0]: {"J": float(row[1].split()[0]), "KL to reference": float(row[4].split()[0])} for row in rows if row[1]
    }
    assert len(found) == 13
    best = found["optimum"]
    # The ranking, with its errors, is the example's own sentence; what is asserted here are its extremes.
    assert best["J"] == max(row["J"] for row in found.values())
    assert (
        found["K1 reward"]["J"] > found["none"]["J"]
        and found["K1 reward"]["KL to reference"] < 1.5 * best["KL to reference"]
    )
    assert found["K3 reward"]["KL to reference"] > 1.5 * best["KL to reference"]
    sentence = re.search(r"By final J.*", printed, flags=re.S)
    assert sentence is not None
    evidence("kl_placement", found, command=command)
