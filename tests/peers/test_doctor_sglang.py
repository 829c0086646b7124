"""`mismatch-ext doctor --engine sglang` with a real SGLang on a CPU: a clean run and a fault, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.engines.sglang_environment import HELD, MAIN, run_sglang
from tests.peers.scenarios import named

scenarios = named("tests.peers.scenarios_doctor_sglang")


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.numeric
def test_a_clean_run_names_nothing_a_fault_is_confirmed_and_failures_are_ours(tmp_path: Path) -> None:
    found = run_sglang(scenarios.examined, HELD or MAIN, tmp_path)
    clean, fault, refused = found["clean"], found["fault"], found["refused"]
    assert clean["verdict"] == "clean" and clean["causes"] == [], clean
    assert fault["verdict"] == "explained", fault
    (cause,) = fault["causes"]
    assert cause["key"] == "temperature" and abs(cause["parameter"] - 0.9) < 0.005 and cause["status"] == "confirmed"
    # 32 draws of a prompt, some of which are alike by chance.
    assert found["different"] >= 4
    assert refused["unknown"].startswith("ConfigError") and "'seed'" in refused["unknown"]
    assert refused["long"].startswith("ConfigError") and "--engine-arg context_length" in refused["long"]
    assert refused["killed"].startswith("EngineError") and "mem_fraction_static" in refused["killed"]
    assert found["restored"] and found["stub"]["called"] == 0
