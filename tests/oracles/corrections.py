"""Importance corrections of hosts by exact enumeration, beside ours, on samples of a policy far from the one that is trained."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from mismatch_ext.correction import correct
from mismatch_ext.presets import ResolvedCorrection
from mismatch_ext.testing import Problem, RowLoss, judge_correction, row_term

# So far that every bound and every rejection rule acts on some responses and not on others.
PROBLEM = Problem.random(3, 3, 2, lag=0.5)
REWARDS = PROBLEM.tree.random_rewards(0)


def judged(loss: RowLoss) -> dict[str, float | None]:
    """Judge a host's policy loss of one response, whose last argument is the reward `[1]`."""
    return asdict(judge_correction(PROBLEM, row_term(loss, REWARDS), REWARDS))


def judged_ours(settings: ResolvedCorrection) -> dict[str, float | None]:
    """Judge -w A log pi with our weights of the sampling policy against the trained one."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        found = correct(
            old_logprobs=logprobs.detach(), rollout_logprobs=behavior_logprobs, response_mask=mask, config=settings
        )
        return -found.as_multiplier() * REWARDS[:, None] * logprobs

    return asdict(judge_correction(PROBLEM, term, REWARDS))
