"""Every documented configuration against exact enumeration."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.kl import kl_terms
from mismatch_ext.testing import Problem, moments
from tests.oracles.kl import conformance, hosts, spreads
from tests.oracles.kl.conformance import full_moments, pair_gradient, paired_term, surrogate_term
from tests.oracles.kl.facts import FACTS, FULL_UNBIASED, PLACEMENTS, SAMPLINGS, TARGETS, Fact

pytestmark = pytest.mark.numeric

SHAPES = [(vocab, horizon) for horizon in (1, 5) for vocab in (2, 3, 4)]
SEEDS = range(3)


def problem_of(fact: Fact, vocab: int, horizon: int, seed: int) -> Problem:
    return Problem.random(vocab, horizon, seed, lag=0.0 if fact.sampling == "on-policy" else 0.3)


def name(value: object) -> str:
    if isinstance(value, Fact):
        return f"{value.estimator}-{value.placement}-{value.target}-{value.sampling}"
    return str(value)


@pytest.mark.parametrize("fact", FACTS, ids=name)
def test_every_configuration_does_what_is_documented(fact: Fact) -> None:
    for (vocab, horizon), seed in itertools.product(SHAPES, SEEDS):
        problem = problem_of(fact, vocab, horizon, seed)
        found = moments(problem, surrogate_term(fact.config))
        value, gradient = fact.truth(problem)
        size = gradient.norm()
        bias = float((found.gradient - gradient).norm() / size)
        assert float((found.gradient - fact.documented_gradient(problem)).norm() / size) < 1e-9
        if fact.unbiased:
            assert bias < 1e-9
        elif horizon > 1:
            assert bias > 1e-3
        if fact.unbiased_value:
            assert found.value == pytest.approx(value, rel=1e-9)
        elif horizon > 1:
            assert abs(found.value / value - 1) > 1e-4


LOO = [fact for fact in FACTS if fact.sampling != "none" and fact.placement != "loss"]


def with_baseline(fact: Fact) -> KlConfig:
    return KlConfig(**{**vars(fact.config), "baseline": "leave_one_out"})


@pytest.mark.parametrize("fact", LOO, ids=name)
@pytest.mark.parametrize("shape", [(2, 5), (3, 3), (4, 2)], ids=name)
def test_leave_one_out_keeps_the_expectation(fact: Fact, shape: tuple[int, int]) -> None:
    # Every pair of responses, weighted by the product of their probabilities.
    problem = problem_of(fact, *shape, 1)
    got = pair_gradient(problem, paired_term(with_baseline(fact)))
    size = fact.truth(problem)[1].norm()
    assert float((got - fact.documented_gradient(problem)).norm() / size) < 1e-9


@pytest.mark.parametrize("ratio", ["none", "sequence"])
@pytest.mark.parametrize(("estimator", "placement"), [("k1", "reward"), ("k3", "both")])
def test_responses_that_end_early_and_tool_tokens_keep_the_expectation(
    ratio: str, estimator: str, placement: str
) -> None:
    # Token 0 ends a response; token 1 is answered by a tool, whose token is masked. Truth: KL of the masked process.
    problem = Problem.random(3, 4, 2, lag=0.0 if ratio == "none" else 0.3)
    tree = problem.tree
    mask = torch.ones(tree.sequences.shape, dtype=torch.bool)
    for row, tokens in enumerate(tree.sequences.tolist()):
        for t in range(1, 4):
            mask[row, t] = 0 not in tokens[:t] and not (tokens[t - 1] == 1 and mask[row, t - 1])
    # Masked tokens are the environment's: drawn from mu, whatever the policy.
    policy = problem.policy.clone().requires_grad_()
    m = tree.logprobs(problem.behavior)
    p = torch.where(mask, tree.logprobs(policy), m)
    d = torch.where(mask, p - tree.logprobs(problem.reference), 0.0)
    truth = torch.autograd.grad(p.sum(1).exp() @ d.sum(1), policy)[0]
    for baseline in ("none", "leave_one_out"):
        config = KlConfig(estimator=estimator, placement=placement, ratio=ratio, baseline=baseline)  # type: ignore[arg-type]

        def term(logprobs: Tensor, ref_logprobs: Tensor, behavior: Tensor, config: KlConfig = config) -> Tensor:
            pairs = torch.stack([mask.repeat_interleave(len(mask), 0), mask.repeat(len(mask), 1)], 1).flatten(0, 1)
            groups = torch.arange(len(pairs)) // 2
            return kl_terms(
                logprobs=logprobs,
                ref_logprobs=ref_logprobs,
                mask=pairs,
                settings=config,
                behavior=behavior,
                coef=1.0,
                groups=groups,
            ).loss

        got = pair_gradient(problem, term)
        assert float((got - truth).norm() / truth.norm()) < 1e-9


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_full_is_unbiased_exactly_where_documented(sampling: str, target: str, placement: str) -> None:
    if (placement, target) == ("reward", "token"):
        return  # refused: it has no gradient
    fact = Fact(estimator="k1", placement="reward", target=target, sampling=sampling)  # type: ignore[arg-type]
    for vocab, horizon in SHAPES[:5]:
        problem = problem_of(fact, vocab, horizon, 1)
        truth = fact.truth(problem)[1]
        bias = float((full_moments(problem, target, placement, sampling).gradient - truth).norm() / truth.norm())
        if placement in FULL_UNBIASED[target, sampling]:
            assert bias < 1e-9, (vocab, horizon)
        elif horizon > 1:
            assert bias > 1e-3, (vocab, horizon)


@pytest.mark.parametrize("oracle", [conformance, spreads, hosts])
def test_the_page_has_the_tables_that_enumeration_gives(oracle: Any, capsys: pytest.CaptureFixture[str]) -> None:
    oracle.main()
    page = (Path(__file__).resolve().parents[2] / "evidence/kl.md").read_text("utf-8")
    for table in capsys.readouterr().out.strip().split("\n\n"):
        assert table in page, f"run python -m {oracle.__name__}, and copy its tables to evidence/kl.md"
