"""The page that says what every KL configuration does, printed from exact enumeration."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.kl.full import kl_full_surrogate
from mismatch_ext.kl.surrogate import kl_surrogate
from tests.oracles.kl.enumeration import Moments, Problem, Term, exact, logits_moments, moments
from tests.oracles.kl.evidence import evidence
from tests.oracles.kl.facts import FACTS, FULL_UNBIASED, PLACEMENTS, SAMPLINGS, TARGETS, Fact
from tests.oracles.kl.hosts import hosts_section
from tests.oracles.kl.text import number, table

INTRODUCTION = """\
# What every KL configuration does

Printed by `python -m tests.oracles.kl`: every response of a small autoregressive policy is passed through
`mismatch_ext.kl.kl_surrogate` and weighted by its exact probability, in float64. Nothing is sampled. Figures have three
digits; 0 is below 1e-9. TRL's and verl's own terms have [their table](#trls-and-verls-own-kl-terms) too.

d = log pi - log pi_ref of a sampled token; k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, abs = \\|d\\|; full is exact over the
vocabulary (`kl_full_surrogate`). pi is the policy, mu the policy that sampled. Placement `loss` is the estimator's own
gradient, `reward` its score-function part, `both` their sum.

- Target `sequence`: the truth is the gradient of KL(pi\\|\\|ref) of whole responses. Target `token`: the sum over prefixes
  of the gradient of KL(pi(.\\|prefix)\\|\\|ref(.\\|prefix)), visits held fixed: those of pi on-policy and for ratio `sequence`,
  those of mu for ratios `none` and `token`.
- *value*: relative bias of the expected value of the term, which is w_t K_t for every placement. *gradient*: norm of the
  bias of the expected gradient over the norm of the true one (1 for no gradient at all). *cos*: cosine between the two.
  *std*: spread of one response's gradient over the norm of the true one.
- *regularises instead*: the divergence whose gradient is had. 2 TV is twice the total variation, E[.] a mean over pi."""

TITLES = {
    "on-policy": "On-policy",
    "none": "Off-policy, ratio `none`",
    "token": "Off-policy, ratio `token`",
    "sequence": "Off-policy, ratio `sequence`",
}


def conformance_page() -> str:
    """Return the page in Markdown: every configuration against exact enumeration, and what the defaults rest on.

    Deterministic and the same on every machine: float64, seeded, rounded to three digits. Takes some seconds. The hosts' own
    terms are read from `hosts.json`.
    """
    parts = [INTRODUCTION]
    header = ["target", "estimator", "placement", "value", "gradient", "cos", "std", "verdict", "regularises instead"]
    for sampling in SAMPLINGS:
        problem = Problem.random(3, 5, 0, distance=0.7, lag=0.0 if sampling == "on-policy" else 0.3)
        rows = [_row(problem, fact) for fact in FACTS if fact.sampling == sampling]
        rows += [_full_row(problem, target, placement, sampling) for target in TARGETS for placement in PLACEMENTS]
        parts += [f"## {TITLES[sampling]}", _sizes(problem), table(header, rows)]
    return "\n\n".join([*parts, *hosts_section(), *evidence()])


def surrogate_term(config: KlConfig) -> Term:
    """Return `kl_surrogate` of a configuration, with coefficient 1, as a term of the enumeration."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        return kl_surrogate(logprobs, ref_logprobs, mask, config, behavior_logprobs=behavior_logprobs, coef=1.0)

    return term


def _sizes(problem: Problem) -> str:
    tree, kl = problem.tree, exact(problem, "KL(pi||ref)", "sequence")[0]
    text = f"Vocabulary {tree.vocab}, {tree.horizon} tokens, KL(pi\\|\\|ref) {kl:.3g} nats a response"
    if problem.behavior is problem.policy:
        return text + "."
    sampling = dataclasses.replace(problem, policy=problem.behavior, reference=problem.policy)
    return f"{text}, KL(mu\\|\\|pi) {exact(sampling, 'KL(pi||ref)', 'sequence')[0]:.3g}."


def full_moments(problem: Problem, target: str, placement: str, sampling: str) -> Moments:
    """Return the moments of `kl_full_surrogate` of a configuration, with coefficient 1 and no baseline."""
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
        return kl_full_surrogate(logits, ref_logits, logprobs, mask, config, behavior_logprobs=behavior_logprobs)

    return logits_moments(problem, term)


def _full_row(problem: Problem, target: str, placement: str, sampling: str) -> list[str]:
    found = full_moments(problem, target, placement, sampling)
    # The same truth as that of a sampled estimator; its prefixes are those of the sampling.
    fact = Fact(estimator="k1", placement="reward", target=target, sampling=sampling)  # type: ignore[arg-type]
    own = f"KL(pi||ref) of tokens, prefixes of {fact.prefixes}"
    claim = own if target == "sequence" and placement == "loss" else ""
    if placement == "reward":
        claim = "0" if target == "token" else f"KL(pi||ref) of responses minus {own}"
    if target == "sequence" and sampling in ("none", "token"):
        claim = "none: later tokens are those of mu" if placement != "loss" else claim
    unbiased = placement in FULL_UNBIASED[target, sampling]
    return _cells(found, fact.truth(problem), (target, "full", placement), "" if unbiased else claim)


def _row(problem: Problem, fact: Fact) -> list[str]:
    found = moments(problem, surrogate_term(fact.config))
    configuration = (fact.target, fact.estimator, fact.placement)
    return _cells(found, fact.truth(problem), configuration, "" if fact.unbiased else fact.claim)


def _cells(found: Moments, truth: tuple[float, Tensor], configuration: tuple[str, str, str], claim: str) -> list[str]:
    value, gradient = truth
    size, norm = float(gradient.norm()), float(found.gradient.norm())
    bias = float((found.gradient - gradient).norm()) / size
    return [
        *configuration,
        number(found.value / value - 1),
        number(bias),
        number(float((found.gradient * gradient).sum()) / size / norm) if norm > 1e-9 * size else "",
        number(found.std / size),
        "**unbiased**" if bias < 1e-9 else "biased",
        claim,
    ]
