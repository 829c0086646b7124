"""Bias, pull and variance of each correction's policy gradient, by enumerating every answer of a small policy in float64.

    python -m benchmarks bias

A policy and a sampler over 4 tokens, answers of 3, five drawn pairs. The policy's gradient of the expected reward is exact, and
so is what a correction makes of it, with advantages against the mean reward, in one step on fresh answers:

    bias      |expected update - gradient| / |gradient|
    pull      size of the expected update if every advantage is 1, which says nothing about the answers (score centering: 0)
    variance  of the update from one answer, divided by that of the policy's own gradient without a gap
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.centering import centering_terms
from mismatch_ext.correction import correct
from mismatch_ext.presets import PRESETS, ResolvedCorrection

VOCABULARY, LENGTH, SEEDS = 4, 3, 5
CLIP = 0.2
GAPS = {"rounding": 0.02, "large": 0.3}
"""Deviation of the noise on the sampler's logits."""
CENTERED = {"score centering": "disabled", "score centering + tis": "tis", "score centering + icepop": "icepop"}
"""Score centering, with the preset whose weights stand beside it."""


@dataclass(frozen=True)
class Case:
    """A policy and a sampler by their logits of every prefix `[P, V]`, and a reward for each answer `[N]`."""

    policy: Tensor
    sampler: Tensor
    rewards: Tensor
    answers: Tensor  # token ids `[N, T]`
    places: Tensor  # number of the prefix of each token `[N, T]`

    @classmethod
    def drawn(cls, seed: int, noise: float) -> Case:
        """Draw one, the same for every machine."""
        generator = torch.Generator().manual_seed(seed)
        prefixes = [
            prefix for length in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=length)
        ]
        number = {prefix: at for at, prefix in enumerate(prefixes)}
        answers = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
        policy = torch.randn(len(prefixes), VOCABULARY, generator=generator, dtype=torch.float64)
        away = noise * torch.randn(policy.shape, generator=generator, dtype=torch.float64)
        rewards = torch.randint(0, 2, (len(answers),), generator=generator).double()
        places = [[number[answer[:at]] for at in range(LENGTH)] for answer in answers]
        return cls(policy, policy + away, rewards, torch.tensor(answers), torch.tensor(places))

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return the log-probability of each answer's tokens `[N, T]`."""
        return logits.log_softmax(-1)[self.places, self.answers]

    @property
    def chances(self) -> Tensor:
        """The sampler's probability of each answer `[N]`."""
        return self.logprobs(self.sampler).sum(1).exp()

    def updates(self, weights: Tensor, centered: ResolvedCorrection | None, advantages: Tensor) -> Tensor:
        """Return each answer's update, the negative gradient of its loss in the policy's logits `[N, P * V]`."""
        chosen = torch.nn.functional.one_hot(self.answers, VOCABULARY).double()
        scores = chosen - self.policy.softmax(-1)[self.places]  # grad of log p in the logits of the prefix [N, T, V]
        scores = scores * weights[:, :, None]
        if centered is not None:
            scores = scores - self._centering(centered)[self.places]
        scores = scores * advantages[:, None, None]
        updates = torch.zeros(len(self.answers), len(self.policy), VOCABULARY, dtype=torch.float64)
        for at in range(LENGTH):
            updates[torch.arange(len(updates)), self.places[:, at]] += scores[:, at]
        return updates.flatten(1)

    def _centering(self, beside: ResolvedCorrection) -> Tensor:
        """Return the gradient of the centering term of each prefix `[P, V]`."""
        logits = self.policy.clone().requires_grad_()
        everywhere = torch.ones(len(logits), dtype=torch.bool)
        head_logprobs, head_ids = self.sampler.log_softmax(-1).topk(VOCABULARY, dim=-1)
        terms = centering_terms(
            logits=logits,
            head_ids=head_ids,
            head_logprobs=head_logprobs,
            response_mask=everywhere,
            **beside.bounds_of_tokens,
        )
        terms.sum().backward()
        assert logits.grad is not None
        return logits.grad

    def gradient(self) -> tuple[Tensor, float]:
        """Return the gradient of the policy's own expected reward `[P * V]`, and the variance of its update from one answer."""
        own = replace(self, sampler=self.policy)
        advantages = self.rewards - own.chances @ self.rewards
        updates = own.updates(torch.ones(self.answers.shape, dtype=torch.float64), None, advantages)
        mean = own.chances @ updates
        return mean, float(own.chances @ (updates - mean).square().sum(1))


def weights_of(settings: ResolvedCorrection, case: Case, advantages: Tensor) -> Tensor:
    """Return the factor of each token's score in a step on fresh answers `[N, T]`."""
    policy, sampler = case.logprobs(case.policy), case.logprobs(case.sampler)
    found = correct(
        old_logprobs=policy,
        rollout_logprobs=sampler,
        response_mask=torch.ones(case.answers.shape),
        config=replace(settings, normalize=False),
        advantages=advantages,
    )
    weights = found.as_multiplier().double()
    if settings.normalize:
        # The mean over many sampled tokens, which here is an expectation.
        weights = weights / (case.chances @ weights.mean(1))
    if settings.mode == "bypass" and settings.loss == "ppo_clip":
        ratio = (policy - sampler).exp()
        stopped = torch.where(advantages[:, None] > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
        weights = weights * ratio.masked_fill(stopped, 0.0)
    return weights


def figures(name: str, case: Case) -> tuple[float, float, float]:
    """Return bias, pull and variance of a preset or of score centering."""
    advantages = case.rewards - case.chances @ case.rewards
    constant = torch.ones(len(case.answers), dtype=torch.float64)
    centered = PRESETS[CENTERED[name]] if name in CENTERED else None
    settings = PRESETS[CENTERED.get(name, name)]
    updates = case.updates(weights_of(settings, case, advantages), centered, advantages)
    expected = case.chances @ updates
    pull = case.chances @ case.updates(weights_of(settings, case, constant), centered, constant)
    true, spread = case.gradient()
    variance = float(case.chances @ (updates - expected).square().sum(1))
    return float((expected - true).norm() / true.norm()), float(pull.norm()), variance / spread


def run() -> list[dict[str, Any]]:
    """Return a row for each preset, and for score centering alone and with token weights."""
    rows: list[dict[str, Any]] = []
    for name in (*PRESETS, *CENTERED):
        row: dict[str, Any] = {"name": name}
        for label, noise in GAPS.items():
            found = torch.tensor([figures(name, Case.drawn(seed, noise)) for seed in range(SEEDS)], dtype=torch.float64)
            bias, pull, variance = found.mean(0).tolist()
            row |= {f"{label} bias": bias, f"{label} pull": pull, f"{label} variance": variance}
        rows.append(row)
    return rows
