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
# float32 rounds to 24 significant bits, 2^16 times finer than bfloat16. Accumulating a few thousand terms in float32, which bf16
# kernels do as well, costs both sides up to six bits.
FLOAT32 = 2.0**10
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
    """bf16's gap over float32's is at least what is left of the bits between them, and k3's at least the square of that."""
    assert mean["low"] >= FLOAT32, f"mean |Δlogp|, bf16 over float32: {said(mean)}; needed is {FLOAT32:g}"
    assert k3["low"] >= FLOAT32**2, f"k3, bf16 over float32: {said(k3)}; needed is {FLOAT32**2:g}"


def replay_lowers_k3(by_split: Mapping[str, Interval]) -> None:
    """On the same tokens, replay lowers k3 on every set of prompts.

    How much of k3 flips make differs from model to model and from CPU to CPU: full replays have left 0.22 of it and 0.85 of it.
    """
    for split, left in by_split.items():
        assert left["high"] < 1, f"{split}: replay leaves {said(left)} of k3; the interval must end below 1"


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
