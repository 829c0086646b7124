"""Steps of drawn trainings are what they come to by hand, whatever a user's subclass does to rows and loss, or are refused.

`make nightly` compares 500 draws, 20 of which are in `make test`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_by_hand as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_by_hand")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]
IN_TEST, ALL, AT_ONCE = 20, 500, 40
NEAR, ROUNDING = 1e-3, 3e-6
"""Largest difference of an update, as a part of it (Adam divides by tiny gradients) and of all weights' rounding to float32."""


def refused(case: dict[str, Any]) -> bool:
    """Tell whether a draw is refused: terms outside of a loss in two halves have no pass over all rows to be made of."""
    user = case["user"]
    return "kl" in case["block"] and user["ours_first"] and user["call"] == "halves"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("first", "last"),
    [
        (0, IN_TEST),
        *(
            pytest.param(first, min(first + AT_ONCE, ALL), marks=pytest.mark.nightly)
            for first in range(IN_TEST, ALL, AT_ONCE)
        ),
    ],
)
def test_steps_are_the_hand_computed_ones_or_refused(
    run: Run, dense: Path, tmp_path: Path, first: int, last: int
) -> None:
    results = run(scenarios.drawn, model=dense, out=tmp_path, first=first, last=last, timeout=800).expect()
    wrong = [
        result
        for result in results
        if ("refused" in result) != refused(result["case"])
        or (
            "errors" in result
            and not (len(result["errors"]) == 3 and all(off < NEAR * size + ROUNDING for off, size in result["errors"]))
        )
    ]
    assert not wrong, wrong[:3]
    assert all("log-probabilities" in result["refused"] for result in results if "refused" in result)
    assert sum("errors" in result for result in results) > len(results) / 2
