"""What a loss's denominators make of a KL term when responses differ in length, exactly: `python -m tests.oracles.kl.ragged`.

Token 0 ends a response; what a full sequence of the tree has after it is masked. A response is drawn with another one, of the
same prompt, from a batch of B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.kl import kl_terms
from mismatch_ext.testing import Problem

SEEDS = range(4)
Weight = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Weight of a token, from the length of its response, that of the pair's other one, and the probability of each length."""
REWARDS = "k1 in the rewards, leave-one-out advantage"
CONFIGS = {
    "k1 reward sequence, leave_one_out": KlConfig(coef=1.0),
    "k1 reward sequence, none": KlConfig(coef=1.0, baseline="none"),
    "k1 reward token, none": KlConfig(coef=1.0, target="token", baseline="none"),
}


@dataclass(frozen=True, eq=False)
class Ragged:
    """A policy over responses of unequal lengths.

    Args:
        problem: Policies, on-policy.
    """

    problem: Problem

    @property
    def mask(self) -> Tensor:
        """True up to and including the first end token `[N, T]`."""
        ended = (self.problem.tree.sequences == 0).long().cumsum(1)
        return torch.cat([torch.ones(len(ended), 1, dtype=torch.bool), ended[:, :-1] == 0], dim=1)

    def truth(self, target: str) -> Tensor:
        """Return the gradient `[P, V]` of KL(pi||ref) of responses, or of tokens with the visits held fixed."""
        tree, policy = self.problem.tree, self.problem.policy.clone().requires_grad_()
        reference = self.problem.reference
        if target == "sequence":
            own = tree.logprobs(policy)
            value = own.sum(1).exp() @ ((own - tree.logprobs(reference)) * self.mask).sum(1)
        else:
            every = policy.log_softmax(-1)
            divergence = (every.exp() * (every - reference.log_softmax(-1))).sum(-1)[tree.states]
            value = self.problem.probabilities @ (divergence * self.mask).sum(1)
        return torch.autograd.grad(value, policy)[0]

    def gradient(self, config: KlConfig | None, weight: Weight) -> Tensor:
        """Return the expected gradient `[P, V]` of a term in the loss; without one, of a policy loss with reward -k1."""
        tree, mask, drawn = self.problem.tree, self.mask, self.problem.probabilities
        count = len(drawn)
        pairs = torch.stack([torch.arange(count).repeat_interleave(count), torch.arange(count).repeat(count)], 1)
        rows, policy = pairs.flatten(), self.problem.policy.clone().requires_grad_()
        own, reference = tree.logprobs(policy)[rows], tree.logprobs(self.problem.reference)[rows]
        if config is None:
            kl = ((own - reference).detach() * mask[rows]).sum(1).view(-1, 2)
            term = (kl - kl.flip(1)).view(-1, 1) * own * mask[rows]
        else:
            term = kl_terms(
                logprobs=own,
                ref_logprobs=reference,
                mask=mask[rows],
                settings=config,
                groups=torch.arange(len(rows)) // 2,
            ).loss
        lengths = mask.sum(1)
        spread = torch.zeros(tree.horizon + 1, dtype=torch.float64).index_add(0, lengths, drawn)
        weights = weight(lengths[rows], lengths[pairs.flip(1).flatten()], spread)
        weighted = drawn[pairs].prod(1).repeat_interleave(2) / 2 * weights
        return torch.autograd.grad((weighted[:, None] * term).sum(), policy)[0]


def token_mean(batch: int) -> Weight:
    """Return the expected weight of a token of a mean over all tokens of a batch."""

    def weight(own: Tensor, other: Tensor, spread: Tensor) -> Tensor:
        rest = torch.ones(1, dtype=torch.float64)  # probability of each number of tokens of the batch's other responses
        for _ in range(batch - 2):
            rest = torch.nn.functional.conv1d(rest[None, None], spread.flip(0)[None, None], padding=len(spread) - 1)[
                0, 0
            ]
        total = torch.arange(len(rest))[None] + torch.arange(2 * len(spread))[:, None]
        return batch * (rest / total.clamp(min=1)).sum(1)[own + other]

    return weight


AGGREGATIONS: dict[str, Weight] = {
    "sum of tokens, over a constant": lambda own, other, spread: torch.ones(len(own), dtype=torch.float64),
    "mean over tokens, B = 2": token_mean(2),
    "mean over tokens, B = 8": token_mean(8),
    "mean over tokens, B = 128": token_mean(128),
    "mean over tokens of a response, any B": lambda own, other, spread: 1 / own.double(),
}


def left(found: Tensor, truth: Tensor) -> float:
    """Return what no coefficient takes away: the least |c found - truth| / |truth|."""
    cosine = torch.nn.functional.cosine_similarity(found.flatten(), truth.flatten(), 0)
    return float((1 - cosine.square()).clamp(min=0).sqrt())


def table() -> dict[str, dict[str, float]]:
    """Return what is left for each aggregation and term, as the mean over the draws."""
    cases = [Ragged(Problem.random(3, 4, seed)) for seed in SEEDS]

    def mean(config: KlConfig | None, weight: Weight) -> float:
        target = "sequence" if config is None else config.target
        return sum(left(case.gradient(config, weight), case.truth(target)) for case in cases) / len(cases)

    terms: dict[str, KlConfig | None] = {**CONFIGS, REWARDS: None}
    return {
        name: {term: mean(config, weight) for term, config in terms.items()} for name, weight in AGGREGATIONS.items()
    }


def main() -> None:
    """Print the table of evidence/kl.md."""
    found = table()
    terms = list(next(iter(found.values())))
    print(f"| the loss takes | {' | '.join(terms)} |")
    print("|---" * (1 + len(terms)) + "|")
    for name, row in found.items():
        print(f"| {name} | {' | '.join('0' if value < 1e-6 else f'{value:.2g}' for value in row.values())} |")


if __name__ == "__main__":
    main()
