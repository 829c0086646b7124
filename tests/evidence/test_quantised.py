"""`python -m benchmarks.quantised`: what a quantised vLLM costs by format, and the alarm on an error that grows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.readme import ROOT, in_readme, shell

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
CAUSES = "share of the gap's square"


def test_a_quantised_engine_is_further_away_and_weights_mend_it(evidence: Callable[..., None]) -> None:
    """A quantised vLLM is further from its trainer than bf16, and bounded weights leave less than half of the bias."""
    command = in_readme("python -m benchmarks.quantised")
    printed = shell(f"{command} --json")
    print(printed)
    found: dict[str, Any] = {}
    for line in printed.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    ran = {name: figures for name, figures in found.items() if "refused" not in figures}
    plain = ran.pop("bf16")
    assert ran, "no quantised format runs here"
    for name, figures in ran.items():
        assert figures["mean |Δlogp|"]["low"] > plain["mean |Δlogp|"]["high"], name
        # How large each is, on so few tokens with so heavy a tail, is recorded and not judged.
        assert sum(part["value"] for part in figures[CAUSES].values()) == pytest.approx(1), name
        assert figures["corrected"]["bias removed"]["low"] > 0.5, name
    table = (
        {"bf16": plain} | ran | {name: figures["refused"] for name, figures in found.items() if "refused" in figures}
    )
    evidence("quantised", table, command=command)


def test_the_alarm_fires_on_an_error_that_grows_and_on_no_constant_one(evidence: Callable[..., None]) -> None:
    """In TRL with vLLM the alarm on growth is raised where a planted error of the weights grows, never where it is constant."""
    command = in_readme("python -m benchmarks.quantised.growth")
    shell("rm -rf runs/quantised_growth")
    printed = shell(command)
    print(printed)
    found = json.loads(printed[printed.index("{") :])
    assert (ROOT / "runs/quantised_growth/growing/mismatch/metrics.jsonl").exists()
    assert found["constant"]["alarm raised at step"] == "never"
    assert isinstance(found["growing"]["alarm raised at step"], int)
    evidence("quantised_growth", found, command=command)
