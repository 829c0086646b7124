"""Rollouts of weights that the engine no longer has, of several, or of unknown ones are refused alike under TRL and verl."""

from __future__ import annotations

import re

import pytest

from tests.peers.conformance.origins import REFUSED
from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.conformance.scenarios_provenance")


BAD_ROW = "weight_version: row 2 was sampled with weight version 2, but the engine is at 3"
"""What TRL says of one rollout of other weights, which is a bad row of its batch."""


@pytest.mark.parametrize("host", ["trl", "verl"])
def test_rollouts_of_other_weights_are_refused_with_the_same_words(run: Run, host: str) -> None:
    found = run(getattr(scenarios, host)).expect()
    for case, words in REFUSED.items():
        expected = BAD_ROW if (host, case) == ("trl", "mixed") else words
        assert re.match(expected, found[case]), found[case]
