"""`mismatch-ext gate` with real vLLM: two float32 sides, two bf16 sides, and planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.scenarios_gate")


def check(found: dict[str, Any], admitted: dict[str, bool]) -> None:
    for name, passes in admitted.items():
        page = found[name]["page"]
        assert found[name]["status"] == (0 if passes else 1) and found[name]["passes"] == passes, page


@pytest.mark.engine
@pytest.mark.numeric
def test_a_gate_admits_sides_that_round_and_refuses_a_lost_layer_and_a_temperature(run: Run, tmp_path: Path) -> None:
    admitted = {"bfloat16": True, "float32": True, "lost": False, "temperature": False}
    found = run(scenarios.gated, out=str(tmp_path), names=list(admitted)).expect()
    check(found, admitted)
    figures = {name: {figure["name"]: figure["value"] for figure in found[name]["figures"]} for name in found}
    largest = "largest difference (nats)"
    assert figures["float32"][largest] < 1e-3 < figures["bfloat16"][largest]
    # What the engine does not get stays made-up, and only an update can bring it.
    assert "first block that differs: layer 2, mlp" in found["lost"]["page"], found["lost"]["page"]
    assert found["temperature"]["failed"] == ["error of the engine in units of rounding"]
    assert "weights: sent 2 times to an engine that started with made-up ones" in found["bfloat16"]["page"]
