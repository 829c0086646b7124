"""Length-aware advice, against Monte Carlo."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from mismatch_ext.correction import PRESETS, ResolvedCorrection, advise, correct, parse_rules
from mismatch_ext.errors import ConfigError

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(("sigma", "length", "mean"), [(0.01, 100, 0.0), (0.02, 900, -2e-4), (0.1, 400, 0.001)])
def test_bounds_keep_what_they_say(sigma: float, length: int, mean: float) -> None:
    advice = advise(sigma=sigma, length=length, mean=mean, keep=0.8)
    d = mean + sigma * torch.randn(20_000, length, generator=torch.Generator().manual_seed(0))
    for bounds, values in (
        (advice.sequence_bounds, d.sum(1)),
        (advice.geometric_bounds, d.mean(1)),
        (advice.token_bounds, d.flatten()[:200_000]),
    ):
        low, high = (math.log(x) for x in bounds)
        assert low == pytest.approx(-high)
        assert float(((values >= low) & (values <= high)).double().mean()) == pytest.approx(0.8, abs=0.015)


def test_given_bounds_are_judged() -> None:
    # A sum of 400 of standard deviation 0.05 has standard deviation 1: beyond log 2 = 0.693 lies 1 - Phi(0.693) = 0.244.
    assert advise(sigma=0.05, length=400, settings=PRESETS["decoupled_seq_is"]).outside == pytest.approx(
        0.2441, abs=1e-4
    )
    # Geometric 0.999 to 1.001 at the same gap: the mean has standard deviation 0.0025, Phi(-0.4) on either side.
    outside = advise(sigma=0.05, length=400, settings=PRESETS["geo_mask"]).outside
    assert outside == pytest.approx(2 * 0.3446, abs=1e-3)
    assert advise(sigma=0.05, length=400, settings=ResolvedCorrection()).outside is None


def test_the_level_follows_the_length() -> None:
    levels = [advise(sigma=0.02, length=length).level for length in (100, 2000, 20_000)]
    assert levels == ["sequence", "token", "geometric"]
    text = str(advise(sigma=0.02, length=20_000, settings=PRESETS["seq_tis"]))
    assert "geometric" in text and "20000 tokens" in text and "exceeded by" in text


def test_bounds_of_single_ratios_follow_a_measured_tail() -> None:
    """Of 1,000 tokens 15 are off by 2 nats: a normal one's bound of 99 % would cut hardly any of these, the measured one does."""
    measured = [0.01 * (-1) ** n for n in range(985)] + [2.0] * 15
    normal = advise(sigma=0.245, length=100, keep=0.99).token_bounds
    found = advise(sigma=0.245, length=100, keep=0.98, measured=measured).token_bounds
    assert found == pytest.approx((math.exp(-0.01), math.exp(0.01))) and normal[1] > 1.8
    assert advise(sigma=0.245, length=100, keep=0.99, measured=measured).token_bounds[1] == pytest.approx(math.exp(2))
    with pytest.raises(ConfigError, match="measured"):
        advise(sigma=0.1, length=10, measured=[math.nan])


def test_no_gap_needs_no_bounds() -> None:
    advice = advise(sigma=0.0, length=1000)
    assert advice.level == "sequence" and advice.sequence_bounds == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("keys", [{"sigma": -1.0}, {"length": 0.0}, {"keep": 1.0}, {"mean": math.nan}])
def test_numbers_out_of_range_are_named(keys: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keys))):
        advise(**{"sigma": 0.1, "length": 10.0, **keys})


@pytest.mark.parametrize("compat", [frozenset(), frozenset({"verl_inverse_k1"})])
@pytest.mark.parametrize(
    ("level", "rule", "bounds", "share"),
    # Standard deviations at sigma 0.05 and length 64: 0.4 of the sum, 0.00625 of the mean.
    [("sequence", "seq_sum_k1", "0.8_1.6", "rows"), ("geometric", "seq_mean_k1", "0.99_1.008", "rows"),
     ("token", "token_k1", "0.95_1.08", "tokens")],
)  # fmt: skip
def test_shares_are_those_of_the_correction_itself(
    level: str, rule: str, bounds: str, share: str, compat: frozenset[str]
) -> None:
    # 20,000 sequences through `correct`: what the rule drops, and what a mask with the same bounds sets to 0.
    sigma, length, mean = 0.05, 64, 0.001
    generator = torch.Generator().manual_seed(1)
    old = mean + sigma * torch.randn(20_000, length, generator=generator)
    low, high = (float(x) for x in bounds.split("_"))
    chosen = ResolvedCorrection(
        level=level, bound="mask", lower=low, upper=high, rules=parse_rules(rule, bounds), compat=compat,  # type: ignore[arg-type]
    )  # fmt: skip
    found = correct(torch.zeros_like(old), old, torch.ones_like(old), chosen)
    advice = advise(sigma=sigma, length=length, mean=mean, settings=chosen)
    dropped = ~found.mask if share == "tokens" else ~found.mask.any(1)
    zeroed = found.weights == 0 if share == "tokens" else (found.weights == 0).all(1)
    assert advice.rejected[rule] == pytest.approx(float(dropped.double().mean()), abs=0.012)
    assert advice.outside == pytest.approx(float(zeroed.double().mean()), abs=0.012)
    assert f"rule {rule} drops" in str(advice)


def test_one_sided_bounds_lose_one_side_only() -> None:
    # The sum has standard deviation 1: beyond log 2 on either side lies 0.2441.
    above = advise(sigma=0.05, length=400, settings=ResolvedCorrection(level="sequence", upper=2.0)).outside
    below = advise(
        sigma=0.05, length=400, settings=ResolvedCorrection(level="sequence", bound="mask", lower=0.5)
    ).outside
    both = advise(
        sigma=0.05, length=400, settings=ResolvedCorrection(level="sequence", bound="mask", lower=0.5, upper=2.0)
    )
    assert (above, below, both.outside) == pytest.approx((0.2441, 0.2441, 0.4882), abs=1e-4)


def test_given_bounds_that_lose_too_much_are_not_advised() -> None:
    # The sum has standard deviation 0.2; half of the products lie beyond 1.01, hardly any beyond 2 = exp(3.5 * 0.2).
    wide, tight = (
        advise(sigma=0.01, length=400, settings=ResolvedCorrection(level="sequence", upper=x)) for x in (2.0, 1.01)
    )
    assert (wide.level, tight.level) == ("sequence", "token")
    assert "48.0% of the sequences" in tight.reason
    rule = ResolvedCorrection(rules=parse_rules("seq_sum_k1", "0.99_1.01"))
    assert advise(sigma=0.01, length=400, settings=rule).level == "token"
    assert advise(sigma=0.01, length=400, settings=rule, keep=0.03).level == "sequence"
    loose = dataclasses.replace(PRESETS["decoupled_geo_rs"], rules=parse_rules("seq_mean_k3", 0.01))
    assert advise(sigma=0.01, length=400, settings=loose).rejected == {}
