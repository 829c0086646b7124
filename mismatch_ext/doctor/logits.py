"""The oracle's distribution at each token, and the causes that it predicts: how an engine draws tokens, and what it reports.

Suffixes of shapes: N tokens, V vocabulary, K best tokens of each place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mismatch_ext.doctor.causes import Cause
from mismatch_ext.doctor.sample import Floats, Sample

# Elements of a chunk of logits: 128 MiB in float64.
CHUNK = 2**24
# A nucleus is searched among this many most probable tokens of each place.
BEST = 1024
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0)
NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
COUNTS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 20.0, 40.0, 50.0, 100.0)
FLOORS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2)
FACTORS = (0.9, 0.95, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5)
SUBTRACTED = (0.05, 0.1, 0.2, 0.5, 1.0)
LENGTHS = (5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 200.0)
CAPS = (10.0, 15.0, 20.0, 30.0, 50.0)
# Factors on a token's odds: exp(bias).
ODDS = (0.02, 0.1, 0.3, 0.7, 1.4, 3.0, 10.0, 50.0)
PADDING = (16.0, 64.0, 256.0, 1024.0)
# How far a mask may be off, in tokens, and in words.
LATE_BY = (1, 2, 3, -1, -2, -3)
LATE_WORDS = tuple(f"{abs(x)} token{'s'[: abs(x) > 1]} {'late' if x > 0 else 'early'}" for x in LATE_BY)
# In the choice of a token, larger errors than this many median errors count as this many.
FAR = 8.0
# The tokens that a penalty counts. SGLang's count only the response; when its batches overlap, from the prompt's last token to
# the last but one.
WHOLE, RESPONSE, LATE = "whole", "response", "late"
Penalized = Callable[[Tensor, Tensor, float], Tensor]
# Of each penalty: logits from logits, counts and parameter; parameters to try; the one that changes nothing; and what it may
# count, in the words of the sentence.
PENALTIES: dict[str, tuple[Penalized, tuple[float, ...], float | None, dict[str, str]]] = {
    "repetition_penalty": (
        lambda z, counts, x: torch.where(counts > 0, torch.where(z > 0, z / x, z * x), z),
        FACTORS,
        1.0,
        {WHOLE: "", RESPONSE: " of the response", LATE: " of the response, counted a token late"},
    ),
    "presence_penalty": (
        lambda z, counts, x: z - x * (counts > 0), SUBTRACTED, None, {RESPONSE: "", LATE: ", counted a token late"},
    ),
    "frequency_penalty": (
        lambda z, counts, x: z - x * counts, SUBTRACTED, None, {RESPONSE: "", LATE: ", counted a token late"},
    ),
}  # fmt: skip


class Logits(Protocol):
    """Logits `[N, V]`, float32, read in stretches of rows: a tensor, or an object that computes them when they are read."""

    @property
    def shape(self) -> torch.Size: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class LogitTable:
    """The oracle's distribution at each token, at the trainer's temperature; `logits` are from before it."""

    sample: Sample
    logits: Tensor | Logits
    temperature: float
    logprob: Floats  # of the sampled token [N]
    entropy: Floats  # in nats [N]
    variance: Floats  # of the log-probability of a token drawn at this place, in squared nats [N]
    spread: Floats  # length of onehot(token) - probabilities [N]: errors in the logits move the log-probability in proportion
    best: Floats  # the largest probabilities at each place [N, K], descending
    better: Floats  # total probability of the tokens that are more probable than the sampled one [N]

    @classmethod
    def of(cls, sample: Sample, logits: Tensor | Logits, temperature: float) -> LogitTable:
        """Compute the table from the oracle's logits `[N, V]`."""
        parts: list[dict[str, Floats]] = []
        for rows in chunks(logits):
            logp = (logits[rows].double() / temperature).log_softmax(-1)
            p = logp.exp()
            logprob = _chosen(logp, sample, rows)
            entropy = -torch.xlogy(p, p).sum(-1)
            columns = {
                "logprob": logprob,
                "entropy": entropy,
                "variance": (p * torch.nan_to_num(logp, neginf=0.0).add(entropy[:, None]).square()).sum(-1),
                "spread": (1 - 2 * logprob.exp() + p.square().sum(-1)).clamp(min=0).sqrt(),
                "best": p.topk(min(BEST, p.shape[1]), -1).values,
                "better": torch.where(p > logprob.exp()[:, None], p, 0.0).sum(-1),
            }
            parts.append({name: column.numpy() for name, column in columns.items()})
        columns_ = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return cls(sample=sample, logits=logits, temperature=temperature, **columns_)

    def under(self, change: Callable[[Tensor, slice], Tensor]) -> Floats:
        """Return the tokens' log-probabilities `[N]` under logits changed stretch by stretch, from before the temperature."""
        return self._each(lambda z, rows: _chosen(change(z, rows).log_softmax(-1), self.sample, rows))

    def chosen(self) -> Floats:
        """Return the sampled tokens' logits `[N]`, before the temperature."""
        return self._each(lambda z, rows: _chosen(z, self.sample, rows))

    def probability(self, token: int) -> Floats:
        """Return the probability of one token at each place `[N]`."""
        return self._each(lambda z, rows: (z / self.temperature).log_softmax(-1)[:, token].exp())

    def _each(self, function: Callable[[Tensor, slice], Tensor]) -> Floats:
        return np.concatenate([function(self.logits[rows].double(), rows).numpy() for rows in chunks(self.logits)])


def chunks(logits: Tensor | Logits) -> Iterator[slice]:
    """Yield slices of the rows of logits `[N, V]`, small enough for copies in float64."""
    count = max(1, CHUNK // logits.shape[1])
    return (slice(first, min(first + count, len(logits))) for first in range(0, len(logits), count))


def _chosen(values: Tensor, sample: Sample, rows: slice) -> Tensor:
    return values.gather(-1, torch.from_numpy(sample.tokens[rows])[:, None])[:, 0]


def of_logits(table: LogitTable, end_tokens: Sequence[int] = ()) -> list[Cause]:
    """Return the causes that need no forward pass; some forbid the ids that end a response."""
    t, under, token, ends = table.temperature, table.under, _favored(table), torch.tensor(sorted(end_tokens))
    penalties = [
        Cause(key=key, family="sampling", said=f"the engine samples with {key} {{x}}{words}", remedy="penalty",
              predict=partial(_penalized, table, change, counted), grid=grid, neutral=neutral, steps=10)
        for key, (change, grid, neutral, countings) in PENALTIES.items() for counted, words in countings.items()
    ]  # fmt: skip
    rows = [
        Cause(key="temperature", family="sampling", said="the engine samples at temperature {x}",
              predict=lambda x: under(lambda z, _: z / x), grid=tuple(x * t for x in TEMPERATURES), neutral=t, steps=14),
        *truncations(table),
        *penalties,
        Cause(key="padded_vocabulary", family="config", said="the engine gives mass to {x} rows of padding in its vocabulary",
              remedy="model", predict=lambda x: _padded(table, x), grid=PADDING, steps=8),
        Cause(key="softcap", family="config", said="the engine caps its logits softly at {x}", remedy="model",
              predict=lambda x: under(lambda z, _: x * torch.tanh(z / x) / t), grid=CAPS, steps=8),
        Cause(key="logits_reported", family="reporting", said="the engine reports logits in the place of log-probabilities",
              predict=lambda _: table.chosen()),
        Cause(key="shifted", family="reporting", said="the engine's log-probabilities are those of the token {x}",
              predict=lambda x: _shifted(table, 1 - 2 * int(x)), grid=(0.0, 1.0), names=("after", "before")),
        Cause(key="mask", family="reporting", grid=tuple(map(float, range(len(LATE_BY)))), names=LATE_WORDS,
              said="the mask of tool turns comes {x}: tokens that a tool inserted, with log-probability 0, count as sampled",
              predict=lambda x: _inserted(table, LATE_BY[int(x)]), needs=not all(map(all, table.sample.masks))),
        Cause(key="logit_bias", family="sampling", said=f"the engine multiplies the odds of token {token} by {{x}} (logit_bias)",
              remedy="bias", predict=lambda x: _biased(table, token, x), grid=ODDS, neutral=1.0, steps=10, needs=token >= 0),
        Cause(key="bad_words", family="sampling", said=f"the engine never samples token {token} (bad_words, allowed_token_ids)",
              remedy="bias", predict=lambda _: _biased(table, token, 0.0), needs=token >= 0),
        Cause(key="raw_logprobs", family="reporting", said="the engine reports log-probabilities from before the temperature",
              predict=lambda _: under(lambda z, _: z), needs=t != 1),
        Cause(key="min_tokens", family="sampling", said="the engine forbids the end of a response before token {x}",
              predict=lambda x: _without_end(table, ends, int(x)), grid=LENGTHS, needs=bool(end_tokens)),
    ]  # fmt: skip
    return [cause for cause in rows if cause.needs]


def truncations(table: LogitTable) -> list[Cause]:
    """Return the causes that cut off a tail, at the table's temperature."""
    return [
        Cause(key="top_p", family="sampling", said="the engine samples with top_p {x}",
              predict=lambda x: _nucleus(table, x), grid=NUCLEI, neutral=1.0, steps=10),
        Cause(key="top_k", family="sampling", said="the engine samples with top_k {x}",
              predict=lambda x: _top(table, int(x)), grid=tuple(k for k in COUNTS if k < table.logits.shape[1])),
        Cause(key="min_p", family="sampling", said="the engine samples with min_p {x}",
              predict=lambda x: _above(table, x), grid=FLOORS, steps=10),
    ]  # fmt: skip


def _kept(table: LogitTable, mass: Floats, stays: np.ndarray) -> Floats:
    """Return log-probabilities after the distribution is truncated to `mass`; -inf for tokens that are cut off."""
    return np.where(stays, table.logprob - np.log(np.maximum(mass, 1e-300)), -np.inf)


def _nucleus(table: LogitTable, p: float) -> Floats:
    mass = table.best.cumsum(-1)
    count = ((mass - table.best) < p).sum(-1)
    nucleus = np.take_along_axis(mass, (count - 1)[:, None], -1)[:, 0]
    # If the nucleus needs more tokens than the table keeps, take the whole distribution.
    whole = (count == table.best.shape[1]) & (nucleus < p)
    return _kept(table, np.where(whole, 1.0, nucleus), (table.better < p) | whole)


def _top(table: LogitTable, k: int) -> Floats:
    k = min(k, table.best.shape[1])
    return _kept(table, table.best[:, :k].sum(-1), np.exp(table.logprob) >= table.best[:, k - 1] * (1 - 1e-12))


def _above(table: LogitTable, p: float) -> Floats:
    least = table.best[:, :1] * p
    mass = np.where(table.best >= least, table.best, 0.0).sum(-1)
    return _kept(table, mass, np.exp(table.logprob) >= least[:, 0] * (1 - 1e-12))


def _counts(table: LogitTable, rows: slice, width: int, counted: str) -> Tensor:
    """Return how often each token of the vocabulary of this width occurred before each place `[n, V]`, float64."""
    sample = table.sample
    heads = tuple(prompt if counted == WHOLE else prompt[-1:] if counted == LATE else () for prompt in sample.prompts)
    whole = [torch.tensor([*head, *response]) for head, response in zip(heads, sample.responses, strict=True)]
    padded = pad_sequence(whole, batch_first=True)
    row, place = sample.row[rows], sample.place[rows]
    ends = torch.from_numpy(place + (0 if counted == LATE else np.array([len(head) for head in heads])[row]))
    before = (torch.arange(padded.shape[1]) < ends[:, None]).double()
    return torch.zeros(len(row), width, dtype=torch.float64).scatter_add_(1, padded[torch.from_numpy(row)], before)


def _penalized(table: LogitTable, change: Penalized, counted: str, x: float) -> Floats:
    return table.under(lambda z, rows: change(z, _counts(table, rows, z.shape[1], counted), x) / table.temperature)


def _padded(table: LogitTable, rows: float) -> Floats:
    """Return log-probabilities with `rows` extra vocabulary rows of logit 0, as zero padding has."""
    logit = table.chosen() / table.temperature
    return np.asarray(table.logprob - np.logaddexp(0.0, math.log(rows) - (logit - table.logprob)))


def _favored(table: LogitTable) -> int:
    """Return the token whose bias explains most of the errors of the fitted responses; -1 if none explains anything.

    A small bias b of token k moves log p by b (onehot - p)_k.
    """
    spread = np.maximum(table.spread, 1e-3)
    error = np.where(table.sample.fits, (table.sample.engine - table.logprob) / spread, 0.0)
    # Clip, because otherwise a few large errors would decide.
    unit = max(float(np.median(np.abs(error[table.sample.fits]))), 1e-9)
    weighed = torch.from_numpy(np.clip(error / unit, -FAR, FAR) / spread)
    counts = torch.from_numpy(table.sample.fits / spread**2)
    above = torch.zeros(table.logits.shape[1], dtype=torch.float64)
    below = torch.zeros_like(above)
    for rows in chunks(table.logits):
        p = (table.logits[rows].double() / table.temperature).softmax(-1)
        moved = torch.zeros_like(p).scatter_(1, torch.from_numpy(table.sample.tokens[rows])[:, None], 1.0) - p
        above += weighed[rows] @ moved
        below += counts[rows] @ moved.square()
    explains = above.abs() / below.clamp(min=1e-9).sqrt()
    return int(explains.argmax()) if bool(explains.any()) else -1


def _biased(table: LogitTable, token: int, odds: float) -> Floats:
    shift = math.log(odds) if odds else -math.inf
    shifted = np.where(table.sample.tokens == token, table.logprob + shift, table.logprob)
    return np.asarray(shifted - np.log1p(np.maximum(table.probability(token) * (odds - 1), 1e-12 - 1)))


def _without_end(table: LogitTable, ends: Tensor, least: int) -> Floats:
    place, tokens = torch.from_numpy(table.sample.place), torch.from_numpy(table.sample.tokens)

    def change(z: Tensor, rows: slice) -> Tensor:
        forbidden = torch.zeros_like(z, dtype=torch.bool)
        # If an end token was sampled here, it was not forbidden.
        early = (place[rows] < least) & ~torch.isin(tokens[rows], ends)
        forbidden[:, ends] = early[:, None]
        return z.masked_fill(forbidden, -math.inf) / table.temperature

    return table.under(change)


def _inserted(table: LogitTable, late: int) -> Floats:
    """Return log-probabilities that are 0 for the tokens up to `late` places before a masked stretch, behind it if negative."""
    masks, inserted = table.sample.masks, []
    for mask in masks:
        masked = ~np.array(mask)
        near = np.zeros_like(masked)
        for by in range(1, abs(late) + 1):
            if late > 0:
                near[:-by] |= masked[by:]
            else:
                near[by:] |= masked[:-by]
        inserted.append(near[~masked])
    return np.where(np.concatenate(inserted), 0.0, table.logprob)


def _shifted(table: LogitTable, by: int) -> Floats:
    """Return the log-probability of the token `by` places later; a token's own if that is outside of its response."""
    at = np.arange(len(table.logprob)) + by
    inside = (at >= 0) & (at < len(at))
    inside[inside] &= table.sample.row[at[inside]] == table.sample.row[inside]
    return np.where(inside, table.logprob[np.where(inside, at, 0)], table.logprob)
