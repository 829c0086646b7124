"""This package's KL terms as terms of the enumeration."""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.kl import kl_terms
from mismatch_ext.testing import Moments, Problem, Term, logits_moments


def surrogate_term(config: KlConfig) -> Term:
    """Return `kl_terms` of a configuration, with coefficient 1, as a term of the enumeration."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        return kl_terms(logprobs, ref_logprobs, mask, config, behavior=behavior_logprobs, coef=1.0).loss

    return term


def full_moments(problem: Problem, target: str, placement: str, sampling: str) -> Moments:
    """Return the moments of `kl_terms` of a configuration of estimator "full", with coefficient 1 and no baseline."""
    ratio = "none" if sampling == "on-policy" else sampling
    config = KlConfig(
        estimator="full",
        placement=placement,  # type: ignore[arg-type]
        target=target,  # type: ignore[arg-type]
        ratio=ratio,  # type: ignore[arg-type]
        baseline="none",
        coef=1.0,
    )

    def term(logits: Tensor, ref_logits: Tensor, logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        return kl_terms(logprobs, None, mask, config, behavior=behavior_logprobs, logits=(logits, ref_logits)).loss

    return logits_moments(problem, term)


def paired_term(config: KlConfig) -> Term:
    """Return `kl_terms` with coefficient 1 on pairs of responses: rows 2k and 2k + 1 are a group."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        groups = torch.arange(len(logprobs)) // 2
        return kl_terms(logprobs, ref_logprobs, mask, config, behavior=behavior_logprobs, coef=1.0, groups=groups).loss

    return term
