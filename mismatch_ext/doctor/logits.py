"""The oracle's distribution at each token, and the causes that it predicts: how an engine draws tokens, and what it reports.

Suffixes of shapes: N tokens, V vocabulary, K best tokens of each place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mismatch_ext.doctor.causes import Cause
from mismatch_ext.doctor.sample import Floats, Integers, Sample

# Elements of a chunk of logits: 128 MiB in float64.
CHUNK = 2**24
# A nucleus is searched among this many most probable tokens of each place.
BEST = 1024
# Elements of the logits by which parameters are chosen, and the fewest tokens: 512 of a vocabulary of 49,152.
SCREENED, LEAST_SCREENED = 3 * 2**23, 256
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
# A penalty leaves at least this probability to the tokens that did not occur, up to rounding of float64.
LEAST_MASS = 1e-15
# A token below this log-probability is impossible in float64, and counts as nothing.
LEAST_LOGPROB = -1e4
# Bins of each place's logits, and how far below the largest they reach: what lies lower has no mass at any temperature tried.
BINS, RANGE = 2**13, 64.0
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
    """Logits `[N, V]`, float32, read by rows: a tensor, or an object that computes them when they are read."""

    @property
    def shape(self) -> torch.Size: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice | Integers, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class LogitTable:
    """The oracle's distribution at each token, at the trainer's temperature; `logits` are from before it."""

    sample: Sample
    logits: Tensor | Logits  # of the tokens at `places` [M, V]
    temperature: float
    places: Integers  # the tokens [M] whose logits are known; what is computed from logits is NaN for the others
    logit: Floats  # of the sampled token, from before the temperature [N]
    logprob: Floats  # of the sampled token [N]
    entropy: Floats  # in nats [N]
    variance: Floats  # of the log-probability of a token drawn at this place, in squared nats [N]
    spread: Floats  # length of onehot(token) - probabilities [N]: errors in the logits move the log-probability in proportion
    best: Floats  # the largest probabilities at each place [N, K], descending
    better: Floats  # total probability of the tokens that are more probable than the sampled one [N]

    @classmethod
    def of(
        cls,
        sample: Sample,
        logits: Tensor | Logits,
        temperature: float,
        places: Integers | None = None,
        *,
        tail_alone: bool = False,
    ) -> LogitTable:
        """Compute the table from the oracle's logits `[M, V]` of the tokens at some places `[M]`; None are all N tokens.

        With `tail_alone`, only what a truncation needs is computed: entropy, variance and spread are NaN.
        """
        places = np.arange(len(sample.tokens)) if places is None else places
        parts: list[dict[str, Floats]] = []
        for rows in chunks(logits):
            z = logits[rows]
            logp = (z.double() / temperature).log_softmax(-1)
            p = logp.exp()
            logprob = _chosen(logp, sample, places[rows])
            logit = _chosen(z, sample, places[rows]).double()
            best = z.topk(min(BEST, z.shape[1]), -1).indices
            columns = {
                "logit": logit,
                "logprob": logprob,
                "best": p.gather(-1, best),
                "better": torch.where(p > logprob.exp()[:, None], p, 0.0).sum(-1),
            }
            if tail_alone:
                columns |= dict.fromkeys(("entropy", "variance", "spread"), torch.full_like(logprob, math.nan))
            else:
                entropy, variance = _moments(logp, p)
                columns |= {"entropy": entropy, "variance": variance, "spread": _spread(logprob, p)}
            parts.append({name: column.numpy() for name, column in columns.items()})
        known = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        columns_ = {name: _placed(values, places, len(sample.tokens)) for name, values in known.items()}
        return cls(sample=sample, logits=logits, temperature=temperature, places=places, **columns_)

    def screened(self, among: NDArray[np.bool_] | None = None) -> LogitTable:
        """Return the table with the logits of some fitted tokens alone, evenly spaced; itself if it is small enough.

        Fits cost tokens times vocabulary times parameters to try. So parameters are chosen by these tokens, and judged by all.
        `among` `[N]` are the tokens to choose from; None are the fitted ones.
        """
        fitted = np.flatnonzero(self.sample.fits if among is None else among)
        count = max(LEAST_SCREENED, SCREENED // self.logits.shape[1])
        if count >= len(fitted):
            return self
        places = fitted[np.linspace(0, len(fitted) - 1, count).astype(int)]
        kept = torch.cat([self.logits[rows] for rows in np.array_split(places, -(-count // LEAST_SCREENED))])
        return replace(self, logits=kept, places=places)

    def under(self, change: Callable[[Tensor], Tensor]) -> Floats:
        """Return the tokens' log-probabilities `[N]` under logits that are changed one by one, from before the temperature."""
        if len(self.places) < len(self.logit):
            centers, log_counts = self._bins
            normalizers = (change(centers) + log_counts).logsumexp(-1).numpy()
        else:
            parts = [change(self.logits[rows].double()).logsumexp(-1) for rows in chunks(self.logits)]
            normalizers = torch.cat(parts).numpy()
        chosen = change(torch.from_numpy(self.logit)).numpy()
        return np.asarray(chosen - _placed(normalizers, self.places, len(self.logit)))

    @cached_property
    def _bins(self) -> tuple[Tensor, Tensor]:
        """The mean logit and the log of the number of logits in each of `BINS` bins of each place, both `[M, BINS]`.

        A normalizer of these is off by the width of a bin squared, over 24: about 3e-6, in a hundredth of the time.
        """
        means, counts = [], []
        for rows in chunks(self.logits):
            z = self.logits[rows].double()
            top = z.amax(-1, keepdim=True)
            z = torch.maximum(z, top - RANGE)
            at = ((z - top) / RANGE * (BINS - 1) + BINS - 1).long()
            count = torch.zeros(len(z), BINS, dtype=z.dtype).scatter_add_(1, at, torch.ones_like(z))
            means.append(torch.zeros_like(count).scatter_add_(1, at, z) / count.clamp(min=1))
            counts.append(count.log())
        return torch.cat(means), torch.cat(counts)

    def mass(self, tokens: Tensor) -> Floats:
        """Return the probability of some tokens together at each place `[N]`, by normalizers that are known already."""
        normalizers = torch.from_numpy(self.logit / self.temperature - self.logprob)[self.places]
        parts = []
        for rows in chunks(self.logits):
            logprobs = self.logits[rows][:, tokens].double() / self.temperature - normalizers[rows][:, None]
            parts.append(logprobs.exp().sum(-1).numpy())
        return _placed(np.concatenate(parts), self.places, len(self.logit))


def score_tokens(sample: Sample, logits: Tensor | Logits, temperature: float) -> tuple[Floats, Floats]:
    """Return the tokens' log-probabilities `[N]` under logits `[N, V]`, and `LogitTable.spread` `[N]`."""
    logprobs, spreads = [], []
    for rows in chunks(logits):
        logp = (logits[rows].double() / temperature).log_softmax(-1)
        logprob = _chosen(logp, sample, np.arange(len(sample.tokens))[rows])
        logprobs.append(logprob.numpy())
        spreads.append(_spread(logprob, logp.exp()).numpy())
    return np.concatenate(logprobs), np.concatenate(spreads)


def _moments(logp: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entropy at each place `[n]`, and the variance of the log-probability of a token drawn there."""
    finite = logp.clamp(min=LEAST_LOGPROB)
    entropy = -torch.linalg.vecdot(p, finite)
    return entropy, (p * finite.add(entropy[:, None]).square()).sum(-1)


def _spread(logprob: Tensor, p: Tensor) -> Tensor:
    """Return the length of onehot(token) - p at each place `[n]`, from the tokens' log-probabilities and all probabilities."""
    return (1 - 2 * logprob.exp() + p.square().sum(-1)).clamp(min=0).sqrt()


def _placed(values: Floats, places: Integers, count: int) -> Floats:
    """Return values of the tokens at some places as values of all tokens, NaN for the others."""
    placed = np.full((count, *values.shape[1:]), math.nan)
    placed[places] = values
    return placed


def chunks(logits: Tensor | Logits) -> Iterator[slice]:
    """Yield slices of the rows of logits `[N, V]`, small enough for copies in float64."""
    count = max(1, CHUNK // logits.shape[1])
    return (slice(first, min(first + count, len(logits))) for first in range(0, len(logits), count))


def _chosen(values: Tensor, sample: Sample, places: Integers) -> Tensor:
    return values.gather(-1, torch.from_numpy(sample.tokens[places])[:, None])[:, 0]


def of_logits(table: LogitTable, end_tokens: Sequence[int] = ()) -> list[Cause]:
    """Return the causes that need no forward pass; some forbid the ids that end a response."""
    few = table.screened()
    token, occurring = _favored(few), Occurring.of(table)
    penalties = [
        Cause(key=key, family="sampling", said=f"the engine samples with {key} {{x}}{words}", remedy="penalty",
              predict=partial(_penalized, table, occurring, change, counted), grid=grid, neutral=neutral, steps=10)
        for key, (change, grid, neutral, countings) in PENALTIES.items() for counted, words in countings.items()
    ]  # fmt: skip
    causes = _of_table(table, token, end_tokens, penalties)
    if few is table:
        return causes
    screens = _of_table(few, token, end_tokens, penalties)
    return [replace(cause, screen=screen.predict) for cause, screen in zip(causes, screens, strict=True)]


def _of_table(table: LogitTable, token: int, end_tokens: Sequence[int], penalties: Sequence[Cause]) -> list[Cause]:
    """Return the causes as one table predicts them; `token` is the one whose odds may be changed, -1 for none."""
    t, under, ends = table.temperature, table.under, torch.tensor(sorted(end_tokens))
    mass_of_ends, probability = (cache(partial(table.mass, ids)) for ids in (ends, torch.tensor([token])))
    biased = lambda odds: _biased(table, token, odds, probability())  # noqa: E731
    rows = [
        Cause(key="temperature", family="sampling", said="the engine samples at temperature {x}",
              predict=lambda x: under(lambda z: z / x), grid=tuple(x * t for x in TEMPERATURES), neutral=t, steps=14),
        *truncations(table),
        *penalties,
        Cause(key="padded_vocabulary", family="config", said="the engine gives mass to {x} rows of padding in its vocabulary",
              remedy="model", predict=lambda x: _padded(table, x), grid=PADDING, steps=8),
        Cause(key="softcap", family="config", said="the engine caps its logits softly at {x}", remedy="model",
              predict=lambda x: under(lambda z: x * torch.tanh(z / x) / t), grid=CAPS, steps=8),
        Cause(key="logits_reported", family="reporting", said="the engine reports logits in the place of log-probabilities",
              predict=lambda _: table.logit),
        Cause(key="shifted", family="reporting", said="the engine's log-probabilities are those of the token {x}",
              predict=lambda x: _shifted(table, 1 - 2 * int(x)), grid=(0.0, 1.0), names=("after", "before")),
        Cause(key="mask", family="reporting", grid=tuple(map(float, range(len(LATE_BY)))), names=LATE_WORDS,
              said="the mask of tool turns comes {x}: tokens that a tool inserted, with log-probability 0, count as sampled",
              predict=lambda x: _inserted(table, LATE_BY[int(x)]), needs=not all(map(all, table.sample.masks))),
        Cause(key="logit_bias", family="sampling", said=f"the engine multiplies the odds of token {token} by {{x}} (logit_bias)",
              remedy="bias", predict=biased, grid=ODDS, neutral=1.0, steps=10, needs=token >= 0),
        Cause(key="bad_words", family="sampling", said=f"the engine never samples token {token} (bad_words, allowed_token_ids)",
              remedy="bias", predict=lambda _: biased(0.0), needs=token >= 0),
        Cause(key="raw_logprobs", family="reporting", said="the engine reports log-probabilities from before the temperature",
              predict=lambda _: under(lambda z: z), needs=t != 1),
        Cause(key="min_tokens", family="sampling", said="the engine forbids the end of a response before token {x}",
              predict=lambda x: _without_end(table, ends, int(x), mass_of_ends()), grid=LENGTHS, needs=bool(end_tokens)),
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
    kept = np.where(stays, table.logprob - np.log(np.maximum(mass, 1e-300)), -np.inf)
    return np.where(np.isnan(table.logprob), np.nan, kept)


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


@dataclass(frozen=True, kw_only=True)
class Occurring:
    """The different tokens of a prompt and its response [U], and their logits at each sampled token of the response [T]."""

    places: Integers  # of the response's sampled tokens among all of the sample [T]
    whole: Integers  # index in the U tokens of each token of prompt and response
    prompt: int  # length of the prompt
    logits: Tensor  # [T, U], float64, before the temperature

    @classmethod
    def of(cls, table: LogitTable) -> list[Occurring]:
        """Return those of each response that the table knows."""
        found = []
        for row in np.unique(table.sample.row):
            prompt, response = table.sample.prompts[row], table.sample.responses[row]
            ids, whole = np.unique([*prompt, *response], return_inverse=True)
            places = np.flatnonzero(table.sample.row == row)
            logits = table.logits[places][:, torch.from_numpy(ids)].double()
            found.append(cls(places=places, whole=whole, prompt=len(prompt), logits=logits))
        return found

    def counts(self, place: Integers, counted: str) -> Tensor:
        """Return how often each of the U tokens occurred before places of the response `[T]`, float64 `[T, U]`."""
        first = {WHOLE: 0, RESPONSE: self.prompt, LATE: self.prompt - 1}[counted]
        head, response = (
            torch.from_numpy(part) for part in (self.whole[first : self.prompt], self.whole[self.prompt :])
        )
        occurs = torch.nn.functional.one_hot(response, self.logits.shape[1])
        before = torch.cat([torch.zeros_like(occurs[:1]), occurs.cumsum(0)])
        if counted == LATE:
            # The prompt's last token is counted only once the first token is sampled, and each token one later.
            before = torch.cat([before[:1], before[:-1] + head.bincount(minlength=self.logits.shape[1])])
        else:
            before = before + head.bincount(minlength=self.logits.shape[1])
        return before[torch.from_numpy(place)].double()


def _penalized(table: LogitTable, occurring: Sequence[Occurring], change: Penalized, counted: str, x: float) -> Floats:
    """Return log-probabilities after a penalty, which changes only logits of tokens that occurred."""
    penalized = np.empty_like(table.logprob)
    for part in occurring:
        counts = part.counts(table.sample.place[part.places], counted)
        before, after = part.logits / table.temperature, change(part.logits, counts, x) / table.temperature
        sampled = part.whole[part.prompt + table.sample.place[part.places]]
        own = torch.from_numpy(sampled)[:, None]
        # The normalizer, and how it changes: by the mass that these tokens gain or lose.
        normalizer = before.gather(1, own) - torch.from_numpy(table.logprob[part.places])[:, None]
        gained = ((after - normalizer).exp() - (before - normalizer).exp()).sum(-1)
        change_of_normalizer = gained.clamp(min=LEAST_MASS - 1).log1p()
        penalized[part.places] = (after.gather(1, own) - normalizer)[:, 0] - change_of_normalizer
    return penalized


def _padded(table: LogitTable, rows: float) -> Floats:
    """Return log-probabilities with `rows` extra vocabulary rows of logit 0, as zero padding has."""
    logit = table.logit / table.temperature
    return np.asarray(table.logprob - np.logaddexp(0.0, math.log(rows) - (logit - table.logprob)))


def _favored(table: LogitTable) -> int:
    """Return the token whose bias explains most of the errors of the fitted responses; -1 if none explains anything.

    A small bias b of token k moves log p by b (onehot - p)_k.
    """
    spread = np.maximum(table.spread, 1e-3)
    error = np.where(table.sample.fits, (table.sample.engine - table.logprob) / spread, 0.0)
    # Clip, because otherwise a few large errors would decide.
    unit = max(float(np.median(np.abs(error[table.sample.fits]))), 1e-9)
    weighed = torch.from_numpy(np.clip(error / unit, -FAR, FAR) / spread)[table.places]
    counts = torch.from_numpy(table.sample.fits / spread**2)[table.places]
    tokens = torch.from_numpy(table.sample.tokens[table.places])
    own = torch.from_numpy(np.exp(table.logprob))[table.places]
    # Sums over places of weight times onehot - p, and of its square.
    size = table.logits.shape[1]
    above = torch.zeros(size, dtype=torch.float64).index_add_(0, tokens, weighed)
    below = torch.zeros(size, dtype=torch.float64).index_add_(0, tokens, counts * (1 - 2 * own))
    for rows in chunks(table.logits):
        p = (table.logits[rows].double() / table.temperature).softmax(-1)
        above -= weighed[rows] @ p
        below += counts[rows] @ p.square_()
    explains = above.abs() / below.clamp(min=1e-9).sqrt()
    return int(explains.argmax()) if bool(explains.any()) else -1


def _biased(table: LogitTable, token: int, odds: float, probability: Floats) -> Floats:
    shift = math.log(odds) if odds else -math.inf
    shifted = np.where(table.sample.tokens == token, table.logprob + shift, table.logprob)
    return np.asarray(shifted - np.log1p(np.maximum(probability * (odds - 1), 1e-12 - 1)))


def _without_end(table: LogitTable, ends: Tensor, least: int, mass: Floats) -> Floats:
    """Return log-probabilities with the ends, of this mass, forbidden before a place: the others share it."""
    is_end = np.isin(table.sample.tokens, ends.numpy())
    # If an end token was sampled here, it was not forbidden.
    forbidden = (table.sample.place < least) & ~is_end
    left = np.maximum(1 - mass, LEAST_MASS)
    return np.where(forbidden, table.logprob - np.log(left), table.logprob)


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
