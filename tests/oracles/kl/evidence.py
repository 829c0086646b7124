"""Which of the unbiased configurations has the least spread: alone, and beside the reward that it holds in check."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.kl import kl_terms
from mismatch_ext.testing import Problem, Term, Tree, exact, moments, pair_moments

Target = Literal["token", "sequence"]
SEEDS = range(4)
BATCH = 8
DISTANCES = (0.03, 0.3, 1.0, 2.0)
LAG = 0.3
BETAS = (0.3, 0.1)
WAYS = (0.1, 0.5, 1.0, 1.5)

CANDIDATES: tuple[tuple[Literal["k1", "k3"], Literal["reward", "both"], Literal["none", "leave_one_out"]], ...] = (
    ("k1", "reward", "none"),
    ("k1", "reward", "leave_one_out"),
    ("k1", "both", "none"),
    ("k1", "both", "leave_one_out"),
    ("k3", "both", "none"),
    ("k3", "both", "leave_one_out"),
)


@cache
def spreads_alone(target: Target) -> dict[str, list[float]]:
    """Return a column of spreads, one per candidate, for each distance from the reference."""
    columns = {}
    for lag in (0.0, LAG):
        for distance in DISTANCES if lag == 0 else DISTANCES[1::2]:
            problems = [Problem.random(2, 5, seed, distance=distance, lag=lag) for seed in SEEDS]
            name = f"{'off' if lag else 'on'}-policy, distance {distance:g}"
            columns[name] = [_mean([_spread(problem, c) for problem in problems]) for c in _configs(target, lag)]
    return columns


@cache
def spreads_beside(target: Target) -> dict[str, list[float]]:
    """Return a column of spreads, one per candidate, for each policy on the way from the reference to beyond."""
    settings = [(beta, way, 0.0) for beta in BETAS for way in WAYS] + [(beta, 1.0, LAG) for beta in BETAS]
    columns = {}
    for beta, way, lag in settings:
        drawn = [tilted(seed, beta / way, lag=lag) for seed in SEEDS]
        alone = [pair_moments(problem, reward_term(rewards), BATCH).std for problem, rewards in drawn]
        columns[f"{'off-policy, ' if lag else ''}beta {beta:g}, x {way:g}"] = [
            _mean(
                [
                    pair_moments(problem, sum_term(config, beta, rewards), BATCH).std / least
                    for (problem, rewards), least in zip(drawn, alone, strict=True)
                ]
            )
            for config in _configs(target, lag)
        ]
    return columns


def tilted(seed: int, beta: float, *, vocab: int = 2, horizon: int = 5, lag: float = 0.0) -> tuple[Problem, Tensor]:
    """Return a problem whose policy is the optimum of E[R] - beta KL, pi ~ ref exp(R / beta), and the rewards `[N]`."""
    tree = Tree(vocab, horizon)
    reference = tree.random_logits(3 * seed, 1.0)
    rewards = Tree(vocab**horizon, 1).random_logits(3 * seed + 1, 0.3)[0]
    mass = (tree.logprobs(reference).sum(1) + rewards / beta).view([vocab] * horizon)
    # The logit of a token is the log of the mass of all responses that go on from it.
    levels = [mass.flatten(t + 1).logsumexp(-1) if t + 1 < horizon else mass for t in range(horizon)]
    policy = torch.cat([level.reshape(-1, vocab) for level in levels])
    behavior = tree.random_logits(3 * seed + 2, lag, around=policy) if lag else policy
    return Problem(tree, policy, reference, behavior), rewards


def paired_term(config: KlConfig) -> Term:
    """Return `kl_terms` with coefficient 1 on pairs of responses: rows 2k and 2k + 1 are a group."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.bool)
        groups = torch.arange(len(logprobs)) // 2
        return kl_terms(logprobs, ref_logprobs, mask, config, behavior=behavior_logprobs, coef=1.0, groups=groups).loss

    return term


def reward_term(rewards: Tensor) -> Term:
    """Return a host's policy gradient on all pairs of responses, leave-one-out, weighted by the ratio pi/mu."""
    count = len(rewards)
    own = torch.stack([rewards.repeat_interleave(count), rewards.repeat(count)], dim=1)

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        weight = (logprobs.detach() - behavior_logprobs).cumsum(1).exp()
        weighted = own * weight[:, -1].view(-1, 2)
        advantages = weighted.flatten()[:, None] - weight * weighted.flip(1).flatten()[:, None]
        return -advantages * logprobs

    return term


def sum_term(config: KlConfig, beta: float, rewards: Tensor) -> Term:
    """Return a host's policy gradient plus beta times the surrogate, on pairs of responses."""
    host, kl = reward_term(rewards), paired_term(config)

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        tensors = (logprobs, ref_logprobs, behavior_logprobs)
        return host(*tensors) + beta * kl(*tensors)

    return term


def _configs(target: Target, lag: float) -> list[KlConfig]:
    ratio: Literal["none", "sequence"] = "sequence" if lag else "none"
    return [
        KlConfig(estimator=estimator, placement=placement, target=target, ratio=ratio, baseline=baseline)
        for estimator, placement, baseline in CANDIDATES
    ]


def _spread(problem: Problem, config: KlConfig) -> float:
    """Return the spread of one response's gradient over the norm of the true one."""
    size = float(exact(problem, "KL(pi||ref)", config.target)[1].norm())
    if config.baseline == "leave_one_out":
        return pair_moments(problem, paired_term(config), BATCH).std / size
    # A pair without a baseline has the mean of two independent rows, so the cheaper form is the same.
    return moments(problem, paired_term(config)).std / size


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
