"""Length-aware advice, against Monte Carlo."""

from __future__ import annotations

import math

import pytest
import torch

from mismatch_ext.correction import PRESETS, Settings, advise
from mismatch_ext.errors import ConfigError


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
    assert advise(sigma=0.05, length=400, settings=Settings()).outside is None


def test_the_level_follows_the_length() -> None:
    levels = [advise(sigma=0.02, length=length).level for length in (100, 2000, 20_000)]
    assert levels == ["sequence", "token", "geometric"]
    text = str(advise(sigma=0.02, length=20_000, settings=PRESETS["seq_tis"]))
    assert "geometric" in text and "20000 tokens" in text and "exceeded by" in text


def test_no_gap_needs_no_bounds() -> None:
    advice = advise(sigma=0.0, length=1000)
    assert advice.level == "sequence" and advice.sequence_bounds == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("keys", [{"sigma": -1.0}, {"length": 0.0}, {"keep": 1.0}, {"mean": math.nan}])
def test_numbers_out_of_range_are_named(keys: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(keys))):
        advise(**{"sigma": 0.1, "length": 10.0, **keys})
