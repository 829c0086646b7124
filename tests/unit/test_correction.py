"""Importance corrections: literals by hand, both implementations against each other, oracles, errors, properties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_ext.config import CorrectionConfig
from mismatch_ext.correction import correct
from mismatch_ext.errors import ConfigError, NonFiniteLogprobError, RecordError
from mismatch_ext.presets import PRESETS, ResolvedCorrection, parse_rules, resolve
from tests.unit.tables import table

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


@pytest.mark.parametrize(*table("correction_weights"))
def test_weights_by_hand(keys: dict[str, Any], weights: list[list[float]]) -> None:
    found = corrected(**keys)
    assert torch.allclose(found.weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-9)
    assert torch.equal(found.mask, MASK.bool()) and not found.weights.requires_grad


@pytest.mark.parametrize(*table("correction_rules"))
def test_rejection_by_hand(reject: dict[str, Any], kept: list[list[int]]) -> None:
    found = corrected(rules=resolve(CorrectionConfig(reject=reject)).rules)
    assert found.mask.int().tolist() == kept
    left = sum(map(sum, kept))
    assert found.metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - left / 5)
    assert found.as_multiplier().tolist() == kept


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


@pytest.mark.parametrize(*table("correction_refusals"))
def test_malformed_sections_are_refused(section: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(CorrectionConfig(**section))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("value", [math.nan, -math.inf])
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
    assert not found.weights.requires_grad and not found.as_multiplier().requires_grad


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
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


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_mask_of_weights_is_refused(value: float) -> None:
    mask = torch.tensor([[value, 1.0]])
    with pytest.raises(RecordError, match="response_mask holds values other than 0 and 1"):
        correct(
            old_logprobs=torch.zeros(1, 2),
            rollout_logprobs=torch.zeros(1, 2),
            response_mask=mask,
            config=CorrectionConfig(preset="tis"),
        )
