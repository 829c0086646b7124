"""Our corrections and KL terms against polgrad's, by its own pytest plugin: `pytest benchmarks/rivals_polgrad.py` where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from polgrad import ALGORITHMS, Aggregation, KLEstimator, policy_loss
from polgrad.aggregate import aggregate
from polgrad.kl import kl_loss
from polgrad.losses import ISCorrectionConfig
from polgrad.testing import assert_conforms
from torch import Tensor

from mismatch_ext.config import CorrectionConfig, KlConfig
from mismatch_ext.correction import correct
from mismatch_ext.kl import kl_terms

Batch = dict[str, Tensor]
GRPO = replace(ALGORITHMS["grpo"].loss, kl=None)
SUMS = Aggregation.SEQ_MEAN_TOKEN_SUM
SHAPES = ((4, 8), (2, 12))
# As its `assert_conforms`.
RTOL = 1e-9


def corrected(level: Any, cap: float, batch: Batch) -> Tensor:
    """Return the plain GRPO loss with our weights on the tokens."""
    settings = CorrectionConfig(level=level, bound="truncate", upper=cap)
    ours = correct(
        old_logprobs=batch["old_logprobs"],
        rollout_logprobs=batch["rollout_logprobs"],
        response_mask=batch["response_mask"],
        config=settings,
    )
    return surrogate(ours.weights, **batch)


def surrogate(
    weights: Tensor | float, *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, **batch: Tensor
) -> Tensor:
    ratio, advantages = (logprobs - old_logprobs).exp(), advantages[:, None]
    clipped = ratio.clamp(1 - GRPO.clip.eps_low, 1 + GRPO.clip.eps_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages) * weights
    return aggregate(loss, batch["response_mask"], GRPO.aggregation)


def theirs_corrected(level: Any, cap: float, batch: Batch) -> Tensor:
    config = replace(GRPO, is_correction=ISCorrectionConfig(cap=cap, level=level))
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "response_mask")
    return policy_loss(config, **{name: batch[name] for name in names}).loss


def ours_kl(estimator: Any, batch: Batch) -> Tensor:
    settings = KlConfig(estimator=estimator, placement="loss", target="token", coef=1.0, baseline="none")
    terms = kl_terms(
        logprobs=batch["logprobs"], ref_logprobs=batch["ref_logprobs"], mask=batch["response_mask"], settings=settings
    )
    return aggregate(terms.loss, batch["response_mask"], SUMS)


def theirs_kl(kind: KLEstimator, batch: Batch) -> Tensor:
    return kl_loss(batch["logprobs"], batch["ref_logprobs"], kind, SUMS, response_mask=batch["response_mask"])


Loss = Callable[[Batch], Tensor]
CASES: dict[str, tuple[Loss, Loss]] = {
    **{
        f"{level} weight, cap {cap:g}": (partial(corrected, level, cap), partial(theirs_corrected, level, cap))
        for level in ("token", "sequence")
        for cap in (2.0, 10.0)
    },
    **{
        f"KL {kind.value} in the loss": (partial(ours_kl, kind.value), partial(theirs_kl, kind)) for kind in KLEstimator
    },
}


def differentiated(loss: Loss, batch: Batch) -> tuple[Tensor, Tensor]:
    leaf = batch["logprobs"].clone().requires_grad_()
    value = loss(batch | {"logprobs": leaf})
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(name: str, polgrad_batches: Any, record_property: Any) -> None:
    worst = 0.0
    for batch in polgrad_batches(64, SHAPES, seed=0):
        for ours, theirs in zip(*(differentiated(loss, batch) for loss in CASES[name]), strict=True):
            worst = max(worst, float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12)))
    record_property("difference", worst)
    assert worst <= RTOL


@pytest.mark.parametrize("name", ["GRPO without weights, by assert_conforms"])
def test_the_loss_that_our_weights_multiply(name: str, record_property: Any) -> None:
    """Its own judgement covers this one alone: it refuses corrections, and leaves KL terms out."""
    report = assert_conforms(partial(surrogate, 1.0), "grpo")
    record_property("difference", max(report.max_loss_rel_diff, report.max_grad_rel_diff))
    with pytest.raises(ValueError, match="is_correction"):
        assert_conforms(partial(surrogate, 1.0), "grpo_tis")
