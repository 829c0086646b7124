"""This package's KL terms as terms of the enumeration, and the table of them: `python -m tests.oracles.kl.conformance`."""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_ext.config import ESTIMATORS, KlConfig
from mismatch_ext.kl import kl_terms
from mismatch_ext.testing import ZERO, Moments, Problem, Term, moments, off
from tests.oracles.kl.facts import FULL_CLAIMS, FULL_UNBIASED, PLACEMENTS, SAMPLINGS, TARGETS, Fact
from tests.oracles.kl.hosts import problem_of


def surrogate_term(config: KlConfig) -> Term:
    """Return `kl_terms` of a configuration, with coefficient 1, as a term of the enumeration."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        return kl_terms(
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            mask=mask,
            settings=config,
            behavior=behavior_logprobs,
            coef=1.0,
        ).loss

    return term


def full_moments(problem: Problem, target: str, placement: str, sampling: str) -> Moments:
    """Return the moments of `kl_terms` with estimator "full", coefficient 1 and no baseline."""
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
    loss = kl_terms(
        logprobs=logprobs, ref_logprobs=None, mask=mask, settings=config, behavior=behavior, logits=(logits, ref_logits)
    ).loss
    per_row, weights = torch.autograd.grad(loss.sum(), policy)[0], problem.probabilities
    gradient = torch.einsum("n,npv->pv", weights, per_row)
    variance = weights @ (per_row**2).sum((1, 2)) - (gradient**2).sum()
    return Moments(
        value=float(weights @ loss.detach().sum(1)), gradient=gradient, std=float(variance.clamp_min(0.0)) ** 0.5
    )


def paired_term(config: KlConfig) -> Term:
    """Return `kl_terms` with coefficient 1 on pairs of responses: rows 2k and 2k + 1 are a group."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        groups = torch.arange(len(logprobs)) // 2
        return kl_terms(
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            mask=mask,
            settings=config,
            behavior=behavior_logprobs,
            coef=1.0,
            groups=groups,
        ).loss

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


def row(estimator: str, placement: str, target: str) -> list[str]:
    """Return the row of a configuration."""
    # The true gradient is that of KL(pi||ref), whatever the estimator.
    facts = [
        Fact(estimator=estimator, placement=placement, target=target, sampling=sampling)  # type: ignore[arg-type]
        for sampling in SAMPLINGS
    ]
    truths = [fact.truth(problem_of_fact(fact)) for fact in facts]
    found = [
        full_moments(problem_of_fact(fact), target, placement, fact.sampling)
        if estimator == "full"
        else moments(problem_of_fact(fact), surrogate_term(fact.config))
        for fact in facts
    ]
    biases = [figure(off(of.gradient, true), "**0**") for of, (_, true) in zip(found, truths, strict=True)]
    on_policy, (value, gradient) = found[0], truths[0]
    if estimator == "full":
        instead = "" if placement in FULL_UNBIASED[target, "on-policy"] else FULL_CLAIMS[placement]
    else:
        instead = "" if facts[0].unbiased else facts[0].claim
    std = figure(on_policy.std / float(gradient.norm()))
    texts = [figure(on_policy.value / value - 1), *biases, std, instead.replace("|", "\\|")]
    return [target, estimator, placement, *texts]


def problem_of_fact(fact: Fact) -> Problem:
    """Return the page's policies, for samples of pi or of mu."""
    return problem_of("on-policy" if fact.sampling == "on-policy" else "off-policy")


def figure(size: float, zero: str = "0") -> str:
    """Return three digits."""
    return zero if abs(size) < ZERO else f"{size:.3g}"


def main() -> None:
    """Print the table of evidence/kl.md."""
    figures = "value | on-policy | off, ratio `none` | off, `token` | off, `sequence` | std"
    print(f"| target | estimator | placement | {figures} | regularizes instead, on-policy |")
    print("|---" * 10 + "|")
    for estimators in (ESTIMATORS, ("full",)):
        for target in TARGETS:
            for estimator in estimators:
                for placement in PLACEMENTS:
                    if (estimator, placement, target) != ("full", "reward", "token"):  # refused: it has no gradient
                        print(f"| {' | '.join(row(estimator, placement, target))} |")


if __name__ == "__main__":
    main()
