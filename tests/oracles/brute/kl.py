"""KL terms token by token, from the formulas of docs/kl.md, with autograd for every derivative.

A sequence is a list of (row, column) of its action tokens in order. Log-probabilities are float64 `[B, T]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Sequence = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The settings of a term, in the words of the `kl` section."""

    estimator: str
    placement: str
    target: str
    ratio: str
    baseline: str
    coef: float


def sequences_of(mask: Tensor) -> list[Sequence]:
    """Return the action tokens of each row."""
    return [[(row, t) for t in range(mask.shape[1]) if mask[row, t]] for row in range(len(mask))]


def ratios(sequence: Sequence, logprobs: Tensor, behavior: Tensor, ratio: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each token the ratio of its prefix, and the ratio that includes the token itself."""
    before, through, product = [], [], torch.ones((), dtype=torch.float64)
    for place in sequence:
        rho = (logprobs.detach()[place] - behavior[place]).exp() if ratio != "none" else torch.ones_like(product)
        before.append(product if ratio == "sequence" else torch.ones_like(product))
        product = product * rho
        through.append(product if ratio == "sequence" else rho)
    return before, through


def loss_terms(
    asked: Asked,
    logprobs: Tensor,
    kl: Tensor,
    behavior: Tensor,
    mask: Tensor,
    groups: list[int],
) -> Tensor:
    """Return the loss term of each token `[B, T]`.

    `kl` is the estimate of each token, or for estimator "full" its exact divergence; both with a gradient.
    """
    sequences, full = sequences_of(mask), asked.estimator == "full"
    later: list[list[Tensor]] = []
    weights: list[tuple[list[Tensor], list[Tensor]]] = []
    for sequence in sequences:
        before, through = ratios(sequence, logprobs, behavior, asked.ratio)
        weights.append((before, through))
        factors = before if full else through if asked.ratio == "sequence" else [torch.ones_like(f) for f in through]
        weighed = [(factor * kl[place]).detach() for factor, place in zip(factors, sequence, strict=True)]
        zero = torch.zeros((), dtype=torch.float64)
        if full:
            later.append([sum(weighed[i + 1 :], zero) for i in range(len(weighed))])
        else:
            later.append([sum(weighed[i:], zero) if asked.target == "sequence" else x for i, x in enumerate(weighed)])
    terms = {}
    for number, sequence in enumerate(sequences):
        before, through = weights[number]
        for i, place in enumerate(sequence):
            value = (before[i] if full else through[i]) * kl[place]
            if asked.placement == "reward":
                value = value.detach()
            terms[place] = asked.coef * value
            if asked.placement == "loss" or (full and asked.target == "token"):
                continue
            credit = later[number][i] * (through[i] if asked.ratio == "token" else 1.0)
            others = [
                later[other][i]
                for other in range(len(sequences))
                if other != number and groups[other] == groups[number] and len(later[other]) > i
            ]
            if asked.baseline == "leave_one_out" and others:
                credit = credit - through[i] * sum(others) / len(others)
            terms[place] = terms[place] + asked.coef * credit * (logprobs[place] - logprobs.detach()[place])
    return laid_out(terms, mask)


def reward_terms(asked: Asked, kl: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the reward `[B, T]` of a term whose score-function part is among the rewards."""
    places = [place for sequence in sequences_of(mask) for place in sequence]
    loss = {place: asked.coef * kl[place] * (asked.placement == "both") for place in places}
    return laid_out(loss, mask), laid_out({place: asked.coef * kl[place].detach() for place in places}, mask)


def divergence(logits: Tensor, reference: Tensor, temperature: float) -> Tensor:
    """Return sum_v pi_v (log pi_v - log pi_ref,v) of float64 logits `[..., V]`; an id without probability adds nothing."""
    p, q = (logits / temperature).log_softmax(-1), (reference / temperature).log_softmax(-1)
    possible = ~torch.isinf(p)
    each = p.exp() * (torch.where(possible, p, 0.0) - torch.where(possible, q, 0.0))
    return torch.where(possible, each, 0.0).sum(-1)


def laid_out(terms: dict[tuple[int, int], Tensor], mask: Tensor) -> Tensor:
    """Return the terms at their places, and 0 elsewhere."""
    zero = torch.zeros((), dtype=torch.float64)
    return torch.stack(
        [torch.stack([terms.get((row, t), zero) for t in range(mask.shape[1])]) for row in range(len(mask))]
    )
