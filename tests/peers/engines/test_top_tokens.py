"""What vLLM reports as its most likely tokens is the policy's own distribution, however vLLM hands it over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.engines import scenarios_top_tokens as scenarios
else:
    scenarios = named("tests.peers.engines.scenarios_top_tokens")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]


def test_heads_are_the_policys_own_from_flat_arrays_and_from_objects(run: Run, dense: Path) -> None:
    found = run(scenarios.heads, model=dense).expect()
    assert found["flat"]["were flat"] == [True] * 6 and found["objects"]["were flat"] == [False] * 6
    for heads in found.values():
        assert heads["shapes"] == [[length, 6] for length in heads["lengths"]] and max(heads["lengths"]) > 1
        # Both sides compute in float32. A head of another place or row is off by whole nats.
        assert heads["apart"] < 1e-3 and heads["sampled"] < 1e-3, found
