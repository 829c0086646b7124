"""`mismatch.level: observe` in verl: its engine is stock's to the last bit, and what would be refused is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_observe as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_observe")

# What is found by the pass that compares routes, by what was done to them.
ROUTES = {
    "zero": "0 rows for 10 tokens, and zeros from there on",
    "short": "11 rows for 14 tokens",
    "surplus": "10 rows for 9 tokens",
    "none": "has no 'routed_experts'",
    "altered": "its token ids are others than those that its routes were recorded of",
}


@pytest.mark.numeric
def test_the_engine_is_verls_bit_for_bit_and_its_faults_are_named(run: Run, moe: Path) -> None:
    found = run(scenarios.observe, model=moe).expect()
    stock, observed = found["verl"], found["observe"]
    compared = observed.pop("between")
    stock.pop("between")
    assert observed == stock and stock["grad_norm"][0] > 0
    assert [(f["check"], f["kind"]) for f in found["at_start"]] == [("precision_actor", "apply")]
    assert "float16" in found["at_start"][0]["message"] and found["report"]["lr"] is None
    for cases in compared:
        for case, (metrics, findings) in cases.items():
            if case == "right":
                assert not findings and metrics["routing/compared_tokens"] > 0
                continue
            assert {(f["check"], f["kind"]) for f in findings} == {("routes", "stop")}, (case, findings)
            assert ROUTES[case] in findings[0]["message"], findings
    assert [(f["check"], f["kind"]) for f in found["swapped"]] == [("routes", "stop")], found["swapped"]
    assert "layers are swapped" in found["swapped"][0]["message"]
    # The model's own routes, before its weights move.
    assert (
        compared[0]["right"][0]["routing/set_mismatch_frac"] == 0 < compared[2]["right"][0]["routing/set_mismatch_frac"]
    )


@pytest.mark.numeric
def test_a_scaler_that_has_disabled_itself_is_named_and_stays(run: Run, moe: Path) -> None:
    found = run(scenarios.half, model=moe).expect()
    findings = found.pop("findings")
    assert found["observe"] == found["verl"] and found["verl"]["scaler"] == "ShardedGradScaler"
    assert [(f["check"], f["kind"]) for f in findings] == [("loss_scaler", "stop")]
    assert "has disabled itself" in findings[0]["message"]
