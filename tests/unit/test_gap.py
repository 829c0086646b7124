"""Mismatch measures against hand-derived values, high-precision arithmetic and each other."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext
from pathlib import Path
from statistics import correlation
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.gap import (
    SURE,
    gap_metrics,
    gap_profiles,
    gap_sample,
    gap_sums,
    k3,
    log_odds,
    median_of_means,
    rows_of_means,
)
from mismatch_ext.names import MEASURES
from mismatch_ext.sums import merged

pytestmark = pytest.mark.numeric

getcontext().prec = 60
ROOT = Path(__file__).resolve().parents[2]


def metrics_of(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, **options: bool
) -> dict[str, float]:
    return gap_metrics(gap_sums(old=old_logprobs, rollout=rollout_logprobs, mask=response_mask), **options)


def k3_exact(d: float) -> Decimal:
    """Return exp(d) - 1 - d to 60 digits."""
    x = Decimal(d)
    return x.exp() - 1 - x


@pytest.mark.parametrize("size", [1e-12, 1e-6, 9.9e-3, 1.1e-2, 1.0, 600.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_k3_is_exact_at_every_scale(size: float, sign: int) -> None:
    value = k3(torch.tensor([sign * size], dtype=torch.float64)).item()
    exact = k3_exact(sign * size)
    assert abs(Decimal(value) / exact - 1) < Decimal("1e-11")


@pytest.mark.parametrize("rest", [0.999, 1e-2, SURE])
def test_log_odds_are_exact_up_to_a_sure_token(rest: float) -> None:
    logprob = math.log1p(-rest)
    exact = (Decimal(logprob).exp() / (1 - Decimal(logprob).exp())).ln()
    assert log_odds(torch.tensor([logprob], dtype=torch.float64)).item() == pytest.approx(float(exact), rel=1e-12)


def test_of_tokens_that_both_sides_are_sure_of_no_log_odds_are_compared() -> None:
    logprobs = torch.tensor([[0.0, -1e-7, -1e-3, -1e-3]], dtype=torch.float64)
    other = torch.tensor([[-1e-7, 0.0, 0.0, -2e-3]], dtype=torch.float64)
    got = metrics_of(logprobs, other, torch.ones(1, 4))
    # The third token is sure to one side alone, which counts as surest; the fourth to none.
    surest, less = log_odds(torch.tensor([math.log1p(-SURE), -2e-3], dtype=torch.float64)).tolist()
    assert got["log_odds_abs_diff_mean"] == pytest.approx((surest - less) / 2)
    assert "log_odds_abs_diff_mean" not in metrics_of(logprobs[:, :2], other[:, :2], torch.ones(1, 2))


@pytest.mark.parametrize(("blocks", "outside"), [(5, None), (6, 0), (16, 3)])
def test_the_interval_of_a_median_of_means_is_the_binomials(blocks: int, outside: int | None) -> None:
    means = torch.arange(blocks, dtype=torch.float64)
    counts = torch.full((blocks,), 4.0)
    middle, low, high = median_of_means(means * 4, counts)
    assert middle == (blocks - 1) / 2
    if outside is None:
        assert low is None and high is None
        return
    assert (low, high) == (outside, blocks - 1 - outside)
    # A block without a token is left out.
    assert median_of_means(torch.tensor([0.0, 3.0]), torch.tensor([0.0, 1.0])) == (3.0, None, None)
    # Chance that the median lies outside, by counting how many of the blocks are below it.
    below = [math.comb(blocks, k) / 2**blocks for k in range(outside + 2)]
    assert 2 * sum(below[:-1]) <= 0.05 < 2 * sum(below)


def test_saturation_is_a_share_of_tokens_and_of_sequences_apart() -> None:
    # Row 0: one token, d = 1e4, so both it and its sequence saturate. Row 1: 500 + 500, only the sum does. Row 2: 0.
    old, rollout = torch.zeros(3, 2), torch.tensor([[-1e4, 0.0], [-500.0, -500.0], [0.0, 0.0]])
    scalars = metrics_of(old, rollout, torch.tensor([[1, 0], [1, 1], [1, 0]]))
    assert scalars["k3_saturated_frac"] == pytest.approx(1 / 4)
    assert scalars["seq_k3_saturated_frac"] == pytest.approx(2 / 3)


def test_a_batch_that_saturates_everywhere_still_has_finite_sums() -> None:
    # exp(700) * 18,000 is beyond float64; a batch of 20,000 broken tokens must still be reported.
    sums = gap_sums(old=torch.zeros(4, 5000), rollout=torch.full((4, 5000), -1e4), mask=torch.ones(4, 5000))
    assert all(math.isfinite(value) for value in gap_metrics(sums).values())


@pytest.mark.parametrize("spread", [1e-2, 1e-8])
def test_correlation_survives_probabilities_near_one(spread: float) -> None:
    # A sharp policy: raw sums of squares are about 1 a token, the variance 1e-13 or less.
    generator = torch.Generator().manual_seed(1)
    q = 0.999 - spread * torch.rand(4, 2000, generator=generator, dtype=torch.float64)
    p = q + 0.3 * spread * torch.randn(4, 2000, generator=generator, dtype=torch.float64)
    old, rollout = p.log(), q.log()
    parts = [
        gap_sums(old=old[rows], rollout=rollout[rows], mask=torch.ones(old[rows].shape))
        for rows in (slice(0, 1), slice(1, 4))
    ]
    exact = correlation(old.exp().flatten().tolist(), rollout.exp().flatten().tolist())
    assert 0.6 < exact < 0.8
    assert gap_metrics(merged(*parts))["rollout_probs_pearson"] == pytest.approx(exact, rel=1e-6)


def test_measures_are_right_at_a_millionth_in_float32_inputs() -> None:
    rollout = torch.full((4, 8), -1.0)
    old = rollout + 2.0**-20  # about 1e-6, exact in float32 at this magnitude
    got = metrics_of(old, rollout, torch.ones(4, 8, dtype=torch.bool))
    assert got["logp_abs_diff_mean"] == 2.0**-20
    assert got["k3_kl"] == pytest.approx(float(k3_exact(2.0**-20)), rel=1e-9)
    assert got["log_ppl_abs_diff"] == pytest.approx(2.0**-20, rel=1e-12)
    of_many_rows = {"k3_median_low", "k3_median_high"}
    assert set(got) == set(MEASURES) - of_many_rows


@pytest.mark.parametrize("name", ["old_logprobs", "rollout_logprobs"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_not_finite_in_an_unmasked_place_names_row_and_position(name: str, value: float) -> None:
    tensors = {"old_logprobs": torch.zeros(3, 4), "rollout_logprobs": torch.zeros(3, 4)}
    tensors[name][2, 1] = value
    with pytest.raises(NonFiniteLogprobError) as caught:
        metrics_of(**tensors, response_mask=torch.ones(3, 4))
    assert f"{name}[2, 1] (row, position) is {value}" in str(caught.value)


def test_the_scatter_sample_is_uniform_over_merged_parts() -> None:
    # 100 tokens on one rank and 300 on the other: a quarter of the sample comes from the first on average.
    share = []
    for seed in range(60):
        values = [torch.full((1, count), value) for count, value in ((100, -1.0), (300, -2.0))]
        parts = [
            gap_sums(old=x, rollout=x, mask=torch.ones(x.shape), sample=40, seed=2 * seed + i)
            for i, x in enumerate(values)
        ]
        share.append(gap_sample(merged(*parts))["old_logprobs"].count(-1.0) / 40)
    # Standard error of the mean: sqrt(.25 * .75 / 40 / 60) = 0.009.
    assert sum(share) / 60 == pytest.approx(0.25, abs=0.04)


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_rows_without_padding_are_measured_in_chunks_as_in_one_pass(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(sum(lengths), generator=generator)
    rollout = old + 0.05 * torch.randn(len(old), generator=generator)
    mask = torch.rand(len(old), generator=generator) < 0.7
    whole = gap_sums(old=old, rollout=rollout, mask=mask, lengths=torch.tensor(lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mismatch_ext.gap.TOGETHER", 20)  # a longer row is measured alone
        chunked = gap_sums(old=old, rollout=rollout, mask=mask, lengths=torch.tensor(lengths))
    assert gap_metrics(chunked) == pytest.approx(gap_metrics(whole), rel=1e-12, abs=1e-15)
    assert gap_profiles(chunked)["position"]["count"] == gap_profiles(whole)["position"]["count"]


def test_a_position_is_the_tokens_number_among_the_policys_own() -> None:
    # Four tokens of the policy, five of a tool, and four more: without the tool the last four are positions 4 to 7.
    mask = torch.tensor([[True] * 4 + [False] * 5 + [True] * 4])
    tools = gap_sums(old=torch.full((1, 13), -1.0), rollout=torch.full((1, 13), -1.5), mask=mask)
    plain = gap_sums(old=torch.full((1, 8), -1.0), rollout=torch.full((1, 8), -1.5), mask=torch.ones(1, 8))
    assert gap_profiles(tools)["position"] == gap_profiles(plain)["position"]


def test_profiles_put_tokens_in_their_bins() -> None:
    rollout = torch.log(torch.tensor([[0.05, 0.5, 0.95, 0.2]], dtype=torch.float64))
    old = rollout + torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    profiles = gap_profiles(gap_sums(old=old, rollout=rollout, mask=torch.ones(1, 4)))
    position, probability = profiles["position"], profiles["probability"]
    # Positions 0 | 1 | 2, 3
    assert position["count"][:4] == [1, 1, 2, 0]
    assert position["abs_diff_mean"][2] == pytest.approx(0.35) and position["abs_diff_mean"][3] is None
    assert sum(probability["count"]) == 4 and max(probability["count"]) == 1


def test_malformed_input_is_named() -> None:
    good = torch.zeros(2, 3)
    with pytest.raises(RecordError, match=r"old_logprobs \[2, 4\], rollout_logprobs \[2, 3\]"):
        metrics_of(torch.zeros(2, 4), good, torch.ones(2, 3))
    with pytest.raises(RecordError, match="other than 0 and 1"):
        metrics_of(good, good, torch.full((2, 3), 0.5))
    assert metrics_of(good, good, torch.zeros(2, 3)) == {}
    with pytest.raises(RecordError, match="add up to the 3 places"):
        gap_sums(old=good[0], rollout=good[0], mask=torch.ones(3), lengths=torch.tensor([4, -1]))


def test_generated_pages_are_current() -> None:
    import runpy

    generate = runpy.run_path(str(ROOT / "docs/generate.py"))
    for name in generate["PAGES"]:
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert page == generate["current"](name), f"run python docs/generate.py ({name})"
    for name, draw in generate["PICTURES"].items():
        file = ROOT / "docs" / name
        drawn = file.read_text(encoding="utf-8") if file.is_file() else None
        assert drawn == draw(), f"run python docs/generate.py ({name})"


def of_many_rows(seed: int) -> dict[str, Any]:
    """Return a batch of 400 rows of unequal lengths, whose gaps have heavy tails and differ between rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 60, (400,), generator=generator)
    scale = (0.5 * torch.randn(400, generator=generator, dtype=torch.float64)).exp().repeat_interleave(lengths)
    places = int(lengths.sum())
    # Student's t with five degrees of freedom: a fourth moment is the highest that there is.
    normal, *others = torch.randn(6, places, generator=generator, dtype=torch.float64)
    gap = 0.01 * scale * normal / (torch.stack(others).square().mean(0)).sqrt()
    rollout = -2 * torch.rand(places, generator=generator, dtype=torch.float64)
    mask = torch.rand(places, generator=generator) < 0.9
    return {"old": rollout + gap, "rollout": rollout, "mask": mask, "lengths": lengths}


def test_means_of_a_sample_of_rows_are_within_the_error_that_they_state() -> None:
    covered: dict[str, list[bool]] = {"logp_abs_diff_mean": [], "kl": [], "k3_kl": []}
    squares: list[float] = []
    for seed in range(100):
        batch = of_many_rows(seed)
        whole = gap_metrics(gap_sums(**batch))
        means = rows_of_means(batch["lengths"], seed, tokens=3000)
        sampled = gap_metrics(gap_sums(**batch, means=means))
        assert sampled["mean_tokens"] < whole["tokens"] == sampled["tokens"]
        for name, hits in covered.items():
            error, stated = sampled[name] - whole[name], sampled[f"{name}_error"]
            hits.append(abs(error) <= 2 * stated)
            if name == "logp_abs_diff_mean":
                squares.append((error / stated) ** 2)
    # Two errors cover 95 % of a normal distribution; outliers that a sample lacks make the error of k3 too small.
    shares = {name: sum(hits) / len(hits) for name, hits in covered.items()}
    assert shares["logp_abs_diff_mean"] >= 0.9 and shares["kl"] >= 0.9 and shares["k3_kl"] >= 0.75, shares
    # An error that is stated too large would cover everything.
    mean = sum(squares) / len(squares)
    assert 0.75 < mean < 1.5, mean


def test_tails_and_broken_values_are_found_outside_of_the_sample() -> None:
    batch = of_many_rows(0)
    means = rows_of_means(batch["lengths"], 0, tokens=3000)
    row = int((~means).nonzero()[3])
    place = int(batch["lengths"][:row].sum())
    batch["mask"][place] = True
    whole, before = gap_metrics(gap_sums(**batch)), gap_metrics(gap_sums(**batch, means=means))
    tails = ("tokens", "sequences", "k3_saturated_frac", "seq_k3_saturated_frac", "f_1.1", "f_2", "log_ppl_diff_min")
    tails += ("logp_abs_diff_max", "seq_logp_abs_diff_max", "rollout_probs_diff_max", "log_ppl_diff_max")
    assert [before[name] for name in tails] == [whole[name] for name in tails]
    batch["old"][place] = batch["rollout"][place] + 700.0
    after = gap_metrics(gap_sums(**batch, means=means))
    assert after["logp_abs_diff_max"] == pytest.approx(700.0) and after["seq_logp_abs_diff_max"] > 690
    assert after["k3_saturated_frac"] == 1 / after["tokens"] and after["f_2"] > before["f_2"]
    assert after["logp_abs_diff_mean"] == before["logp_abs_diff_mean"]
    batch["old"][place] = math.nan
    with pytest.raises(NonFiniteLogprobError, match=rf"old_logprobs\[{row}, 0\]"):
        gap_sums(**batch, means=means)


def test_a_sample_of_rows_is_drawn_alike_everywhere_and_has_about_as_many_tokens() -> None:
    lengths = torch.tensor([0, 30, 10, 0, 20] * 40)
    drawn = rows_of_means(lengths, 1, tokens=600)
    assert torch.equal(drawn, rows_of_means(lengths, 1, tokens=600))
    assert not torch.equal(drawn, rows_of_means(lengths, 2, tokens=600))
    assert not drawn[lengths == 0].any() and int(drawn.sum()) == 30


def test_largest_values_are_logged_although_each_drawn_sequence_was_a_bad_row() -> None:
    old = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]])
    mask = torch.tensor([[True, True], [False, False]])
    sums = gap_sums(old=old, rollout=old - 0.5, mask=mask, means=torch.tensor([False, True]))
    metrics = gap_metrics(sums)
    assert metrics["tokens"] == 2 and metrics["logp_abs_diff_max"] == 0.5 and metrics["f_1.1"] == 1
    assert "k3_kl" not in metrics
