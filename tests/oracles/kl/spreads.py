"""Which of the unbiased configurations has the least spread beside a reward: `python -m tests.oracles.kl.spreads`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.testing import Problem, Term, Tree, exact
from tests.oracles.kl.conformance import paired_term

SEEDS, BATCH, LAG = range(4), 8, 0.3
BETAS, WAYS = (0.3, 0.1), (0.1, 0.5, 1.0, 1.5)
CANDIDATES = [
    KlConfig(estimator=estimator, placement=placement, baseline=baseline)  # type: ignore[arg-type]
    for (estimator, placement), baseline in product(
        (("k1", "reward"), ("k1", "both"), ("k3", "both")), ("none", "leave_one_out")
    )
]
Column = tuple[str, list[float]]
"""A policy in words, and the spread of each candidate."""


def pair_spread(problem: Problem, term: Term) -> float:
    """Return the spread of a batch's gradient with a leave-one-out baseline, times the root of the batch's size.

    The mean gradient of a batch is the mean over its pairs of responses, a U-statistic, whose variance follows from that of a
    pair and of its mean given one response (Hoeffding 1948). Rows 2k and 2k + 1 of the term are a pair.
    """
    tree, count = problem.tree, len(problem.probabilities)
    first, second = torch.arange(count).repeat_interleave(count), torch.arange(count).repeat(count)
    rows = torch.stack([first, second], dim=1).flatten()
    logprobs = tree.logprobs(problem.policy)[rows].requires_grad_()
    terms = term(logprobs, tree.logprobs(problem.reference)[rows], tree.logprobs(problem.behavior)[rows])
    per_row = torch.autograd.grad(terms.sum(), logprobs)[0].view(count, count, 2, -1)
    onehot = torch.nn.functional.one_hot(tree.sequences, tree.vocab).double()
    scores = torch.zeros(*tree.states.shape, tree.prefixes, tree.vocab, dtype=torch.float64)
    at = torch.arange(count)[:, None], torch.arange(tree.states.shape[1])[None], tree.states
    scores[at] = onehot - problem.policy.softmax(-1)[tree.states]
    sides = zip(("ijt,itp->ijp", "ijt,jtp->ijp"), per_row.unbind(2), strict=True)
    pair = torch.stack([torch.einsum(which, side, scores.flatten(2)) for which, side in sides]).mean(0)
    weights = problem.probabilities
    given_one = torch.einsum("j,ijp->ip", weights, pair)
    gradient = weights @ given_one
    of_pair = weights @ (pair**2).sum(-1) @ weights - gradient @ gradient
    of_one = weights @ (given_one**2).sum(1) - gradient @ gradient
    return math.sqrt(float(2 / (BATCH - 1) * (2 * (BATCH - 2) * of_one + of_pair)))


def beside(target: str) -> Iterator[Column]:
    """Yield the spreads of reward and KL term together, over that of the reward's, by policy on the way to the optimum."""
    for beta, way, lag in [(b, x, 0.0) for b in BETAS for x in WAYS] + [(b, 1.0, LAG) for b in BETAS]:
        drawn = [tilted(seed, beta / way, lag) for seed in SEEDS]
        size = mean(float(exact(problem, "KL(pi||ref)", "sequence")[0]) for problem, _ in drawn)
        least = [pair_spread(problem, reward_term(rewards)) for problem, rewards in drawn]
        spreads = [
            mean(
                pair_spread(problem, sum_term(config, beta, rewards)) / own
                for (problem, rewards), own in zip(drawn, least, strict=True)
            )
            for config in candidates(target, lag)
        ]
        yield f"{'off-policy, ' if lag else ''}beta {beta:g}, x {way:g}, KL {size:.3g}", spreads


def tilted(seed: int, beta: float, lag: float) -> tuple[Problem, Tensor]:
    """Return a problem whose policy is the optimum of E[R] - beta KL, pi ~ ref exp(R / beta), and the rewards `[N]`."""
    vocab, horizon = 2, 5
    tree = Tree(vocab, horizon)
    reference = tree.random_logits(3 * seed, 1.0)
    rewards = Tree(vocab**horizon, 1).random_logits(3 * seed + 1, 0.3)[0]
    mass = (tree.logprobs(reference).sum(1) + rewards / beta).view([vocab] * horizon)
    # The logit of a token is the log of the mass of all responses that go on from it.
    levels = [mass.flatten(t + 1).logsumexp(-1) if t + 1 < horizon else mass for t in range(horizon)]
    policy = torch.cat([level.reshape(-1, vocab) for level in levels])
    behavior = tree.random_logits(3 * seed + 2, lag, around=policy) if lag else policy
    return Problem(tree, policy, reference, behavior), rewards


def reward_term(rewards: Tensor) -> Term:
    """Return a policy gradient on all pairs of responses, leave-one-out, weighted by the ratio pi/mu."""
    count = len(rewards)
    own = torch.stack([rewards.repeat_interleave(count), rewards.repeat(count)], dim=1)

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        weight = (logprobs.detach() - behavior_logprobs).cumsum(1).exp()
        weighted = own * weight[:, -1].view(-1, 2)
        advantages = weighted.flatten()[:, None] - weight * weighted.flip(1).flatten()[:, None]
        return -advantages * logprobs

    return term


def sum_term(config: KlConfig, beta: float, rewards: Tensor) -> Term:
    """Return a policy gradient plus beta times the KL term, on pairs of responses."""
    reward, kl = reward_term(rewards), paired_term(config)
    return lambda *logprobs: reward(*logprobs) + beta * kl(*logprobs)


def candidates(target: Any, lag: float) -> list[KlConfig]:
    """Return the configurations for a target, with the ratio of whole responses off-policy."""
    ratio: Any = "sequence" if lag else "none"
    return [replace(config, target=target, ratio=ratio) for config in CANDIDATES]


def table(target: str, columns: list[Column]) -> str:
    """Return a table of evidence/kl.md: a row for each candidate, the least of each column in bold."""
    figures = [
        [f"**{value:.3g}**" if value <= min(values) * (1 + 1e-9) else f"{value:.3g}" for value in values]
        for _, values in columns
    ]
    lines = [
        f"| target `{target}`: estimator placement, baseline | {' | '.join(name for name, _ in columns)} |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for number, config in enumerate(CANDIDATES):
        lines.append(
            f"| {config.estimator} {config.placement}, {config.baseline} | {' | '.join(column[number] for column in figures)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the tables of evidence/kl.md."""
    for target in ("sequence", "token"):
        print(table(target, list(beside(target))), end="\n\n")


if __name__ == "__main__":
    main()
