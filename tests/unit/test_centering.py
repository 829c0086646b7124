"""Score centering against enumeration of every answer of a small policy, in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mismatch_ext.centering import centering_terms, sampler_bias, weight_of
from mismatch_ext.errors import RecordError

VOCABULARY, LENGTH = 5, 3
Bounds = dict[str, float | None]
UNWEIGHTED: Bounds = {"upper": None, "lower": None}
TIS: Bounds = {"upper": 2.0, "lower": None}
ICEPOP: Bounds = {"upper": 2.0, "lower": 0.5}
WEIGHTS = {"none": UNWEIGHTED, "tis": TIS, "icepop": ICEPOP}


@dataclass
class Tree:
    """A policy and its sampler by the logits of every prefix `[P, V]`, with a reward for every answer."""

    policy: Tensor
    sampler: Tensor
    rewards: dict[tuple[int, ...], float]

    def __post_init__(self) -> None:
        prefixes = (
            prefix for length in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=length)
        )
        self.number = {prefix: number for number, prefix in enumerate(prefixes)}

    @classmethod
    def drawn(cls, seed: int, noise: float, bias: float = 0.0) -> Tree:
        generator = torch.Generator().manual_seed(seed)
        prefixes = sum(VOCABULARY**length for length in range(LENGTH))
        policy = torch.randn(prefixes, VOCABULARY, generator=generator, dtype=torch.float64)
        away = noise * torch.randn(prefixes, VOCABULARY, generator=generator, dtype=torch.float64)
        away += bias * torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64)
        rewards = {
            answer: float(torch.rand((), generator=generator))
            for answer in itertools.product(range(VOCABULARY), repeat=LENGTH)
        }
        return cls(policy, policy + away, rewards)

    def chance(self, logits: Tensor, answer: tuple[int, ...]) -> Tensor:
        """Return the log-probability of an answer."""
        logprobs = logits.log_softmax(-1)
        return sum((logprobs[self.number[answer[:at]], answer[at]] for at in range(LENGTH)), logits.new_zeros(()))

    def update(self, weight: Bounds, *, centered: bool, head: int = VOCABULARY, constant: bool = False) -> Tensor:
        """Return the expected gradient of the loss in the policy's logits, over all answers of the sampler."""
        logits = self.policy.clone().requires_grad_()
        logprobs, sampled = logits.log_softmax(-1), self.sampler.log_softmax(-1)
        weights = weight_of((logprobs - sampled).detach(), **weight)
        head_logprobs, head_ids = sampled.topk(head, dim=-1)
        everywhere = torch.ones(len(logits), dtype=torch.bool)
        terms = centering_terms(
            logits=logits, head_ids=head_ids, head_logprobs=head_logprobs, response_mask=everywhere, **weight
        )
        chances = {answer: self.chance(self.sampler, answer).exp() for answer in self.rewards}
        baseline = sum(chances[answer] * reward for answer, reward in self.rewards.items())
        loss = logits.new_zeros(())
        for answer, reward in self.rewards.items():
            advantage = 1.0 if constant else reward - baseline
            for at in range(LENGTH):
                place = self.number[answer[:at]]
                term = -weights[place, answer[at]] * logprobs[place, answer[at]]
                loss = loss + chances[answer] * advantage * (term + terms[place] * centered)
        loss.backward()
        assert logits.grad is not None
        return logits.grad

    def true_update(self) -> Tensor:
        """Return the gradient of the negative expected reward under the policy itself."""
        logits = self.policy.clone().requires_grad_()
        loss = -sum(self.chance(logits, answer).exp() * reward for answer, reward in self.rewards.items())
        loss.backward()  # type: ignore[union-attr]
        assert logits.grad is not None
        return logits.grad


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("noise", "bias"), [(0.3, 0.0), (0.1, 1.0)])
def test_an_advantage_that_says_nothing_moves_nothing(name: str, noise: float, bias: float) -> None:
    """The pull towards the sampler is 0 with centering, and is not without."""
    for seed in range(3):
        tree = Tree.drawn(seed, noise, bias)
        left = tree.update(WEIGHTS[name], centered=True, constant=True).norm()
        assert float(left) < 1e-9
    assert float(tree.update(UNWEIGHTED, centered=False, constant=True).norm()) > 1e-3


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_rest_of_the_update_is_the_covariance(name: str) -> None:
    """With a head of the whole vocabulary, the update is the sum of P(prefix) Cov_q(A, w grad log p), enumerated by hand."""
    tree, weight = Tree.drawn(0, 0.3, 0.5), WEIGHTS[name]
    logprobs, sampled = tree.policy.log_softmax(-1), tree.sampler.log_softmax(-1)
    weights = weight_of(logprobs - sampled, **weight)
    chances = {answer: float(tree.chance(tree.sampler, answer).exp()) for answer in tree.rewards}
    baseline = sum(chances[answer] * reward for answer, reward in tree.rewards.items())
    expected = torch.zeros_like(tree.policy)
    for prefix, place in tree.number.items():
        q, p = sampled[place].exp(), logprobs[place].exp()
        scores = torch.eye(VOCABULARY, dtype=torch.float64) - p  # of each token in the logits
        mean_score = (q * weights[place]) @ scores
        for answer, reward in tree.rewards.items():
            if answer[: len(prefix)] == prefix:
                token = answer[len(prefix)]
                away = weights[place, token] * scores[token] - mean_score
                expected[place] -= chances[answer] * (reward - baseline) * away
    torch.testing.assert_close(tree.update(weight, centered=True), expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_tail_that_is_the_policys_own_scaled_is_exact(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 50, generator=generator, dtype=torch.float64)
    p = logits.softmax(-1)
    head = p.topk(8, dim=-1).indices
    in_head = torch.zeros_like(p).scatter(1, head, 1.0).bool()
    # The sampler changes the head, and scales the tail.
    q = torch.where(in_head, p * torch.linspace(0.6, 1.3, 50, dtype=torch.float64), p)
    q_tail = 1 - torch.where(in_head, q, 0.0).sum(-1, keepdim=True)
    q = torch.where(in_head, q, p * q_tail / torch.where(in_head, 0.0, p).sum(-1, keepdim=True))
    mask = torch.ones(4, dtype=torch.bool)
    gradients = []
    for ids in (head, torch.arange(50).expand(4, 50)):
        leaf = logits.clone().requires_grad_()
        sampler = q.log().gather(1, ids)
        centering_terms(
            logits=leaf, head_ids=ids, head_logprobs=sampler, response_mask=mask, **WEIGHTS[name]
        ).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_bias_is_the_norm_of_the_terms_gradient(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3, 40, generator=generator, dtype=torch.float64)
    sampled = (logits + 0.4 * torch.randn(2, 3, 40, generator=generator, dtype=torch.float64)).log_softmax(-1)
    head_logprobs, head_ids = sampled.topk(16, dim=-1)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    given = {"head_ids": head_ids, "head_logprobs": head_logprobs, "response_mask": mask, **WEIGHTS[name]}
    leaf = logits.clone().requires_grad_()
    centering_terms(logits=leaf, **given).sum().backward()  # type: ignore[arg-type]
    assert leaf.grad is not None

    found = sampler_bias(logits=logits, **given)  # type: ignore[arg-type]
    torch.testing.assert_close(found, leaf.grad.norm(dim=-1), atol=1e-12, rtol=1e-9)
    assert float(found[~mask].abs().sum()) == 0


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_gradient_is_that_of_central_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    logits, away, direction = (torch.randn(6, 40, generator=generator, dtype=torch.float64) for _ in range(3))
    sampler, head = (logits + 0.4 * away).log_softmax(-1).topk(16, dim=-1)
    leaf = logits.clone().requires_grad_()
    mask = torch.ones(6, dtype=torch.bool)
    centering_terms(
        logits=leaf, head_ids=head, head_logprobs=sampler, response_mask=mask, **WEIGHTS[name]
    ).sum().backward()
    assert leaf.grad is not None

    # The coefficients by hand, which do not move with the logits.
    q, p = sampler.exp(), logits.softmax(-1).gather(-1, head)
    rho = (1 - q.sum(-1, keepdim=True)) / (1 - p.sum(-1, keepdim=True))
    coefficients = q * weight_of((p / q).log(), **WEIGHTS[name]) - rho * weight_of(-rho.log(), **WEIGHTS[name]) * p

    def value(at: float) -> Tensor:
        return (coefficients * (logits + at * direction).log_softmax(-1).gather(-1, head)).sum()

    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    torch.testing.assert_close((leaf.grad * direction).sum(), slope, atol=0.0, rtol=1e-6)


def test_a_head_with_fewer_tokens_is_filled_up() -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sampled = (logits * 0.8).log_softmax(-1)
    head_logprobs, head_ids = sampled.topk(4, dim=-1)
    filled_ids = torch.cat([head_ids, torch.zeros(1, 3, dtype=torch.int64)], dim=1)
    filled = torch.cat([head_logprobs, torch.full((1, 3), -torch.inf, dtype=torch.float64)], dim=1)
    mask = torch.ones(1, dtype=torch.bool)
    results = []
    for ids, values in ((head_ids, head_logprobs), (filled_ids, filled)):
        leaf = logits.clone().requires_grad_()
        centering_terms(logits=leaf, head_ids=ids, head_logprobs=values, response_mask=mask).sum().backward()
        bias = sampler_bias(logits=logits, head_ids=ids, head_logprobs=values, response_mask=mask)
        results.append((leaf.grad, bias))
    torch.testing.assert_close(results[0], results[1])


def test_wrong_heads_are_refused() -> None:
    logits, mask = torch.zeros(2, 3, 10), torch.ones(2, 3, dtype=torch.bool)
    ids = torch.zeros(2, 3, 4, dtype=torch.int64)
    with pytest.raises(RecordError, match="more probability than 1"):
        centering_terms(logits=logits, head_ids=ids, head_logprobs=torch.zeros(2, 3, 4), response_mask=mask)
    with pytest.raises(RecordError, match="head_ids is for places"):
        centering_terms(logits=logits, head_ids=ids[:1], head_logprobs=torch.zeros(1, 3, 4), response_mask=mask)
