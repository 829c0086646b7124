"""What a correction throws away: shares by hand, by quarter of response length, merged, logged and watched."""

from __future__ import annotations

import math

import pytest
import torch

from mismatch_ext.alarms import AlarmState, rules_of, watch
from mismatch_ext.config import MonitorConfig
from mismatch_ext.correction import masked_metrics, masked_sums
from mismatch_ext.names import PREFIX
from mismatch_ext.sums import merged

LENGTHS = (8, 2, 7, 1, 4, 0, 3, 6, 5)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and mask of eight responses of 1 to 8 tokens and an empty one; lost are those of 8, 7, and half of 6."""
    mask = (torch.arange(8) < torch.tensor(LENGTHS)[:, None]).long()
    weights = torch.rand(9, 8) + 0.1
    weights[[0, 2]] = 0.0
    weights[7, 3:] = 0.0
    return weights, mask


def test_shares_by_hand() -> None:
    found = masked_metrics(masked_sums(*batch()))
    quarters = {f"masked_token_frac/q{i}": share for i, share in enumerate((0, 0, 3 / 11, 1), start=1)}
    quarters |= {f"masked_seq_frac/q{i}": float(share) for i, share in enumerate((0, 0, 0, 1), start=1)}
    # Long: 2 of 2 responses, short: 0 of 2, with half a response added to each count.
    spread = math.sqrt(1 / 2.5 - 1 / 2.5 + 1 / 0.5 - 1 / 2.5)
    low = (2.5 / 2.5) / (0.5 / 2.5) * math.exp(-1.282 * spread)
    whole = {"masked_token_frac": 18 / 36, "masked_seq_frac": 2 / 8, "masked_long_ratio_low": low}
    assert found == pytest.approx(quarters | whole)


def test_weights_of_responses_stand_for_all_of_their_tokens_and_parts_add_up() -> None:
    weights, mask = batch()
    by_row = torch.tensor([0.0, 1, 0, 1, 1, 1, 1, 1, 1])[:, None]
    one = masked_sums(by_row, mask)
    assert masked_metrics(one)["masked_token_frac"] == 15 / 36
    twice = merged(one, masked_sums(weights, mask), masked_sums(torch.zeros(0, 0), torch.zeros(0, 0)))
    assert masked_metrics(twice)["masked_token_frac"] == (15 + 18) / 72
    assert masked_metrics(masked_sums(weights, torch.zeros_like(mask))) == {}


@pytest.mark.parametrize(
    ("lost", "of", "raised"),
    [
        ((40, 5), 100, {"masked_token_frac", "masked_long_ratio_low"}),
        ((20, 20), 100, {"masked_token_frac"}),  # long ones no more often
        ((1, 0), 3, {"masked_token_frac"}),  # too few to tell
        ((0, 0), 100, set()),
    ],
)
def test_alarms(lost: tuple[int, int], of: int, raised: set[str]) -> None:
    """Of so many long responses and short ones some are masked; as many of a middling length are kept."""
    lengths = torch.tensor([16, 8, 2]).repeat_interleave(torch.tensor([of, 2 * of, of]))
    mask = (torch.arange(16) < lengths[:, None]).long()
    kept = torch.ones(4 * of, 1)
    kept[: lost[0]] = 0
    kept[3 * of : 3 * of + lost[1]] = 0
    metrics = {PREFIX + name: value for name, value in masked_metrics(masked_sums(kept, mask)).items()}
    state, rules = AlarmState(), rules_of(MonitorConfig())
    for step in range(3):
        state, alarms = watch(state, metrics, rules, step)
    assert {alarm.metric.removeprefix(PREFIX) for alarm in alarms} == raised, metrics
