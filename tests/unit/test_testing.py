"""The enumeration as anyone's oracle: what it says of corrections, of losses by hand, and of terms that claim too much."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_ext.config import CorrectionConfig, KlConfig
from mismatch_ext.correction import correct
from mismatch_ext.kl import kl_terms
from mismatch_ext.testing import Problem, Term, judge_correction, judge_kl, kl_problem, row_term

__all__ = ["kl_problem"]


def test_a_loss_by_hand_is_certified_in_a_few_lines(kl_problem: Problem) -> None:
    def k2(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        ratio = (logprobs - behavior_logprobs).exp().detach()
        return (ratio * (logprobs - ref_logprobs) ** 2 / 2).sum()

    judge_kl(kl_problem, row_term(k2)).expect(f"KL(pi||ref) of tokens, prefixes of {kl_problem.prefixes}")


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_our_default_placement_regularizes_whole_responses(kl_problem: Problem, estimator: str) -> None:
    config = KlConfig(estimator=estimator, placement="both", ratio="sequence", baseline="none")  # type: ignore[arg-type]

    def loss(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        return kl_terms(
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            mask=mask,
            settings=config,
            behavior=behavior_logprobs,
            coef=1.0,
        ).loss.sum()

    judge_kl(kl_problem, row_term(loss)).expect("KL(pi||ref) of responses")


def test_a_term_that_regularizes_something_else_fails_by_what_it_does() -> None:
    def k1_in_the_loss(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        return (logprobs - ref_logprobs).sum()

    problem = Problem.random(3, 3, 0)
    with pytest.raises(AssertionError, match=r"regularizes 0; allowed: KL\(pi\|\|ref\) of responses"):
        judge_kl(problem, row_term(k1_in_the_loss)).expect("KL(pi||ref) of responses")
    with pytest.raises(AssertionError, match="no gradient of a known divergence"):
        judge_kl(problem, row_term(lambda p, r, m: ((p - r) ** 4).sum())).expect("KL(pi||ref) of responses")


def corrected(config: CorrectionConfig, rewards: Tensor) -> Term:
    """Return the policy loss -w A log pi with our importance weights of mu against pi."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        found = correct(
            old_logprobs=logprobs.detach(), rollout_logprobs=behavior_logprobs, response_mask=mask, config=config
        )
        return -(found.weights * found.mask * rewards[:, None] * logprobs)

    return term


def test_only_whole_sequences_weights_give_the_policy_gradient() -> None:
    problem = Problem.random(3, 4, 0, lag=0.3)
    rewards = problem.tree.random_rewards(0)

    def judged(**section: Any) -> Any:
        return judge_correction(problem, corrected(CorrectionConfig(**section), rewards), rewards)

    none, token = judged(preset="disabled"), judged(level="token", bound="truncate", upper=1e9)
    sequence, capped = (judged(level="sequence", bound="truncate", upper=upper) for upper in (1e9, 1.5))
    assert sequence.bias < 1e-9 and sequence.cos == pytest.approx(1, abs=1e-9)
    assert none.bias > token.bias > 0.01 and 0.001 < capped.bias < none.bias
    assert capped.std < sequence.std
