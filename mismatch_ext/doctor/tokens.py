"""Whether the tokens themselves were drawn from the oracle's distribution: what no reported log-probability can hide."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from mismatch_ext.doctor.sample import Sample
from mismatch_ext.doctor.table import LogitTable

NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
COUNTS = (1, 2, 3, 5, 8, 10, 20, 50)
FLOORS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2)
# Mass by which a token must lie outside of a nucleus: engine and oracle round differently.
MARGIN = 0.003
# Part of a probability by which two tokens must differ to be told apart: bfloat16 rounds logits between 8 and 16 to 1/16.
TIE = 0.03
# Of the tokens that are expected outside, those that near-ties may put there; one in any case.
FEW = 0.02
# Natural log of the chance that a sound sample has so few of them.
IMPLAUSIBLE = -16.0
SURE = 5.0


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Tokens beyond a truncation that nobody is known to have asked for.

    Args:
        setting: top_p, top_k or min_p.
        value: Of the setting.
        expected: Tokens that a sample without it has beyond it.
        seen: Tokens of this sample beyond it.
    """

    setting: str
    value: float
    expected: float
    seen: int

    @property
    def cut(self) -> bool:
        """Whether the sample lacks what is beyond."""
        # Poisson: log P(at most `seen`) is at most this, by Chernoff.
        k, m = max(self.seen, 1e-9), self.expected
        chance = 0.0 if k >= m else k - m + k * math.log(m / k)
        return self.seen <= max(1.0, FEW * self.expected) and chance < IMPLAUSIBLE


@dataclass(frozen=True, kw_only=True)
class TokensTest:
    r"""A score test of the temperature, and counts beyond truncations.

    Args:
        z: :math:`\sum (\log p + H) / \sqrt{\sum Var}` over the tokens; about normal for a sound sample, positive
            for a lower temperature.
        temperature: What the tokens were drawn at, over the trainer's temperature; one Newton step from 1. None where that
            leads nowhere: then they were drawn from another distribution.
        outside: Counts at a few truncations.
    """

    z: float
    temperature: float | None
    outside: tuple[Outside, ...]

    @property
    def truncated(self) -> Outside | None:
        """Of the truncations that the sample obeys, the one beyond which most tokens are expected."""
        return max((found for found in self.outside if found.cut), key=lambda found: found.expected, default=None)

    @property
    def finding(self) -> tuple[str, float, str] | None:
        """Key of the cause, its parameter and a sentence; None for a sound sample."""
        cut = self.truncated
        if cut is not None:
            said = (
                f"the tokens were drawn without the tail, such as by {cut.setting} {cut.value:g}: {cut.expected:.0f} are "
                f"expected beyond, {cut.seen} were sampled"
            )
            return cut.setting, cut.value, said
        if abs(self.z) >= SURE and self.temperature is not None:
            return (
                "temperature",
                self.temperature,
                f"the tokens were drawn at {self.temperature:.3g} times the temperature",
            )
        return None


def judge_tokens(table: LogitTable) -> TokensTest:
    """Hold a sample against the distributions that the oracle says it was drawn from."""
    total, spread = float((table.logprob + table.entropy).sum()), float(table.variance.sum())
    mass = table.best.cumsum(-1)
    probability = np.exp(table.logprob)
    found = [
        Outside(
            setting="top_p",
            value=p,
            expected=float(_outside(table, mass, p).sum()),
            seen=int((table.better >= p + MARGIN).sum()),
        )
        for p in NUCLEI
    ]
    found += [_beyond(table, mass, probability, k) for k in COUNTS if k < table.best.shape[1]]
    found += [_below(table, probability, p) for p in FLOORS]
    return TokensTest(
        z=total / math.sqrt(spread) if spread else 0.0,
        temperature=1 / (1 + total / spread) if spread and total > -spread / 2 else None,
        outside=tuple(found),
    )


def _outside(table: LogitTable, mass: np.ndarray, p: float) -> np.ndarray:
    """Return the mass beyond a nucleus `[N]`; a nucleus that is larger than what is kept of the distribution has none."""
    beyond = (1 - np.where(mass - table.best < p, table.best, 0.0).sum(-1)).clip(0)
    return np.where(mass[:, -1] < p, 0.0, beyond)


def _beyond(table: LogitTable, mass: np.ndarray, probability: np.ndarray, k: int) -> Outside:
    seen = int((probability < table.best[:, k - 1] * (1 - TIE)).sum())
    return Outside(setting="top_k", value=float(k), expected=float((1 - mass[:, k - 1]).clip(0).sum()), seen=seen)


def _below(table: LogitTable, probability: np.ndarray, p: float) -> Outside:
    least = table.best[:, :1] * p
    seen = int((probability < least[:, 0] * (1 - MARGIN)).sum())
    # What is not among the best tokens that are kept is below, too.
    expected = float(
        (1 - np.where(table.best >= least, table.best, 0.0).sum(-1)).clip(0)[table.best[:, -1] < least[:, 0]].sum()
    )
    return Outside(setting="min_p", value=p, expected=expected, seen=seen)


def judge_ends(sample: Sample, end_tokens: Collection[int]) -> tuple[str, ...]:
    """Return sentences on responses that do not end as the trainer's checkpoint says: log-probabilities do not show it.

    Args:
        sample: The responses.
        end_tokens: Ids that end one; with none, nothing is said.
    """
    if not end_tokens:
        return ()
    ends, found = set(end_tokens), []
    # What a tool says after an end is another turn.
    on = sum(
        any(token in ends and mask[at + 1] for at, token in enumerate(response[:-1]))
        for response, mask in zip(sample.responses, sample.masks, strict=True)
    )
    if on:
        found.append(f"{on} responses go on after an end: ignore_eos, or other end tokens in the engine")
    longest = max(map(len, sample.responses))
    last = [response[-1] for response in sample.responses if response and len(response) < longest]
    others = [token for token in last if token not in ends]
    if others:
        found.append(
            f"{len(others)} responses are shorter than the longest and do not end by {sorted(ends)}, but most often by "
            f"{max(set(others), key=others.count)}: stop strings, or other end tokens in the engine"
        )
    return tuple(found)


def said(test: TokensTest, named: Sequence[str]) -> str:
    """Return the line of a report on the tokens.

    Args:
        test: What was found.
        named: Keys of causes that are named already.
    """
    if named:
        return f"tokens: held against the trainer's distribution alone, without the causes above (z {test.z:.1f})"
    if test.finding is not None:
        return f"tokens: {test.finding[2]} (z {test.z:.1f})"
    if abs(test.z) >= SURE:
        return f"tokens: not drawn from the trainer's distribution (z {test.z:.1f})"
    return f"tokens: drawn from the trainer's own distribution, as far as they tell (z {test.z:.1f})"
