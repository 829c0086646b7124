"""Times our metrics, all in one pass, against the same formulas computed one by one over the padded batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import paired
from mismatch_ext.gap import PROFILES, gap_metrics, gap_profiles, gap_sums, k3


def one_by_one(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """Compute the field's measures as trainers do, a masked reduction each, in float64.

    The formulas are those that verl documents for `rollout_corr/*`; TRL and others compute a few of them.
    """
    old, rollout, m = old.double(), rollout.double(), mask.double()
    d = (old - rollout) * m

    def mean(x: Tensor) -> float:
        return float((x * m).sum() / m.sum())

    length = m.sum(1)
    l_pi, l_mu = (old * m).sum(1) / length, (rollout * m).sum(1) / length
    total = d.sum(1)
    r, s = d.exp(), total.exp()
    p, q = old.exp(), rollout.exp()
    return {
        "logp_abs_diff_mean": mean(d.abs()),
        "logp_abs_diff_max": float(d.abs().max()),
        "kl": mean(-d),
        "k3_kl": mean(torch.expm1(d) - d),
        "seq_kl": float(-total.mean()),
        "seq_k3_kl": float((torch.expm1(total) - total).mean()),
        "f_1.1": mean((d.abs() > torch.tensor(1.1).double().log()).double()),
        "f_2": mean((d.abs() > torch.tensor(2.0).double().log()).double()),
        "ess_token": float((r * m).sum() ** 2 / (m.sum() * (r * r * m).sum())),
        "ess_seq": float(s.sum() ** 2 / (len(s) * (s * s).sum())),
        "chi2_token": mean((2 * d.clamp(-20, 20)).exp()) - 1,
        "chi2_seq": float((2 * total.clamp(-20, 20)).exp().mean() - 1),
        "training_ppl": float((-l_pi).exp().mean()),
        "rollout_ppl": float((-l_mu).exp().mean()),
        "log_ppl_abs_diff": float((l_mu - l_pi).abs().mean()),
        "ppl_ratio": float((l_mu - l_pi).exp().mean()),
        "rollout_probs_diff_mean": mean((p - q).abs()),
        "rollout_probs_diff_max": float(((p - q).abs() * m).max()),
    }


def profile(x: Tensor, edges: tuple[float, ...], d: Tensor, mask: Tensor) -> list[list[float]]:
    """Return count, sum and maximum of |d| and sum of k3 per bin of x, a bin at a time over the padded batch."""
    rows = []
    for low, high in zip(edges, edges[1:], strict=False):
        inside = mask & (x >= low) & (x < high)
        if inside.any():
            chosen = d[inside]
            size, estimate = chosen.abs(), chosen.expm1() - chosen
            rows.append([len(chosen), float(size.sum()), float(size.max()), float(estimate.sum())])
    return rows


def trl_k3(d: Tensor) -> Tensor:
    """Return k3 as TRL 1.16 and others write it, in the input's dtype."""
    return torch.exp(d) - d - 1


def run() -> list[dict[str, Any]]:
    """Return the rows of this benchmark."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(64, 2048, generator=generator)
    old = rollout + 1e-3 * torch.randn(rollout.shape, generator=generator)
    mask = torch.arange(2048) < torch.randint(256, 2049, (64, 1), generator=generator)

    def ours() -> dict[str, float]:
        return gap_metrics(gap_sums(old, rollout, mask))

    positions = torch.arange(2048).expand(64, -1)

    def theirs() -> tuple[dict[str, float], list[list[float]], list[list[float]]]:
        d = old.double() - rollout.double()
        by_position = profile(positions, PROFILES["position"], d, mask)
        by_probability = profile(rollout.double().exp(), PROFILES["probability"], d, mask)
        return one_by_one(old, rollout, mask), by_position, by_probability

    (reference, by_position, by_probability), got = theirs(), ours()
    profiles = gap_profiles(gap_sums(old, rollout, mask))
    for rows, ours_profile in ((by_position, "position"), (by_probability, "probability")):
        filled = [n for n in profiles[ours_profile]["count"] if n]
        assert filled == [row[0] for row in rows]
    worst = max(abs(got[name] - value) / max(abs(value), 1e-12) for name, value in reference.items())
    assert worst < 1e-6, worst
    results = [
        paired(
            "31 metrics and 2 profiles of [64, 2048] in one pass vs 18 metrics and 2 profiles, a masked reduction each",
            ours,
            theirs,
            equal=f"the 18 metrics that both compute, to {worst:.0e} relative, and the counts of every bin",
        )
    ]
    d = (old - rollout).double()
    everywhere = torch.ones_like(mask)

    def ours_unmasked() -> dict[str, float]:
        return gap_metrics(gap_sums(old, rollout, everywhere))

    plain, full = one_by_one(old, rollout, everywhere), ours_unmasked()
    assert all(abs(full[name] - value) <= 1e-6 * max(abs(value), 1e-12) for name, value in plain.items())
    results.append(
        paired(
            "all metrics and 2 profiles of [64, 2048] without padding vs 18 metrics, a reduction each, and no profiles",
            ours_unmasked,
            lambda: one_by_one(old, rollout, everywhere),
            equal="the 18 metrics that both compute, to 1e-6 relative",
        )
    )
    float32 = trl_k3(d.float()).double()
    error = float((float32 - k3(d)).abs().sum() / k3(d).sum())
    wide = trl_k3(d)
    assert torch.allclose(wide, k3(d), rtol=1e-6, atol=1e-15)
    results.append(
        paired(
            "k3 in float64 with series vs exp(d)-d-1 in float32 (TRL 1.16)",
            lambda: k3(d),
            lambda: trl_k3(d.float()),
            equal=f"nothing: at |d| about 1e-3 the float32 form is off by {error:.1%} of the sum; in float64 both agree to 1e-6",
        )
    )
    return results
