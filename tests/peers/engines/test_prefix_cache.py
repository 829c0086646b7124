"""A prefix cache that is older than the weights, in a real vLLM: named by figure and cause, and a clean one never."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.engines.scenarios_prefix_cache")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]

BLOCKS = [32, *(pytest.param(size, marks=pytest.mark.nightly) for size in (64, 128, 512))]
"""vLLM's CPU engine takes multiples of 32 only. So its blocks are larger than the 24 tokens of the weight check's prompts."""


@pytest.mark.parametrize("block_size", BLOCKS)
def test_the_doctor_names_a_stale_prefix_and_a_reset_mends_it(run: Run, tmp_path: Path, block_size: int) -> None:
    found = run(scenarios.diagnosed, out=str(tmp_path), block_size=block_size).expect()
    print(found)
    for clean in ("warm", "reset"):
        assert found[clean]["verdict"] == "clean" and found[clean]["causes"] == [], found[clean]
    ((key, remedy),) = found["stale"]["causes"]
    assert key == "decode_path" and "reset the prefix cache" in remedy, found["stale"]
    assert found["stale"]["gap"] > 100 * found["reset"]["gap"]
