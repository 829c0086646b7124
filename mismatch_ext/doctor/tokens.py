"""Tests whether the tokens themselves were drawn from the oracle's distribution, whatever log-probabilities were reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mismatch_ext.doctor.logits import LogitTable
from mismatch_ext.doctor.sample import Sample

NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)
COUNTS = (1, 2, 3, 5, 8, 10, 20, 50)
FLOORS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2)
# A token counts as outside a nucleus only by at least this mass, because engine and oracle round differently.
MARGIN = 0.003
# Two tokens' probabilities count as different from this relative difference on: bfloat16 rounds logits from 8 to 16 to 1/16.
TIE = 0.03
# Near-ties may put this share of the expected number of tokens outside a truncation, and one token in any case.
FEW = 0.02
# A sample is cut if the log of the chance that a sound sample has so few tokens outside is below this.
IMPLAUSIBLE = -16.0
SURE = 5.0
# From this z-score on, which one sound sample in 370 has, the tokens are no evidence that they come from the trainer.
DOUBTFUL = 3.0
# Number of bisection steps between two listed values, in the search for the tightest truncation that a sample obeys.
STEPS = 7
# A mask that starts late skips so many tokens at most; more are left out on purpose, such as those of older weights.
LATE = 3
# Share of responses that are cut at the longest length, from which on it is told: rldoctor warns from here on.
CUT = 0.05
# Two truncations, or two temperatures, are told apart if their log-likelihoods of the tokens differ by this many nats.
TOLD = 5.0


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The number of sampled tokens outside a truncation (top_p, top_k or min_p) that the known settings do not contain."""

    setting: str
    value: float
    expected: float  # tokens outside, of a sample without this truncation
    seen: int
    gain: float = 0.0  # log-likelihood of the truncated over the whole distribution, in nats

    @property
    def obeyed(self) -> bool:
        """Whether almost no token of the sample is outside, possibly only by chance."""
        return self.seen <= max(1.0, FEW * self.expected)

    @property
    def cut(self) -> bool:
        """Whether almost no token is outside although many would be expected, so that chance cannot explain it."""
        # Poisson: log P(at most `seen`) is at most this, by Chernoff.
        k, m = max(self.seen, 1e-9), self.expected
        chance = 0.0 if k >= m else k - m + k * math.log(m / k)
        return self.obeyed and chance < IMPLAUSIBLE


@dataclass(frozen=True, kw_only=True)
class TokensTest:
    """A score test of the temperature, and counts beyond truncations."""

    z: float  # sum of (log p + H) over the root of the summed variances: about normal if sound, positive for a lower temperature
    # Of the draws over the trainer's, by one Newton step from 1; None if that step gives none: another distribution.
    temperature: float | None
    outside: tuple[Outside, ...]  # counts at a few truncations
    spread: float = 0.0  # the root: z would move by this much if the inverse temperature doubled

    def drawn_at(self, ratio: float) -> bool | None:
        """Whether the tokens were drawn at `ratio` times the trainer's temperature; None if z cannot tell, or tells neither."""
        expected = (1 / ratio - 1) * self.spread
        # A cut tail moves z as a lower temperature does. `expected` is a first order, off by a part of itself.
        off = min(abs(self.z), abs(self.z - expected))
        if self.truncated is not None or off > max(SURE, abs(expected) / 2):
            return None
        # The log-likelihood of a normal z around `expected`, over that of one around 0.
        likelier = expected * (self.z - expected / 2)
        return None if abs(likelier) < TOLD else likelier > 0

    @property
    def truncated(self) -> Outside | None:
        """The likeliest of the truncations that cut the sample (`Outside.cut`); None if none did."""
        return max((counts for counts in self.outside if counts.cut), key=lambda counts: counts.gain, default=None)

    @property
    def alike(self) -> tuple[str, ...]:
        """Other settings that explain the sample as well as the best truncation does."""
        best = self.truncated
        if best is None:
            return ()
        near = {counts.setting for counts in self.outside if counts.obeyed and counts.gain > best.gain - TOLD}
        return tuple(sorted(near - {best.setting}))

    @property
    def finding(self) -> tuple[str, float, str] | None:
        """Key of the cause, its parameter and a sentence; None if nothing was found."""
        cut = self.truncated
        if cut is not None:
            or_by = f", or by {' or '.join(self.alike)}" if self.alike else ""
            sentence = (
                f"the tokens were drawn without the tail, such as by {cut.setting} {cut.value:.3g}{or_by}: {cut.expected:.0f} "
                f"are expected beyond, {cut.seen} were sampled"
            )
            return cut.setting, cut.value, sentence
        heat = self.temperature
        if abs(self.z) < SURE or heat is None:
            return None
        return "temperature", heat, f"the tokens were drawn at {heat:.3g} times the temperature"


def judge_tokens(table: LogitTable) -> TokensTest:
    """Test a sample against the oracle's distributions."""
    total, spread = float((table.logprob + table.entropy).sum()), float(table.variance.sum())
    mass, probability = table.best.cumsum(-1), np.exp(table.logprob)
    # Each list runs from the loosest to the tightest value.
    lists: list[tuple[Callable[[float], Outside], Sequence[float]]] = [
        (partial(_past, table, mass), NUCLEI[::-1]),
        (partial(_beyond, table, mass, probability), [k for k in COUNTS if k < table.best.shape[1]][::-1]),
        (partial(_below, table, probability), FLOORS),
    ]
    judged = [(judge, [judge(value) for value in values]) for judge, values in lists]
    outside = [counts for _, several in judged for counts in several]
    if any(counts.cut for counts in outside):
        outside += [counts for judge, several in judged for counts in _tightest(judge, several)]
    return TokensTest(
        z=total / math.sqrt(spread) if spread else 0.0,
        temperature=1 / (1 + total / spread) if spread and total > -spread / 2 else None,
        outside=tuple(outside),
        spread=math.sqrt(spread),
    )


def _tightest(judge: Callable[[float], Outside], judged: Sequence[Outside]) -> list[Outside]:
    """Return the tightest truncation that the sample obeys, searched between the last obeyed value of a list and the next."""
    at = max((place for place, counts in enumerate(judged) if counts.obeyed), default=len(judged))
    if at + 1 >= len(judged):
        return []
    tightest, next_value = judged[at], judged[at + 1].value
    for _ in range(STEPS):
        middle = (tightest.value + next_value) / 2
        if tightest.setting == "top_k":
            middle = float(round(middle))
        if middle in (tightest.value, next_value):
            break
        counts = judge(middle)
        if counts.obeyed:
            tightest = counts
        else:
            next_value = middle
    return [] if tightest is judged[at] else [tightest]


def _counted(setting: str, value: float, beyond: np.ndarray, seen: np.ndarray) -> Outside:
    """Return the counts outside a truncation, from the mass outside at each place and whether the token is outside `[N]`."""
    beyond = beyond.clip(0, 1)
    gain = -float(np.log(np.maximum(1 - beyond, 1e-300)).sum())
    return Outside(setting=setting, value=float(value), expected=float(beyond.sum()), seen=int(seen.sum()), gain=gain)


def _past(table: LogitTable, mass: np.ndarray, p: float) -> Outside:
    beyond = 1 - np.where(mass - table.best < p, table.best, 0.0).sum(-1)
    # If the nucleus needs more tokens than the table keeps, nothing counts as outside.
    return _counted("top_p", p, np.where(mass[:, -1] < p, 0.0, beyond), table.better >= p + MARGIN)


def _beyond(table: LogitTable, mass: np.ndarray, probability: np.ndarray, k: float) -> Outside:
    last = int(k) - 1
    return _counted("top_k", k, 1 - mass[:, last], probability < table.best[:, last] * (1 - TIE))


def _below(table: LogitTable, probability: np.ndarray, p: float) -> Outside:
    least = table.best[:, :1] * p
    # Tokens that the table does not keep are below, too.
    beyond = 1 - np.where(table.best >= least, table.best, 0.0).sum(-1)
    known = table.best[:, -1] < least[:, 0]
    return _counted("min_p", p, np.where(known, beyond, 0.0), probability < least[:, 0] * (1 - MARGIN))


def judge_start(sample: Sample) -> int:
    """Return how many sampled tokens the mask skips at the start of every response; 0 if none, or not the same number."""
    skipped = {mask.index(True) for mask in sample.masks if any(mask)}
    late = skipped.pop() if len(skipped) == 1 else 0
    # Only the engine gives log-probabilities, and only to tokens that it sampled; those of inserted tokens are 0 or missing.
    logprobs = [value or 0.0 for row in sample.logprobs for value in row[:late]]
    sampled = sum(-math.inf < value < 0 for value in logprobs)
    return late if 0 < late <= LATE and sampled > len(logprobs) / 2 else 0


def judge_ends(sample: Sample, end_tokens: Collection[int]) -> tuple[str, ...]:
    """Return sentences about responses that do not end by one of these tokens; log-probabilities cannot show this."""
    if not end_tokens:
        return ()
    ends, sentences = set(end_tokens), []
    # Tokens that a tool inserts after an end belong to another turn.
    on = sum(
        any(token in ends and mask[at + 1] for at, token in enumerate(response[:-1]))
        for response, mask in zip(sample.responses, sample.masks, strict=True)
    )
    if on:
        sentences.append(f"{on} responses go on after an end: ignore_eos, or other end tokens in the engine")
    longest = max(map(len, sample.responses))
    cut = sum(len(response) == longest and response[-1] not in ends for response in sample.responses)
    if cut >= CUT * len(sample.responses):
        share = cut / len(sample.responses)
        sentences.append(
            f"{cut} responses ({share:.0%}) are cut at {longest} tokens, the longest length, without an end"
        )
    last = [response[-1] for response in sample.responses if response and len(response) < longest]
    others = [token for token in last if token not in ends]
    if others:
        sentences.append(
            f"{len(others)} responses are shorter than the longest and do not end by {sorted(ends)}, but most often by "
            f"{max(set(others), key=others.count)}: stop strings, or other end tokens in the engine"
        )
    return tuple(sentences)
