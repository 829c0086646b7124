"""Importance corrections: literals by hand, both implementations against each other, oracles, errors, properties."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mismatch_ext.config import CorrectionConfig
from mismatch_ext.correction import correct
from mismatch_ext.errors import ConfigError, NonFiniteLogprobError, RecordError
from mismatch_ext.presets import PRESETS, RULES, ResolvedCorrection, parse_rules, resolve
from tests.oracles.brute.correction import weights_and_mask

pytestmark = pytest.mark.numeric

# Two rows of ratios rho = pi_old/mu; the third token of the second row is padding.
RATIOS = torch.tensor([[2.0, 0.5, 4.0], [1.0, 0.25, 7.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def corrected(**keys: Any) -> Any:
    """Correct the ratios above."""
    return correct(
        old_logprobs=RATIOS.log() - 1,
        rollout_logprobs=torch.full_like(RATIOS, -1.0),
        response_mask=MASK,
        config=ResolvedCorrection(**keys),
    )


@pytest.mark.parametrize(
    ("keys", "weights"),
    [
        ({"level": "token", "upper": 3.0}, [[2, 0.5, 3], [1, 0.25, 0]]),
        ({"level": "token", "bound": "clip", "lower": 0.5, "upper": 3.0}, [[2, 0.5, 3], [1, 0.5, 0]]),
        ({"level": "token", "bound": "mask", "upper": 3.0}, [[2, 0.5, 0], [1, 0.25, 0]]),
        ({"level": "token", "bound": "icepop", "lower": 0.5, "upper": 3.0}, [[2, 0.5, 0], [1, 0, 0]]),
        # Products: 2 * 0.5 * 4 = 4 and 1 * 0.25 = 0.25.
        ({"level": "sequence", "upper": 3.0}, [[3, 3, 3], [0.25, 0.25, 0]]),
        ({"level": "sequence", "bound": "mask", "upper": 3.0}, [[0, 0, 0], [0.25, 0.25, 0]]),
        # Geometric means: 4^(1/3) and 0.25^(1/2) = 0.5.
        ({"level": "geometric", "upper": 9.0}, [[4 ** (1 / 3)] * 3, [0.5, 0.5, 0]]),
        ({"level": "none"}, [[1, 1, 1], [1, 1, 0]]),
        # Truncated at 3 the five tokens sum to 6.75, mean 1.35.
        ({"level": "token", "upper": 3.0, "normalize": True}, [[2 / 1.35, 0.5 / 1.35, 3 / 1.35], [1 / 1.35, 0.25 / 1.35, 0]]),
        # Sequences weigh 3 and 0.25, mean 1.625.
        ({"level": "sequence", "upper": 3.0, "normalize": True}, [[3 / 1.625] * 3, [0.25 / 1.625] * 2 + [0]]),
    ],
)  # fmt: skip
def test_weights_by_hand(keys: dict[str, Any], weights: list[list[float]]) -> None:
    found = corrected(**keys)
    assert torch.allclose(found.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-9)
    assert torch.equal(found.mask, MASK.bool()) and not found.weights.requires_grad


@pytest.mark.parametrize(
    ("reject", "kept"),
    [
        ({"token_k1": (0.4, 3.0)}, [[1, 1, 0], [1, 0, 0]]),
        ({"token_k1": 3.0}, [[1, 1, 0], [1, 0, 0]]),  # one number x is 1/x to x
        # k2 = log(rho)^2 / 2: 0.24, 0.24, 0.96 | 0, 0.96
        ({"token_k2": 0.5}, [[1, 1, 0], [1, 0, 0]]),
        # k3 = rho - 1 - log rho: 0.307, 0.193, 1.614 | 0, 0.636
        ({"token_k3": 0.7}, [[1, 1, 0], [1, 1, 0]]),
        ({"seq_sum_k1": (0.3, 9)}, [[1, 1, 1], [0, 0, 0]]),  # products 4 and 0.25
        ({"seq_mean_k1": (0.6, 2)}, [[1, 1, 1], [0, 0, 0]]),  # geometric means 1.587 and 0.5
        ({"seq_sum_k2": 1.0}, [[0, 0, 0], [1, 1, 0]]),  # 1.441 and 0.961
        ({"seq_mean_k2": 0.4805}, [[1, 1, 1], [1, 1, 0]]),  # 0.4804 and 0.4805
        ({"seq_max_k3": 1.0}, [[0, 0, 0], [1, 1, 0]]),
        ({"seq_max_k2": 0.97, "token_k1": (0.4, 9)}, [[1, 1, 1], [1, 0, 0]]),  # both must hold
    ],
)
def test_rejection_by_hand(reject: dict[str, Any], kept: list[list[int]]) -> None:
    found = corrected(rules=parse_rules(reject))
    assert found.mask.int().tolist() == kept
    left = sum(map(sum, kept))
    assert found.metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - left / 5)
    assert found.as_multiplier().tolist() == [[float(x) for x in row] for row in kept]


def test_veto_and_off_policy_mask_by_hand() -> None:
    vetoed = corrected(veto=0.3)
    assert vetoed.mask.tolist() == [[True] * 3, [False] * 3] and vetoed.metrics["rollout_is_veto_fraction"] == 0.5
    # mean log(mu/pi): -log(4)/3 = -0.46 and log(4)/2 = 0.69: the second drifted beyond 0.5, and is dropped if A < 0.
    for advantages, kept in (([-1.0, -1.0], [3, 0]), ([-1.0, 1.0], [3, 2])):
        found = correct(
            old_logprobs=RATIOS.log() - 1,
            rollout_logprobs=torch.full_like(RATIOS, -1.0),
            response_mask=MASK,
            config=ResolvedCorrection(off_policy_threshold=0.5),
            advantages=torch.tensor(advantages),
        )
        assert found.mask.sum(1).tolist() == kept


def test_metrics_by_hand() -> None:
    found = corrected(level="token", upper=3.0).metrics
    assert found["rollout_is_mean"] == pytest.approx(6.75 / 5)
    assert found["rollout_is_max"] == pytest.approx(3) and found["rollout_is_min"] == pytest.approx(0.25)
    squares = 4 + 0.25 + 9 + 1 + 0.0625
    assert found["rollout_is_eff_sample_size"] == pytest.approx(6.75**2 / 5 / squares)
    assert found["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 5)
    assert found["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 5)  # below 1/3


def draw(seed: int, rows: int = 9, length: int = 70, scale: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(length) < torch.randint(0, length + 1, (rows, 1), generator=generator)
    if seed % 2:
        mask &= torch.rand(rows, length, generator=generator) < 0.8
    mask[0, 0] = True
    old = -3 * torch.rand(rows, length, generator=generator)
    return old - scale * torch.randn(rows, length, generator=generator), old, mask


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"preset": "decoupled_tokn_is"}, ["unknown preset", "Did you mean 'decoupled_token_is'?"]),
        ({}, ["mismatch.correction is empty"]),
        ({"level": "token"}, ["without bounds", "upper"]),
        ({"level": "token", "bound": "icepop", "upper": 2.0}, ["icepop", "lower and upper"]),
        ({"level": "token", "bound": "truncate", "lower": 0.5, "upper": 2.0}, ["truncate", "'clip' or 'mask'"]),
        ({"level": "token", "upper": 0.5, "bound": "clip", "lower": 2.0}, ["lower=2.0 exceeds upper=0.5"]),
        ({"level": "token", "upper": -1.0}, ["mismatch.correction.upper", "-1.0"]),
        ({"reject": {"seq_men_k1": [0.5, 2]}}, ["unknown rule 'seq_men_k1'", "'seq_mean_k1'?"]),
        ({"reject": "token_k1"}, ["mismatch.correction.reject", "allowed: a mapping", "'token_k1'"]),
        ({"reject": {"token_k1": [2, 0.5]}}, ["mismatch.correction.reject.token_k1", "[2, 0.5]", "[lower, upper]"]),
        ({"reject": {"token_k2": [0.1, 0.2]}}, ["mismatch.correction.reject.token_k2", "[0.1, 0.2]", "a number > 0"]),
        ({"reject": {"token_k1": 0}}, ["mismatch.correction.reject.token_k1", "0", "a number > 0"]),
        ({"preset": "tis", "loss": "reinforce"}, ["needs mode='bypass'"]),
    ],
)
def test_malformed_sections_are_refused(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(CorrectionConfig(**section))
    assert all(word in str(error.value) for word in words), error.value


def test_keys_go_over_the_preset() -> None:
    found = resolve(CorrectionConfig(preset="decoupled_geo_rs_token_tis", upper=3.0, veto=1e-4))
    assert found == dataclasses.replace(PRESETS["decoupled_geo_rs_token_tis"], upper=3.0, veto=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["rollout_logprobs", "old_logprobs"])
def test_what_is_not_finite_is_named(value: float, which: str) -> None:
    tensors = dict(zip(("rollout_logprobs", "old_logprobs"), draw(2)[:2], strict=True))
    mask = torch.ones(9, 70)
    tensors[which][3, 5] = value
    with pytest.raises(NonFiniteLogprobError, match=rf"{which}\[3, 5\] \(row, position\) is"):
        correct(**tensors, response_mask=mask, config=PRESETS["tis"])


def test_tensors_by_position_are_refused_as_their_order_would_invert_the_weights() -> None:
    rollout, old, mask = draw(0)
    with pytest.raises(TypeError, match="positional"):
        correct(rollout, old, mask, PRESETS["tis"])  # type: ignore[misc]


def test_other_malformed_inputs_are_refused() -> None:
    rollout, old, mask = draw(0)
    with pytest.raises(RecordError, match="one shape"):
        correct(old_logprobs=old[:, :-1], rollout_logprobs=rollout, response_mask=mask, config=PRESETS["tis"])
    with pytest.raises(RecordError, match="advantages"):
        correct(old_logprobs=old, rollout_logprobs=rollout, response_mask=mask, config=PRESETS["opsm"])


EVERY_RULE = parse_rules({name: (0.6, 1.6) if name.endswith("k1") else 0.2 for name in RULES})
MORE_KINDS = {
    # Trust regions need probabilities, which these draws exceed (test_dppo.py).
    **{name: preset for name, preset in PRESETS.items() if preset.divergence is None},
    "every rule": ResolvedCorrection(rules=EVERY_RULE),
    "every rule of verl": ResolvedCorrection(
        level="token", upper=2.0, rules=EVERY_RULE,
        compat=frozenset({"verl_inverse_k1", "verl_empty_rows"}),
    ),
    "token clip": ResolvedCorrection(level="token", bound="clip", lower=0.9, upper=1.1),
    "token mask from below": ResolvedCorrection(level="token", bound="mask", lower=0.7),
    "beyond e^20": ResolvedCorrection(level="token", bound="mask", upper=1e12),
}  # fmt: skip


@pytest.mark.parametrize("kind", MORE_KINDS)
@pytest.mark.parametrize("scale", [1e-4, 0.3, 15.0, 3000.0])
def test_weights_and_masks_are_those_by_hand(kind: str, scale: float) -> None:
    chosen = MORE_KINDS[kind]
    for seed in range(6):
        rollout, old, mask = (x.double() if x.is_floating_point() else x for x in draw(seed, scale=scale))
        found = correct(
            old_logprobs=old,
            rollout_logprobs=rollout,
            response_mask=mask,
            config=chosen,
            advantages=torch.ones(len(mask)),
        )
        weights, kept = weights_and_mask(rollout, old, mask, chosen, torch.ones(len(mask)), None)
        assert torch.equal(found.mask, kept)
        torch.testing.assert_close(found.weights, weights, rtol=1e-11, atol=1e-11)


def test_a_ratio_at_its_bound_is_kept() -> None:
    # Powers of 2 whose logarithms are symmetric in floating point: rho = 2 and 0.5 stand exactly at their bounds.
    rollout, old = torch.zeros(1, 2, dtype=torch.float64), torch.tensor([[2.0, 0.5]], dtype=torch.float64).log()
    ones = torch.ones(1, 2)
    assert correct(
        old_logprobs=old,
        rollout_logprobs=rollout,
        response_mask=ones,
        config=ResolvedCorrection(rules=parse_rules({"token_k1": (0.5, 2.0)})),
    ).mask.all()
    # The sum of the logarithms is 0: a product of 1 at bounds of 1.
    assert correct(
        old_logprobs=old,
        rollout_logprobs=rollout,
        response_mask=ones,
        config=ResolvedCorrection(rules=parse_rules({"seq_sum_k1": (1, 1)})),
    ).mask.all()
    # k2 of both is log(2)^2 / 2, which is 0.2402265069591007 in float64.
    at, below = (
        ResolvedCorrection(rules=parse_rules({"seq_max_k2": x})) for x in (0.2402265069591008, 0.2402265069591)
    )
    assert (
        correct(old_logprobs=old, rollout_logprobs=rollout, response_mask=ones, config=at).mask.all()
        and not correct(old_logprobs=old, rollout_logprobs=rollout, response_mask=ones, config=below).mask.any()
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_detached_from_policies_that_require_gradients(preset: str) -> None:
    rollout, old, mask = draw(1)
    leaf, current = old.clone().requires_grad_(), (old - 0.1).requires_grad_()
    found = correct(
        old_logprobs=leaf,
        rollout_logprobs=rollout,
        response_mask=mask,
        config=PRESETS[preset],
        logprobs=current,
        advantages=-torch.ones(len(mask)),
    )
    plain = correct(
        old_logprobs=old,
        rollout_logprobs=rollout,
        response_mask=mask,
        config=PRESETS[preset],
        logprobs=current.detach(),
        advantages=-torch.ones(len(mask)),
    )
    assert not found.weights.requires_grad and not found.as_multiplier().requires_grad
    assert torch.equal(found.weights, plain.weights) and torch.equal(found.mask, plain.mask)
    assert found.metrics == plain.metrics


@pytest.mark.parametrize(
    "preset", ["decoupled_geo_rs_token_tis", "decoupled_seq_is_rs", "slime_mis", "geo_mask", "cis"]
)
@pytest.mark.parametrize("scale", [1e-9, 1e-4, 0.2])
def test_all_weight_metrics_agree_with_a_float64_oracle(preset: str, scale: float) -> None:
    chosen = PRESETS[preset]
    rollout, old, mask = (x.double() if x.is_floating_point() else x for x in draw(7, rows=24, length=300, scale=scale))
    result = correct(old_logprobs=old, rollout_logprobs=rollout, response_mask=mask, config=chosen)
    found = result.metrics
    sequences = [(old[i][mask[i]], rollout[i][mask[i]]) for i in range(len(mask)) if mask[i].any()]
    differences = [o - r for o, r in sequences]
    raw = {
        "token": [d.exp() for d in differences],
        "sequence": [d.sum().clamp(-20, 20).exp().expand(len(d)) for d in differences],
        "geometric": [d.mean().exp().expand(len(d)) for d in differences],
    }[chosen.level]
    low, high = chosen.lower or 0.0, chosen.upper or math.inf
    weights = [
        w.clamp(min=low, max=high) if chosen.bound in ("truncate", "clip") else w * ((w >= low) & (w <= high)) for w in raw
    ]  # fmt: skip
    if chosen.confidence is not None:
        slope, floor = chosen.confidence
        weights = [
            w.minimum(1 + slope * (1 - o.exp()).clamp(min=floor)) for w, (o, _) in zip(raw, sequences, strict=True)
        ]
    w = torch.cat(weights)
    factor = found.get("rollout_is_batch_norm_factor", 1.0)  # the weights are as wide as the inputs
    torch.testing.assert_close(
        torch.cat([r[m] for r, m in zip(result.weights * factor, mask, strict=True)]), w, rtol=1e-12, atol=0
    )
    assert found["rollout_is_mean"] == pytest.approx(float(w.mean()), rel=1e-6)
    assert found["rollout_is_std"] == pytest.approx(float(w.std(correction=0)), rel=1e-9)
    # Kish: the square of the sum over the sum of squares, per token. All weights may be 0.
    size = float(w.sum() ** 2 / w.square().sum() / len(w)) if w.any() else 0.0
    assert found["rollout_is_eff_sample_size"] == pytest.approx(size, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(sorted(PRESETS)), st.integers(0, 1_000))
def test_where_the_padding_stands_changes_nothing(seed: int, preset: str, shuffle: int) -> None:
    # Tokens keep their order within a row; padding columns full of NaN are put anywhere between them.
    rollout, old, mask = (x.double() if x.is_floating_point() else x for x in draw(seed, length=20))
    advantages = torch.randn(len(mask), generator=torch.Generator().manual_seed(seed))
    plain = correct(
        old_logprobs=old, rollout_logprobs=rollout, response_mask=mask, config=PRESETS[preset], advantages=advantages
    )
    place = torch.randperm(33, generator=torch.Generator().manual_seed(shuffle))[:20].sort().values

    def spread(tensor: Tensor, fill: float) -> Tensor:
        wide = torch.full((len(tensor), 33), fill, dtype=tensor.dtype)
        wide[:, place] = tensor
        return wide

    other = correct(
        old_logprobs=spread(old, math.nan),
        rollout_logprobs=spread(rollout, math.nan),
        response_mask=spread(mask, 0),
        config=PRESETS[preset],
        advantages=advantages,
    )
    assert torch.equal(other.mask[:, place], plain.mask) and other.mask.sum() == plain.mask.sum()
    assert torch.allclose(other.weights[:, place], plain.weights, rtol=1e-6, atol=0)
    for name, value in plain.metrics.items():
        assert other.metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_preset_stays_finite_at_1e4(preset: str, dtype: torch.dtype) -> None:
    old = torch.tensor([[-1e4, -1.0, 0.0], [-1.0, -1e4, -2.0]], dtype=dtype)
    rollout = torch.tensor([[-1.0, -1e4, 0.0], [-1.0, -1.0, -1e4]], dtype=dtype)
    found = correct(
        old_logprobs=old,
        rollout_logprobs=rollout,
        response_mask=torch.ones(2, 3),
        config=PRESETS[preset],
        advantages=torch.tensor([-1.0, 1.0]),
    )
    assert torch.isfinite(found.weights).all() and all(math.isfinite(x) for x in found.metrics.values())


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_present_logprobs_that_are_not_finite_are_named(value: float) -> None:
    rollout, old, _ = draw(2)
    current = old.clone()
    current[3, 5] = value
    with pytest.raises(NonFiniteLogprobError, match=r"logprobs\[3, 5\]"):
        correct(
            old_logprobs=old,
            rollout_logprobs=rollout,
            response_mask=torch.ones(9, 70),
            config=PRESETS["opsm"],
            logprobs=current,
            advantages=-torch.ones(9),
        )


@pytest.mark.parametrize("section", [{"upper": 2.0}, {"preset": "decoupled_geo_rs", "upper": 2.0}, {"normalize": True}])
def test_keys_of_a_weight_without_a_level_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="level"):
        resolve(CorrectionConfig(**section))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_off_policy_threshold_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="off_policy_threshold"):
        resolve(CorrectionConfig(off_policy_threshold=value))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
@pytest.mark.parametrize(
    "chosen",
    [
        ResolvedCorrection(level="token", upper=1.3, rules=parse_rules({"token_k1": (0.8, 1.25), "token_k2": 0.02})),
        ResolvedCorrection(
            level="sequence", upper=1.3, rules=parse_rules({"token_k1": (0.8, 1.25), "seq_mean_k3": 0.05})
        ),
        ResolvedCorrection(level="token", upper=1.3, rules=parse_rules({"token_k3": 0.02}), off_policy_threshold=0.0),
    ],
    ids=["token", "sequence", "off-policy"],
)
def test_the_dtype_of_the_mask_changes_nothing(chosen: ResolvedCorrection, dtype: torch.dtype) -> None:
    for seed in range(6):  # odd seeds have holes
        rollout, old, mask = draw(seed)
        advantages = -torch.ones(len(mask))
        plain = correct(
            old_logprobs=old, rollout_logprobs=rollout, response_mask=mask, config=chosen, advantages=advantages
        )
        typed = mask.to(dtype)
        before = typed.clone()
        found = correct(
            old_logprobs=old, rollout_logprobs=rollout, response_mask=typed, config=chosen, advantages=advantages
        )
        assert torch.equal(typed, before)  # the caller's mask is not written to
        assert torch.equal(found.mask, plain.mask) and torch.equal(found.weights, plain.weights)
        assert found.metrics == plain.metrics


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, float("nan")])
def test_a_mask_of_weights_is_refused(value: float) -> None:
    mask = torch.tensor([[value, 1.0]])
    with pytest.raises(RecordError, match="response_mask holds values other than 0 and 1"):
        correct(
            old_logprobs=torch.zeros(1, 2),
            rollout_logprobs=torch.zeros(1, 2),
            response_mask=mask,
            config=CorrectionConfig(preset="tis"),
        )
