"""The coefficient of the KL: the controller on plants whose answer is known, one coefficient a batch, and its saved state."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.kl import KlState, KlTerm, kl_means, kl_step, kl_sums
from mismatch_ext.sums import Sums, merged

LED = KlConfig(coef=0.1, target_kl=0.02)
START = KlState(initial=0.1, coef=0.1)


def led(state: KlState, *measured: float) -> KlState:
    for kl in measured:
        state, coef = kl_step(state, kl, LED)
        assert coef == state.coef
    return state


def test_three_steps_by_hand() -> None:
    # Twice the target: e clipped from 1 to 0.2. First log coef = log 0.1 + 0 + 0.1 * 0.2, then the integral is 0.01.
    # Then 0.9 of the target: e = -0.1, the integral 0.005, log coef = log 0.1 + 0.005 - 0.01. Then nothing at all: e is
    # clipped from -1 to -0.2, the integral -0.005.
    assert led(START, 0.04).coef == pytest.approx(0.1 * math.exp(0.01 + 0.02), rel=1e-12)
    assert led(START, 0.04, 0.018).coef == pytest.approx(0.1 * math.exp(0.005 - 0.01), rel=1e-12)
    assert led(START, 0.04, 0.018, 0.0).coef == pytest.approx(0.1 * math.exp(-0.005 - 0.02), rel=1e-12)


@pytest.mark.parametrize("start", [0.001, 5.0])
@pytest.mark.parametrize("lag", [1.0, 0.1])
def test_it_converges_on_a_plant(start: float, lag: float) -> None:
    # Near the reference an optimized policy has KL ~ 1 / coef^2; the policy follows with a first-order lag. The target
    # 0.02 is met at coef = sqrt(2e-4 / 0.02) = 0.1.
    state, log_kl = KlState(initial=start, coef=start), math.log(2e-4 / start**2)
    for _ in range(3000):
        log_kl += lag * (math.log(2e-4 / state.coef**2) - log_kl)
        state = led(state, math.exp(log_kl))
    assert state.coef == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize(("measured", "bound"), [(10.0, 10.0), (1e-9, 1e-6)])
def test_nothing_winds_up_at_a_bound(measured: float, bound: float) -> None:
    at_bound = led(START, *[measured] * 2000)
    assert at_bound.coef == bound and led(at_bound, *[measured] * 1000).integral == at_bound.integral
    # The first measurement on the other side of the target moves the coefficient off the bound.
    assert 1e-6 < led(at_bound, 0.03 if bound == 1e-6 else 0.01).coef < 10


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_measurement_does_not_lead(bad: float) -> None:
    with pytest.raises(RecordError, match="the measured KL is"):
        led(START, bad)


@pytest.mark.parametrize("initial", [0.0, math.nan, 11.0])
def test_a_start_that_cannot_be_is_refused(initial: float) -> None:
    with pytest.raises(ConfigError, match="mismatch.kl.coef"):
        KlTerm(LED, initial)


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs and ref_logprobs, float32, and a mask, `[4, 6]`."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -1 - torch.rand(4, 6, generator=generator)
    ref = logprobs - 0.3 * torch.randn(4, 6, generator=generator)
    return logprobs, ref, (torch.rand(4, 6, generator=generator) < 0.7).long()


def sums_of(given: tuple[Tensor, Tensor, Tensor]) -> Sums:
    logprobs, ref_logprobs, mask = given
    return kl_sums(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)


def test_a_batch_has_one_coefficient_and_its_kl_counts_from_the_next() -> None:
    term, sums = KlTerm(LED, 0.1), sums_of(batch())
    coefs = []
    for _ in range(3):
        term.begin()
        coefs.append(term.coef)
        assert term.add(sums)["kl_coef"] == term.coef == coefs[-1]
    k1 = kl_means(sums)["kl_ref_k1"]
    assert coefs == [0.1, led(START, k1).coef, led(START, k1, k1).coef] and len(set(coefs)) == 3


def test_parts_of_a_batch_lead_together() -> None:
    old, ref, mask = batch()
    parts = [
        kl_sums(logprobs=old[rows], ref_logprobs=ref[rows], mask=mask[rows])
        for rows in (slice(0, 1), slice(1, 4), slice(4, 4))
    ]
    of_all = kl_sums(logprobs=old, ref_logprobs=ref, mask=mask)
    assert kl_means(merged(*parts)) == pytest.approx(kl_means(of_all), rel=1e-12)
    whole, apart = KlTerm(LED, 0.1), KlTerm(LED, 0.1)
    whole.add(of_all)
    for part in parts:
        apart.add(part)
    assert apart.state_dict()["steps"] == whole.state_dict()["steps"] == 1
    assert apart.state.coef == pytest.approx(whole.state.coef, rel=1e-12)


def test_a_batch_without_tokens_leaves_the_coefficient() -> None:
    term, (old, ref, mask) = KlTerm(LED, 0.1), batch()
    assert term.add(kl_sums(logprobs=old, ref_logprobs=ref, mask=mask * 0)) == {
        "kl_ref_k1": 0.0,
        "kl_ref_k3": 0.0,
        "kl_coef": 0.1,
    }
    term.begin()
    assert term.state.steps == 0


def test_a_trainer_s_own_coefficient_is_followed_unless_a_target_leads_it() -> None:
    constant = KlTerm(KlConfig(), 0.1)
    constant.follow(0.0)
    constant.begin()
    assert constant.coef == 0.0
    KlTerm(LED, 0.1).follow(0.1)
    with pytest.raises(ConfigError, match="from 0.1 to 0.2"):
        KlTerm(LED, 0.1).follow(0.2)


def test_a_resumed_run_goes_on_identically() -> None:
    whole, first = KlTerm(LED, 0.1), KlTerm(LED, 0.1)
    for step in range(20):
        if step == 9:
            resumed = KlTerm(LED, 0.1)
            assert resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False))) is None
            first = resumed
        for term in (whole, first):
            term.begin()
            term.add(sums_of(batch(step)))
    assert first.state_dict() == whole.state_dict() and first.coef == whole.coef != 0.1
    first.begin_anew()
    assert first.coef == 0.1 and first.state.steps == 0


def test_a_changed_first_coefficient_begins_anew_and_is_told() -> None:
    term = KlTerm(LED, 0.1)
    term.add(sums_of(batch()))
    saved = term.state_dict()
    again = KlTerm(LED, 0.3)
    assert "mismatch.kl.coef was 0.1 and is 0.3" in str(again.load_state_dict(saved))
    assert again.state_dict() == KlTerm(LED, 0.3).state_dict()
    constant = KlTerm(KlConfig(), 0.1)
    assert constant.load_state_dict(saved) is None and constant.coef == 0.1
    with pytest.raises(RecordError, match="kl.coef"):
        term.load_state_dict({**saved, "coef": -1.0})
