"""When a measured ratio bears out a claim: pure functions of figures, each with the reason for its bound.

Each takes an interval as a dictionary with `value`, `low` and `high`, and looks at the end of it that is nearest to the bound, so
that a sample that is too small to tell fails. None of the bounds was read off a machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Interval = dict[str, float]
# bfloat16 rounds to 8 significant bits and float16 to 11: rounding errors are 2^3 times smaller, and k3, which grows with the
# square of a gap, 2^6 times. Half of the first is asked for, since not all of a gap is rounding to the dtype. Of k3 the square of
# that is asked for, a quarter of what bits say: k3's tail is so heavy that on the demo's 58 thousand tokens its interval alone
# reaches from half of its value to one and a half, and a low end of 26 of 64 was seen. A fault that leaves a tenth of the effect
# has 1 + 63 / 10, about 7, far below 16.
MEAN, K3 = 2.0**3, 2.0**6
MEAN_BOUND = MEAN / 2
K3_BOUND = MEAN_BOUND**2
# Engine and trainer are both float32 programs of one function, and each is as far from the exact result as float32 rounds: by the
# triangle inequality their gap is at most twice one of them. Twice that again, for kernels that sum in another order.
FLOAT32 = 4.0
TOKENS = 50_000


def enough_tokens(tokens: float) -> None:
    """Refuse to judge a sample of fewer than 50,000 tokens."""
    assert tokens >= TOKENS, f"{tokens:.0f} tokens are too few to judge by; at least {TOKENS} are needed"


def fp16_is_finer(mean: Interval, k3: Interval) -> None:
    """bf16's gap over FP16's is at least half of what their significant bits say, and k3's at least the square of that."""
    assert mean["low"] >= MEAN_BOUND, (
        f"mean |Δlogp|, bf16 over FP16: {said(mean)}; bits say {MEAN:g}, needed is {MEAN_BOUND:g}"
    )
    assert k3["low"] >= K3_BOUND, f"k3, bf16 over FP16: {said(k3)}; bits say {K3:g}, needed is {K3_BOUND:g}"


def float32_is_the_oracle(mean: Interval, k3: Interval) -> None:
    """The float32 gap is that of two float32 programs; its scale is the trainer's float32 against float64 on the same tokens."""
    assert mean["high"] <= FLOAT32, f"mean |Δlogp| over float32's own rounding: {said(mean)}; at most {FLOAT32:g}"
    assert k3["high"] <= FLOAT32**2, f"k3 over that of float32's own rounding: {said(k3)}; at most {FLOAT32**2:g}"


def replay_lowers_k3(by_split: Mapping[str, Mapping[str, Any]]) -> None:
    """On the same tokens, replay takes away more than half of what flips add to k3.

    How much of k3 flips make differs from model to model and from CPU to CPU: full replays have left 0.22 of it and 0.85 of it.
    Their part is known on the spot: k3 without replay, less k3 per token of those responses on which the trainer chose the
    engine's experts throughout, which is rounding's. A full replay leaves none of it, one that does a tenth of its work nine
    tenths: half lies between. Where rounding is more than half of k3, its own spread hides where halfway is, and all that is
    asked for there is that replay lowers k3; but on one set of prompts at least flips must be the larger part, and half must go.

    Args:
        by_split: What `examples.sequences.judged_replay` says of each set of prompts.
    """
    decisive = [split for split, found in by_split.items() if found["share of rounding"] <= 1 / 2]
    assert decisive, f"rounding makes more than half of k3 on {', '.join(by_split)}: too few flips to judge replay by"
    for split, found in by_split.items():
        left, halfway = found["left"], found["over halfway"]
        assert left["high"] < 1, f"{split}: replay leaves {said(left)} of k3; the interval must end below 1"
        assert split not in decisive or halfway["high"] < 1, (
            f"{split}: replay leaves {said(halfway)} of the level at which half of what flips add is gone; "
            "the interval must end below 1"
        )


def replay_mends_the_tail(left: Interval) -> None:
    """On the same tokens, less than half as many are off by a factor of 2 with replay as without.

    Rounding to 8 significant bits moves few probabilities that far; where most that are so far off were made by flips, most go.
    """
    assert left["high"] < 1 / 2, f"replay leaves {said(left)} of the tokens that are off by a factor of 2"


def float32_routes_alike(flips: float, bf16: float, compared: float) -> None:
    """In float32 engine and trainer differ in at most a hundredth as many routing decisions as in bf16.

    Two experts as near to each other as float32 rounds are told apart by chance, so that none is too much to ask for. float32
    rounds 2^16 times finer than bf16, and flips are about as many as gates lie closer than the rounding: a hundredth leaves room
    for gates that crowd, and is less than a tenth of bf16's, as a fault that routes one token in ten in bf16 would show.

    Args:
        flips: Share of (token, layer) pairs that differ in float32.
        bf16: Share that differs in bf16.
        compared: Tokens compared in float32.
    """
    enough_tokens(compared)
    assert 0 < bf16, "in bf16 no routing decision differs; there is nothing to compare with"
    assert flips <= bf16 / 100, (
        f"{flips:.2e} of float32's routing decisions differ; of bf16's {bf16:.2e}, a hundredth is allowed"
    )


def reward_climbs(rewards: Sequence[float]) -> None:
    """The reward of a run rises over its steps, by more than twice the standard error of the least-squares slope.

    The error is that of the steps about their line. Each step has prompts of its own, so that steps are independent where
    responses of one prompt are not.
    """
    steps = np.arange(len(rewards))
    (slope, offset), spread = np.polyfit(steps, rewards, 1), ((steps - steps.mean()) ** 2).sum()
    residuals = np.asarray(rewards) - (offset + slope * steps)
    error = float(np.sqrt((residuals**2).sum() / (len(rewards) - 2) / spread))
    assert slope > 2 * error, f"the reward's slope is {slope:.4f} +- {error:.4f} a step over {len(rewards)} steps"


def said(found: Interval) -> str:
    """Return an interval for a message."""
    return f"{found['value']:.3g} ({found['low']:.3g} to {found['high']:.3g})"


def runs_of(summary: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of a demo's summary by run and split."""
    return {(row["run"], row["split"]): row for row in summary["rows"]}
