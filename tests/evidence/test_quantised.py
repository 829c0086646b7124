"""`python -m benchmarks.quantised`: what a quantised vLLM costs by format, and the alarm on an error that grows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.evidence import judges
from tests.readme import ROOT, in_readme, shell

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
CAUSES = "share of the gap's square"


def test_the_gap_of_a_quantised_engine_has_shares(evidence: Callable[..., None]) -> None:
    """A quantised vLLM is further from its trainer than bf16; the quantised parts make most of it, bounded weights mend most."""
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
        judges.enough_tokens(figures["tokens"])
        for measure in ("mean |Δlogp|", "k3"):
            assert figures[measure]["low"] > plain[measure]["high"], name
        parts = dict(figures[CAUSES])
        rest = parts.pop("rounding and all else")
        assert rest["high"] < 0.5 and sum(part["value"] for part in parts.values()) > 0.5, name
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
