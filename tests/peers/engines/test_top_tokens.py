"""What vLLM reports as its most likely tokens is the policy's own distribution."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.engines.scenarios_top_tokens")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]


def test_heads_and_sampled_tokens_are_the_policys_own(run: Run, dense: Path) -> None:
    found = run(scenarios.heads, model=dense).expect()
    # Both sides compute in float32. A head of another place or row is off by whole nats.
    assert found["apart"] < 1e-3 and found["sampled"] < 1e-3, found
