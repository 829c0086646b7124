"""Exact enumeration as a test oracle: what a trainer's KL term or importance correction does on average, without sampling.

A policy is a table of logits `[P, V]`, one row per prefix: nothing is shared between prefixes, so no error can hide in a
parametrisation. Every response is enumerated, and weighted by its probability under the policy that samples.

    from mismatch_ext.testing import judge_kl, kl_problem, row_term  # kl_problem is a pytest fixture

    def test_the_kl_term_of_my_trainer(kl_problem):
        def loss(logprobs, ref_logprobs, behavior_logprobs):  # of one response, each [1, T]
            return my_trainer.kl_loss(logprobs, ref_logprobs).sum()

        judge_kl(kl_problem, row_term(loss)).expect("KL(pi||ref) of responses")

Shapes: N = V^T responses, T tokens, V vocabulary, P = (V^T - 1) / (V - 1) prefixes. All float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor

RowLoss = Callable[..., Tensor]
"""(logprobs, ref_logprobs, behavior_logprobs, *others) of one response, each [1, T] or [1] -> its loss, summed, 0-d."""

Term = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logprobs, ref_logprobs, behavior_logprobs), each [rows, T] -> per-token loss terms [rows, T]."""

ZERO = 1e-9
"""Relative size below which a figure is rounding."""


@dataclass(frozen=True, eq=False)
class Tree:
    """Every response of `horizon` tokens over a vocabulary, and the prefixes that they pass."""

    vocab: int
    horizon: int

    @property
    def prefixes(self) -> int:
        """Number of prefixes P that a token can follow."""
        return sum(self.vocab**t for t in range(self.horizon))

    @property
    def sequences(self) -> Tensor:
        """All responses `[N, T]`."""
        number = torch.arange(self.vocab**self.horizon)
        return torch.stack([number // self.vocab**t % self.vocab for t in reversed(range(self.horizon))], dim=1)

    @property
    def states(self) -> Tensor:
        """Prefix that each token follows `[N, T]`."""
        tokens, columns, first = self.sequences, [], 0
        number = torch.zeros(len(tokens), dtype=torch.long)
        for t in range(self.horizon):
            columns.append(first + number)
            first += self.vocab**t
            number = number * self.vocab + tokens[:, t]
        return torch.stack(columns, dim=1)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return the log-probability of each token given its prefix `[N, T]`."""
        return logits.log_softmax(-1)[self.states, self.sequences]

    def random_rewards(self, seed: int) -> Tensor:
        """Return a seeded normal reward for each response `[N]`, the same on every machine."""
        draw = random.Random(f"{self.vocab}/{self.horizon}/rewards/{seed}")
        return torch.tensor([draw.gauss(0, 1) for _ in range(self.vocab**self.horizon)], dtype=torch.float64)

    def random_logits(self, seed: int, scale: float, around: Tensor | None = None) -> Tensor:
        """Return seeded normal logits `[P, V]`, the same on every machine, added to `around`."""
        draw = random.Random(f"{self.vocab}/{self.horizon}/{seed}")
        noise = [[draw.gauss(0, scale) for _ in range(self.vocab)] for _ in range(self.prefixes)]
        return torch.tensor(noise, dtype=torch.float64) + (0 if around is None else around)


@dataclass(frozen=True, eq=False)
class Problem:
    """Policy, reference and sampling policy on one tree; `behavior` is the same as `policy` on-policy."""

    tree: Tree
    policy: Tensor  # logits of pi `[P, V]`
    reference: Tensor  # of pi_ref
    behavior: Tensor  # of mu, which samples

    @classmethod
    def random(cls, vocab: int, horizon: int, seed: int, *, distance: float = 0.7, lag: float = 0.0) -> Problem:
        """Return a random policy, and normal noise on the logits of reference (`distance`) and behavior (`lag`)."""
        tree = Tree(vocab, horizon)
        policy = tree.random_logits(3 * seed, 1.0)
        return cls(
            tree,
            policy,
            tree.random_logits(3 * seed + 1, distance, around=policy),
            tree.random_logits(3 * seed + 2, lag, around=policy) if lag else policy,
        )

    @property
    def prefixes(self) -> Literal["pi", "mu"]:
        """The policy whose prefixes are sampled: "pi" on-policy, otherwise "mu"."""
        return "pi" if torch.equal(self.policy, self.behavior) else "mu"

    @property
    def probabilities(self) -> Tensor:
        """Probability of each response under the sampling policy `[N]`."""
        return self.tree.logprobs(self.behavior).sum(1).exp()


# Divergences between two next-token distributions, from their log-probabilities [P, V]; differentiable in the first.


def _kl(p: Tensor, r: Tensor) -> Tensor:
    return (p.exp() * (p - r)).sum(-1)


def _reverse_kl(p: Tensor, r: Tensor) -> Tensor:
    return _kl(r, p)


def _k2(p: Tensor, r: Tensor) -> Tensor:
    return (p.exp() * (p - r) ** 2 / 2).sum(-1)


def _abs(p: Tensor, r: Tensor) -> Tensor:
    return (p.exp() * (p - r).abs()).sum(-1)


def _twice_tv(p: Tensor, r: Tensor) -> Tensor:
    return (p.exp() - r.exp()).abs().sum(-1)


# The same between whole responses, from the log-probabilities of their tokens [N, T].


def _kl_of_responses(p: Tensor, r: Tensor) -> Tensor:
    return p.sum(1).exp() @ (p.sum(1) - r.sum(1))


def _k2_of_responses(p: Tensor, r: Tensor) -> Tensor:
    return p.sum(1).exp() @ ((p - r) ** 2 / 2).sum(1)


def _abs_of_responses(p: Tensor, r: Tensor) -> Tensor:
    return p.sum(1).exp() @ (p - r).abs().sum(1)


Divergence = Callable[[Tensor, Tensor], Tensor]
PREFIX_DIVERGENCES: dict[str, Divergence] = {
    "KL(pi||ref)": _kl,
    "KL(ref||pi)": _reverse_kl,
    "E[k2]": _k2,
    "E[abs]": _abs,
    "2 TV": _twice_tv,
}
SEQUENCE_DIVERGENCES: dict[str, Divergence] = {
    "KL(pi||ref)": _kl_of_responses,
    "E[k2]": _k2_of_responses,
    "E[abs]": _abs_of_responses,
}


def exact(
    problem: Problem, divergence: str, target: Literal["token", "sequence"], prefixes: Literal["pi", "mu"] = "pi"
) -> tuple[float, Tensor]:
    """Return value and gradient `[P, V]` of a divergence, by summation, without any sampling identity.

    "sequence": the divergence summed over whole responses of pi. "token": the sum over prefixes of the divergence of next-token
    distributions, weighted by how often one of the policies `prefixes` visits them, those weights held fixed.
    """
    tree, policy = problem.tree, problem.policy.clone().requires_grad_()
    if target == "sequence":
        value = SEQUENCE_DIVERGENCES[divergence](tree.logprobs(policy), tree.logprobs(problem.reference))
    else:
        visits = _visits(tree, problem.policy if prefixes == "pi" else problem.behavior)
        value = visits @ PREFIX_DIVERGENCES[divergence](policy.log_softmax(-1), problem.reference.log_softmax(-1))
    return float(value.detach()), torch.autograd.grad(value, policy)[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """What a loss term does on average, and how far one sample strays."""

    value: float  # expected sum of the term over a response
    gradient: Tensor  # expected gradient of that sum in the policy's logits `[P, V]`
    # Root of the summed variances of one response's gradient; of a batch's mean it is std / sqrt(batch size).
    std: float


def moments(problem: Problem, term: Term) -> Moments:
    """Return exact moments of a term that treats rows independently, by one call with every response as a row."""
    values, per_row = _call(problem, term, torch.arange(len(problem.probabilities)))
    weights = problem.probabilities
    policy = problem.policy.clone().requires_grad_()
    gradient = torch.autograd.grad(problem.tree.logprobs(policy), policy, weights[:, None] * per_row)[0]
    # A response passes each of its prefixes once, so the squares of its tokens' gradients add up.
    square = weights @ (per_row**2 * _score_squares(problem)).sum(1)
    return Moments(value=float(weights @ values), gradient=gradient, std=_root(square - (gradient**2).sum(), square))


def row_term(loss: RowLoss, *others: Tensor) -> Term:
    """Return a loss of one response as a term of the enumeration; `others`, each `[N]`, are what else it takes (rewards)."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        terms = []
        for row in range(len(logprobs)):
            at = slice(row, row + 1)
            leaf = logprobs[at].detach().requires_grad_()
            value = loss(leaf, ref_logprobs[at], behavior_logprobs[at], *(other[at] for other in others))
            (gradient,) = torch.autograd.grad(value, leaf)
            # The bracket is zero, with gradient one.
            terms.append(value.detach() / leaf.numel() + gradient[0] * (logprobs[row] - logprobs[row].detach()))
        return torch.stack(terms)

    return term


@dataclass(frozen=True, kw_only=True)
class KlJudgement:
    """What a KL term is on average; sizes are relative to the exact value or the norm of the exact gradient."""

    value: float  # bias of the expected value against KL(pi||ref) of responses
    responses: float  # bias of the expected gradient against that of KL(pi||ref) of responses
    cos: float | None  # of the two gradients; None where the expected one is 0
    tokens: float  # bias of the expected gradient against that of the per-token reverse KL of the sampled prefixes
    std: float  # spread of one response's gradient over the norm of that of KL(pi||ref) of responses
    # The divergence whose gradient it is, in words; "0" where it has none on average, "" if it is no known one.
    regularizes: str

    def expect(self, divergence: str) -> None:
        """Raise AssertionError unless the term regularizes a divergence, such as "KL(pi||ref) of responses"."""
        if self.regularizes != divergence:
            actual = (
                self.regularizes or f"no gradient of a known divergence (of responses it is {self.responses:.1%} off)"
            )
            raise AssertionError(f"the KL term regularizes {actual}; allowed: {divergence}.")


def judge_kl(problem: Problem, term: Term | Moments) -> KlJudgement:
    """Compare a KL term of coefficient 1, or its moments, with the exact divergences (arXiv 2512.21852).

    Its figures are rounded to six digits, so that they are the same on every machine.
    """
    expected = term if isinstance(term, Moments) else moments(problem, term)
    value, whole = exact(problem, "KL(pi||ref)", "sequence")
    candidates = {"KL(pi||ref) of responses": whole}
    for name in PREFIX_DIVERGENCES:
        gradient = exact(problem, name, "token", problem.prefixes)[1]
        candidates[f"{name} of tokens, prefixes of {problem.prefixes}"] = gradient
    token = candidates[f"KL(pi||ref) of tokens, prefixes of {problem.prefixes}"]
    vanishes = float(expected.gradient.norm()) < ZERO * float(whole.norm())
    matches = [name for name, truth in candidates.items() if off(expected.gradient, truth) < ZERO]
    cosine = None if vanishes else _figure(_cosine(expected.gradient, whole))
    return KlJudgement(
        value=_figure(expected.value / value - 1),
        responses=_figure(off(expected.gradient, whole)),
        cos=cosine,
        tokens=_figure(off(expected.gradient, token)),
        std=_figure(expected.std / float(whole.norm())),
        regularizes="0" if vanishes else next(iter(matches), ""),
    )


@dataclass(frozen=True, kw_only=True)
class CorrectionJudgement:
    """What a policy loss on samples of mu is on average, beside the gradient of the expected reward under pi."""

    bias: float  # norm of the difference of the two gradients over that of the exact one
    cos: float | None  # None where the expected gradient is 0
    shape: float  # what is left of the bias at the best scale: what no learning rate takes away
    std: float  # spread of one response's gradient over the norm of the exact one


def judge_correction(problem: Problem, term: Term, rewards: Tensor) -> CorrectionJudgement:
    """Compare a loss whose advantages are `rewards` `[N]`, by `Tree.sequences`, with the exact gradient -grad E_pi[R]."""
    policy = problem.policy.clone().requires_grad_()
    truth = torch.autograd.grad(-(problem.tree.logprobs(policy).sum(1).exp() @ rewards), policy)[0]
    expected = moments(problem, term)
    size = float(truth.norm())
    bias, std = _figure(off(expected.gradient, truth)), _figure(expected.std / size)
    if float(expected.gradient.norm()) < ZERO * size:
        return CorrectionJudgement(bias=bias, cos=None, shape=1.0, std=std)
    cosine = _cosine(expected.gradient, truth)
    sine = max(0.0, 1 - cosine**2) ** 0.5
    return CorrectionJudgement(bias=bias, cos=_figure(cosine), shape=_figure(sine), std=std)


@pytest.fixture(params=["on-policy", "off-policy"])
def kl_problem(request: pytest.FixtureRequest) -> Problem:
    """Policy, reference and sampling policy over the responses of five tokens of a vocabulary of three."""
    return Problem.random(3, 5, 0, distance=0.7, lag=0.0 if request.param == "on-policy" else 0.3)


def off(estimate: Tensor, truth: Tensor) -> float:
    """Return the norm of the difference of two tensors over that of the second."""
    return float((estimate - truth).norm() / truth.norm())


def _cosine(estimate: Tensor, truth: Tensor) -> float:
    return float((estimate * truth).sum() / estimate.norm()) / float(truth.norm())


def _figure(value: float) -> float:
    """Round to six digits, and to 0 what is rounding."""
    return 0.0 if abs(value) < ZERO else float(f"{value:.6g}")


def _call(problem: Problem, term: Term, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's summed term, and the gradient of all in each row's log-probabilities."""
    tree = problem.tree
    tables = (problem.policy, problem.reference, problem.behavior)
    logprobs, ref_logprobs, behavior = (tree.logprobs(table)[rows] for table in tables)
    logprobs.requires_grad_()
    terms = term(logprobs, ref_logprobs, behavior)
    return terms.detach().sum(1), torch.autograd.grad(terms.sum(), logprobs)[0]


def _visits(tree: Tree, logits: Tensor) -> Tensor:
    """Return how often each prefix is visited by a response `[P]`."""
    logprobs = tree.logprobs(logits)
    reached = torch.cat([torch.zeros(len(logprobs), 1, dtype=logprobs.dtype), logprobs.cumsum(1)[:, :-1]], dim=1)
    visits = torch.zeros(tree.prefixes, dtype=logprobs.dtype)
    # Each prefix is met once per continuation; every occurrence has the same probability, so it is set, not added.
    return visits.index_put((tree.states,), reached.exp())


def _score_squares(problem: Problem) -> Tensor:
    """Return the squared norm of each token's score, one-hot minus probabilities `[N, T]`."""
    probabilities = problem.policy.softmax(-1)[problem.tree.states]
    chosen = probabilities.gather(-1, problem.tree.sequences[..., None])[..., 0]
    return (probabilities**2).sum(-1) - 2 * chosen + 1


def _root(variance: Tensor, square: Tensor) -> float:
    """Return the root of a difference of squares, 0 where rounding is all that is left of it."""
    return float(variance.sqrt()) if variance > 1e-13 * square else 0.0
