"""DPPO's trust region in TRL: the policy term's weights by the current policy, and the share of tokens that it stops."""

from __future__ import annotations

from typing import Any

import torch
from mismatch_ext.adapters.trl.correction import CorrectionTerm
from torch import Tensor

from mismatch_ext.presets import PRESETS
from mismatch_ext.ranks import ONE_PROCESS

ADVANTAGES = torch.tensor([1.0, -1.0])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
ENGINE = torch.tensor([[0.5, 0.5, 0.2], [0.5, 0.5, 0.9]]).log()
# Further than .15 from the engine in the direction of the advantage: the first token of each row. The second of each is as far in
# the other direction, the third near, and the last one is not trained on.
POLICY = torch.tensor([[0.7, 0.3, 0.25], [0.3, 0.7, 0.1]]).log()


class TwoRanks:
    """Another rank has stopped 1 of 5 tokens."""

    rank, size = 0, 2

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def sum(self, values: Tensor) -> Tensor:
        return values + torch.tensor([1.0, 5.0], dtype=values.dtype)


def weights(term: CorrectionTerm) -> Tensor:
    inputs = {"sampling_per_token_logps": ENGINE, "advantages": ADVANTAGES}
    return term.policy_weights(POLICY, inputs, MASK)


def test_it_stops_what_moves_away_and_its_share_is_logged_once() -> None:
    term = CorrectionTerm(PRESETS["dppo_tv"], ONE_PROCESS)
    torch.testing.assert_close(weights(term).float(), torch.tensor([[0.0, 0.6, 1.25], [0.0, 1.4, 0.0]]))
    with torch.no_grad():
        weights(term)  # an evaluation
    assert term.metrics() == {"trust_region_frac": 2 / 5}
    assert term.metrics() == {}


def test_the_share_is_of_all_ranks_tokens() -> None:
    term = CorrectionTerm(PRESETS["dppo_tv"], TwoRanks())
    weights(term)
    assert term.metrics() == {"trust_region_frac": 3 / 10}


def test_weights_without_a_trust_region_log_none() -> None:
    term = CorrectionTerm(PRESETS["bypass_pg_is"], ONE_PROCESS)
    weights(term)
    assert term.metrics() == {}
