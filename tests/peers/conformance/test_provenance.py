"""Rollouts of weights that the engine no longer has, of several, or of unknown ones are refused alike under TRL and verl."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.peers.conformance.origins import REFUSED
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.conformance import scenarios_provenance as scenarios
else:
    scenarios = named("tests.peers.conformance.scenarios_provenance")


BAD_ROW = "weight_version: row 2 was sampled with weight version 2, but the engine is at 3"
"""What TRL says of one rollout of other weights, which is a bad row of its batch."""


@pytest.mark.parametrize("host", ["trl", "verl"])
def test_rollouts_of_other_weights_are_refused_with_the_same_words(run: Run, host: str) -> None:
    found = run(getattr(scenarios, host)).expect()
    for case, words in REFUSED.items():
        expected = BAD_ROW if (host, case) == ("trl", "mixed") else words
        assert re.match(expected, found[case]), found[case]


def test_verls_servers_are_held_to_what_was_sent_and_to_each_other(run: Run) -> None:
    found = run(scenarios.verl).expect()
    for case, words in {
        "unasked": "RecordError: rollout prompt_0 has no provenance",
        "two versions": "prompt_0 was sampled with weight_version=3 and weight_version=4",
        "server is stale": "of rollout server 0 has weight_version=3, of rollout server 1 has weight_version=2",
        "server got none": "of rollout server 1 has no weight version",
        "server is patched": "of rollout server 1 has patch_digest='ab'",
        "server is another": "of rollout server 1 has engine_version='0.29.0'",
        "no server has it": "engines with weights of weight version 3, but the engine is at 4",
        "servers have changed": "the run so far has engine_version='0.30.0+cpu', the run has engine_version='0.29.0'",
    }.items():
        assert words in found[case], found[case]
