"""This package's KL terms as terms of the enumeration."""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.kl import kl_terms
from mismatch_ext.testing import Problem, Term


def surrogate_term(config: KlConfig) -> Term:
    """Return `kl_terms` of a configuration, with coefficient 1, as a term of the enumeration."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        return kl_terms(logprobs, ref_logprobs, mask, config, behavior=behavior_logprobs, coef=1.0).loss

    return term


def full_gradient(problem: Problem, target: str, placement: str, sampling: str) -> Tensor:
    """Return the expected gradient `[P, V]` of `kl_terms` with estimator "full", coefficient 1 and no baseline."""
    ratio = "none" if sampling == "on-policy" else sampling
    config = KlConfig(
        estimator="full",
        placement=placement,  # type: ignore[arg-type]
        target=target,  # type: ignore[arg-type]
        ratio=ratio,  # type: ignore[arg-type]
        baseline="none",
        coef=1.0,
    )

    tree, count = problem.tree, len(problem.probabilities)
    # A copy of the table for each response: one backward pass then gives every response's own gradient.
    policy = problem.policy.expand(count, -1, -1).clone().requires_grad_()
    logits, ref_logits = policy[torch.arange(count)[:, None], tree.states], problem.reference[tree.states]
    logprobs = logits.log_softmax(-1).gather(-1, tree.sequences[..., None])[..., 0]
    mask, behavior = torch.ones(logprobs.shape, dtype=torch.bool), tree.logprobs(problem.behavior)
    loss = kl_terms(logprobs, None, mask, config, behavior=behavior, logits=(logits, ref_logits)).loss
    per_row = torch.autograd.grad(loss.sum(), policy)[0]
    return torch.einsum("n,npv->pv", problem.probabilities, per_row)


def paired_term(config: KlConfig) -> Term:
    """Return `kl_terms` with coefficient 1 on pairs of responses: rows 2k and 2k + 1 are a group."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        groups = torch.arange(len(logprobs)) // 2
        return kl_terms(logprobs, ref_logprobs, mask, config, behavior=behavior_logprobs, coef=1.0, groups=groups).loss

    return term


def pair_gradient(problem: Problem, term: Term) -> Tensor:
    """Return the expected gradient `[P, V]` of a term with a leave-one-out baseline, per response of a batch.

    The term is called once on every pair of responses, rows 2k and 2k + 1 being a pair. The mean gradient of a batch with such a
    baseline is the mean over its pairs (a U-statistic, Hoeffding 1948).
    """
    tree, count = problem.tree, len(problem.probabilities)
    first, second = torch.arange(count).repeat_interleave(count), torch.arange(count).repeat(count)
    rows = torch.stack([first, second], dim=1).flatten()
    policy = problem.policy.clone().requires_grad_()
    logprobs = tree.logprobs(policy)[rows]
    terms = term(logprobs, tree.logprobs(problem.reference)[rows], tree.logprobs(problem.behavior)[rows])
    weights = problem.probabilities[first] * problem.probabilities[second]
    return torch.autograd.grad((weights.repeat_interleave(2)[:, None] * terms).sum() / 2, policy)[0]
