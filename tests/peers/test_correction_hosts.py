"""Presets against the hosts' own functions: verl 0.9.1's, imported and called, and TRL 1.16's where it has one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_ext.correction import Correction, correct
from mismatch_ext.gap import gap_metrics, gap_sums
from mismatch_ext.presets import DPPO, PRESETS, Interval, ResolvedCorrection, parse_rules

VERL = (
    "decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "decoupled_seq_is_rs", "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis", "decoupled_geo_rs_token_tis", "decoupled_k3_rs", "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis", "bypass_ppo_clip", "bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs", "bypass_pg_is",
    "bypass_pg_token_icepop", "bypass_pg_geo_rs", "bypass_pg_geo_rs_seq_tis", "bypass_pg_geo_rs_token_tis", "disabled",
)  # fmt: skip
# verl compares 1/rho with k1 bounds, and counts rows without tokens as sequences.
QUIRKS = frozenset({"verl_inverse_k1", "verl_empty_rows"})
GAP_FIGURES = {
    "kl", "k3_kl", "chi2_token", "chi2_seq", "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl",
    "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio",
}  # fmt: skip


@pytest.fixture(scope="module")
def verl() -> Any:
    """Return verl's helper module and its configuration class."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo import rollout_corr_helper

    return rollout_corr_helper, RolloutCorrectionConfig


def batch(seed: int, *, empty: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rollout and old log-probabilities in float64, and a mask with holes; gaps from 1e-4 to 8 nats."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = 12, 40
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask &= torch.rand(rows, length, generator=generator) < 0.9
    mask[:, 0] = True
    if empty:
        mask[seed % rows] = False
    old = -3 * torch.rand(rows, length, generator=generator, dtype=torch.float64)
    scale = 10.0 ** (-4 + 3 * torch.rand(rows, 1, generator=generator, dtype=torch.float64))
    gap = scale * torch.randn(rows, length, generator=generator, dtype=torch.float64)
    gap[torch.rand(rows, length, generator=generator) < 0.01] *= 80
    return old - gap, old, mask


def spiked(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `batch` with differences up to 1e4 on either side at a few tokens."""
    rollout, old, mask = batch(seed, empty=seed % 2 == 0)
    generator = torch.Generator().manual_seed(1000 + seed)
    for tensor in (rollout, old):
        tensor[torch.rand(tensor.shape, generator=generator) < 0.03] = -(10.0 ** (1.5 + 2.5 * (seed % 5) / 4))
    return rollout, old, mask


def compare(
    verl: Any,
    config: Any,
    settings: ResolvedCorrection,
    rollout: Tensor,
    old: Tensor,
    mask: Tensor,
    *,
    rel: float = 1e-5,
) -> None:
    """Check weights, mask, and all metrics that both compute; where verl's exponentials overflow, ours are finite."""
    proto, kept, metrics = verl.compute_rollout_correction_and_rejection_mask(
        old, rollout, mask.long(), config.rollout_is, config.rollout_is_threshold, config.rollout_is_batch_normalize,
        config.rollout_rs, config.rollout_rs_threshold,
    )  # fmt: skip
    ours = correct(old_logprobs=old, rollout_logprobs=rollout, response_mask=mask, config=settings)
    assert torch.equal(ours.mask, kept.bool())
    if proto is not None:
        theirs = proto.batch["rollout_is_weights"].double()
        assert torch.allclose(ours.weights.double(), theirs, rtol=1e-6, atol=rel * 1e-4)
    for name, (mine, value) in shared(ours, rollout, old, mask, metrics).items():
        assert math.isfinite(mine), name
        if abs(value) < 1e250:  # ours saturate at e^600, about 1e260
            # verl divides by the number of tokens plus 1e-8, and takes differences of means.
            assert mine == pytest.approx(value, rel=rel, abs=1e-7), name


def shared(
    ours: Correction, rollout: Tensor, old: Tensor, mask: Tensor, metrics: dict[str, float]
) -> dict[str, tuple[float, float]]:
    """Return what both sides say of the metrics that both compute, of weights, rejection and the gap."""
    found = dict(ours.metrics)
    if bool(mask.any(1).all()):  # in figures of the gap, rows without tokens count for verl alone
        found |= gap_metrics(gap_sums(old=old, rollout=rollout, mask=mask))
        assert len(found.keys() & GAP_FIGURES) == len(GAP_FIGURES)
    theirs = {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}
    return {name: (found[name], theirs[name]) for name in found.keys() & theirs.keys()}


def test_every_preset_of_verl_is_here(verl: Any) -> None:
    factories = {
        name for name, value in vars(verl[1]).items() if isinstance(value, classmethod) and not name.startswith("_")
    }
    assert {name for name in factories if name in PRESETS or name.startswith(("decoupled", "bypass"))} == set(VERL)


@pytest.mark.parametrize("name", VERL)
def test_preset_equals_verls_own_function(verl: Any, name: str) -> None:
    helper, configs = verl
    config = getattr(configs, name)()
    settings = dataclasses.replace(PRESETS[name], compat=QUIRKS)
    assert (settings.mode == "bypass") == config.bypass_mode and settings.loss == config.loss_type
    for seed in range(20):
        compare(helper, config, settings, *batch(seed, empty=seed % 4 == 0))
        compare(helper, config, settings, *spiked(seed), rel=1e-4)


def rules_of(names: str, thresholds: Any) -> dict[str, Interval]:
    """Return rules that verl writes as two lists."""
    pairs = zip(names.split(","), str(thresholds).split(","), strict=True)
    bounds = {name: tuple(map(float, text.split("_"))) for name, text in pairs}
    return parse_rules({name: both if len(both) == 2 else both[0] for name, both in bounds.items()})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("rules", "thresholds"),
    [
        ("token_k1", "0.6_1.6"), ("token_k2,token_k3", "0.01,0.02"), ("seq_sum_k1", "0.5_5.0"), ("seq_sum_k2", 0.5),
        ("seq_sum_k3,seq_mean_k2", "0.5,0.01"), ("seq_max_k2,seq_max_k3,token_k1", "0.3,0.4,0.9_1.2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("normalize", [False, True])
def test_every_rejection_rule_equals_verls(verl: Any, rules: str, thresholds: Any, normalize: bool) -> None:
    helper, configs = verl
    for level in ("token", "sequence"):
        config = configs(
            rollout_is=level, rollout_is_threshold=1.5, rollout_rs=rules, rollout_rs_threshold=thresholds,
            rollout_is_batch_normalize=normalize,
        )  # fmt: skip
        settings = ResolvedCorrection(
            level=level, upper=1.5, normalize=normalize, rules=rules_of(rules, thresholds), compat=QUIRKS
        )  # fmt: skip
        for seed in range(20):
            compare(helper, config, settings, *batch(seed))


@pytest.mark.parametrize("rule", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_k1_rules_keep_ratios_within_their_bounds(verl: Any, rule: str) -> None:
    """By default a k1 rule keeps lower <= rho <= upper; verl keeps 1/upper <= rho <= 1/lower, on the same batches otherwise."""
    settings = ResolvedCorrection(rules=parse_rules({rule: (0.6, 1.6)}))
    quirk = dataclasses.replace(settings, compat=QUIRKS)
    differ = 0
    for seed in range(20):
        rollout, old, mask = batch(seed)
        rollout = old - 6 * (old - rollout)  # wide enough to cross the bounds
        d = torch.where(mask, old - rollout, 0.0)
        statistic = {
            "token_k1": d,
            "seq_sum_k1": d.sum(1, keepdim=True),
            "seq_mean_k1": d.sum(1, keepdim=True) / mask.sum(1)[:, None],
        }
        rho = statistic[rule].clamp(-20, 20).exp()
        right = correct(old_logprobs=old, rollout_logprobs=rollout, response_mask=mask, config=settings).mask
        assert torch.equal(right, mask & (rho >= 0.6) & (rho <= 1.6))
        kept, _ = verl[0].compute_rollout_rejection_mask(old - rollout, mask.long(), rule, "0.6_1.6")
        assert torch.equal(
            correct(old_logprobs=old, rollout_logprobs=rollout, response_mask=mask, config=quirk).mask, kept.bool()
        )
        differ += int(not torch.equal(right, kept.bool()))
    assert differ > 0


@pytest.mark.parametrize("name", DPPO)
@pytest.mark.parametrize("seed", range(3))
def test_dppo_is_verls_own_loss(name: str, seed: int) -> None:
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos

    _, _, mask = batch(seed)
    draws = torch.Generator().manual_seed(seed)
    policy = torch.rand(mask.shape, generator=draws, dtype=torch.float64) * 0.9 + 0.05
    moved = torch.rand(mask.shape, generator=draws, dtype=torch.float64) * 0.9 + 0.05
    engine, policy = (policy + 0.3 * (moved - policy)).log(), policy.log()
    advantages = torch.randn(len(mask), 1, generator=draws, dtype=torch.float64).expand(mask.shape)
    bounds, upper = (0.03, 0.08), 4.0
    config = OmegaConf.create(
        {"clip_ratio": 0.2, "clip_ratio_low": bounds[0], "clip_ratio_high": bounds[1], "clip_ratio_c": upper,
         "global_batch_info": {}}
    )  # fmt: skip
    leaf = policy.clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=engine, log_prob=leaf, advantages=advantages, response_mask=mask.double(), loss_agg_mode="token-mean",
        config=config,
    )  # fmt: skip
    loss.backward()
    found = correct(
        old_logprobs=policy, rollout_logprobs=engine, response_mask=mask, advantages=advantages,
        config={"preset": name, "divergence": bounds, "upper": upper},
    )  # fmt: skip
    expected = -(found.as_multiplier() * advantages) / mask.sum()
    assert leaf.grad is not None
    # verl adds 1e-8 to its number of tokens.
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-6, atol=1e-12)
    assert 0 < float((found.as_multiplier()[mask] == 0).double().mean()) < 0.9
