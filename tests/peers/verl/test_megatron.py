"""verl's Megatron engine with the checks of its replay, around a real megatron-core model, on a CPU."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl import scenarios_megatron as scenarios
else:
    scenarios = named("tests.peers.verl.scenarios_megatron")


pytestmark = pytest.mark.engine

SAID = tomllib.loads(Path(__file__).with_name("refused_routes.toml").read_text(encoding="utf-8"))["megatron"]


def test_good_batches_are_verls_own_bit_for_bit_and_what_would_not_be_replayed_is_refused(run: Run) -> None:
    # One scenario, whose imports no other shares.
    found = run(scenarios.everything, fresh=True).expect()
    assert found.keys() == SAID.keys()
    for name, (error, words) in SAID.items():
        assert found[name].startswith(error) and words in found[name], (name, found[name])
