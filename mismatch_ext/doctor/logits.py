"""Causes that can be computed from the oracle's logits: how an engine draws tokens, and what it reports about them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mismatch_ext.doctor.causes import Cause
from mismatch_ext.doctor.sample import Floats
from mismatch_ext.doctor.table import LogitTable, chunks

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0)
NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
COUNTS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 20.0, 40.0, 50.0, 100.0)
FLOORS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2)
PENALTIES = (0.9, 0.95, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5)
PRESENCES = (0.05, 0.1, 0.2, 0.5, 1.0)
LENGTHS = (5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 200.0)
CAPS = (10.0, 15.0, 20.0, 30.0, 50.0)
# Factors on a token's odds: exp(bias).
ODDS = (0.02, 0.1, 0.3, 0.7, 1.4, 3.0, 10.0, 50.0)
# In the choice of a token, larger errors than this many median errors count as this many.
FAR = 8.0
PADDING = (16.0, 64.0, 256.0, 1024.0)
# The tokens that a penalty counts.
WHOLE, RESPONSE, LATE = "whole", "response", "late"


def of_logits(table: LogitTable, end_tokens: Sequence[int] = ()) -> list[Cause]:
    """Return the causes that need no forward pass.

    Args:
        table: The oracle's distributions.
        end_tokens: Ids that end a response; some causes forbid them.
    """
    found = [
        Cause(
            key="temperature", family="sampling", said="the engine samples at temperature {x}",
            predict=lambda x: table.under(lambda z, _: z / x),
            grid=tuple(t * table.temperature for t in TEMPERATURES), neutral=table.temperature, steps=14,
        ),
        Cause(key="top_p", family="sampling", said="the engine samples with top_p {x}", predict=lambda x: _nucleus(table, x),
              grid=NUCLEI, neutral=1.0, steps=10),
        Cause(key="top_k", family="sampling", said="the engine samples with top_k {x}", predict=lambda x: _top(table, int(x)),
              grid=tuple(k for k in COUNTS if k < table.logits.shape[1])),
        Cause(key="min_p", family="sampling", said="the engine samples with min_p {x}", predict=lambda x: _above(table, x),
              grid=FLOORS, steps=10),
        Cause(key="repetition_penalty", family="sampling", said="the engine samples with repetition_penalty {x}",
              predict=lambda x: _repetition(table, x, WHOLE), grid=PENALTIES, neutral=1.0, steps=10),
        # SGLang's penalties count only the response; when its batches overlap, from the prompt's last token to the last but one.
        Cause(key="repetition_penalty", family="sampling", said="the engine samples with repetition_penalty {x} of the response",
              predict=lambda x: _repetition(table, x, RESPONSE), grid=PENALTIES, neutral=1.0, steps=10),
        Cause(key="repetition_penalty", family="sampling",
              said="the engine samples with repetition_penalty {x} of the response, counted a token late",
              predict=lambda x: _repetition(table, x, LATE), grid=PENALTIES, neutral=1.0, steps=10),
        Cause(key="presence_penalty", family="sampling", said="the engine samples with presence_penalty {x}",
              predict=lambda x: _presence(table, x, RESPONSE), grid=PRESENCES, steps=10),
        Cause(key="presence_penalty", family="sampling",
              said="the engine samples with presence_penalty {x}, counted a token late",
              predict=lambda x: _presence(table, x, LATE), grid=PRESENCES, steps=10),
        Cause(key="frequency_penalty", family="sampling", said="the engine samples with frequency_penalty {x}",
              predict=lambda x: _frequency(table, x, RESPONSE), grid=PRESENCES, steps=10),
        Cause(key="frequency_penalty", family="sampling",
              said="the engine samples with frequency_penalty {x}, counted a token late",
              predict=lambda x: _frequency(table, x, LATE), grid=PRESENCES, steps=10),
        Cause(key="padded_vocabulary", family="config", said="the engine gives mass to {x} rows of padding in its vocabulary",
              predict=lambda x: _padded(table, x), grid=PADDING, steps=8),
        Cause(key="softcap", family="config", said="the engine caps its logits softly at {x}",
              predict=lambda x: table.under(lambda z, _: x * torch.tanh(z / x) / table.temperature), grid=CAPS, steps=8),
        Cause(key="logits_reported", family="reporting", said="the engine reports logits in the place of log-probabilities",
              predict=lambda _: _picked(table)),
        Cause(key="shifted", family="reporting", said="the engine's log-probabilities are those of the token {x}",
              predict=lambda x: _shifted(table, 1 - 2 * int(x)), grid=(0.0, 1.0), names=("after", "before")),
    ]  # fmt: skip
    token = _favoured(table)
    if token is not None:
        found += [
            Cause(key="logit_bias", family="sampling", predict=lambda x: _biased(table, token, x), grid=ODDS, neutral=1.0,
                  steps=10, said=f"the engine multiplies the odds of token {token} by {{x}} (logit_bias)"),
            Cause(key="bad_words", family="sampling", predict=lambda _: _biased(table, token, 0.0),
                  said=f"the engine never samples token {token} (bad_words, allowed_token_ids)"),
        ]  # fmt: skip
    if table.temperature != 1:
        found.append(
            Cause(
                key="raw_logprobs",
                family="reporting",
                said="the engine reports log-probabilities from before the temperature",
                predict=lambda _: table.under(lambda z, _: z),
            )
        )
    if end_tokens:
        ends = torch.tensor(sorted(end_tokens))
        found.append(
            Cause(key="min_tokens", family="sampling", said="the engine forbids the end of a response before token {x}",
                  predict=lambda x: _without_end(table, ends, int(x)), grid=LENGTHS)
        )  # fmt: skip
    return found


def _kept(table: LogitTable, mass: Floats, stays: np.ndarray) -> Floats:
    """Return log-probabilities after the distribution is truncated to `mass`; -inf for tokens that are cut off."""
    return np.where(stays, table.logprob - np.log(np.maximum(mass, 1e-300)), -np.inf)


def _nucleus(table: LogitTable, p: float) -> Floats:
    mass = table.best.cumsum(-1)
    count = ((mass - table.best) < p).sum(-1)
    kept = np.take_along_axis(mass, (count - 1)[:, None], -1)[:, 0]
    # If the nucleus needs more tokens than the table keeps, take the whole distribution.
    whole = (count == table.best.shape[1]) & (kept < p)
    return _kept(table, np.where(whole, 1.0, kept), (table.better < p) | whole)


def _top(table: LogitTable, k: int) -> Floats:
    k = min(k, table.best.shape[1])
    return _kept(table, table.best[:, :k].sum(-1), np.exp(table.logprob) >= table.best[:, k - 1] * (1 - 1e-12))


def _above(table: LogitTable, p: float) -> Floats:
    least = table.best[:, :1] * p
    mass = np.where(table.best >= least, table.best, 0.0).sum(-1)
    return _kept(table, mass, np.exp(table.logprob) >= least[:, 0] * (1 - 1e-12))


def _counts(table: LogitTable, rows: slice, width: int, of: str) -> Tensor:
    """Return how often each token of the vocabulary occurred before each place `[n, V]`, float64.

    Args:
        table: The sample's table.
        rows: The places.
        width: Size of the vocabulary.
        of: WHOLE counts prompt and response; RESPONSE counts only the response; LATE lags by one token: it counts from the
            prompt's last token to the last token but one of the response.
    """
    sample = table.sample
    heads = tuple(prompt if of == WHOLE else prompt[-1:] if of == LATE else () for prompt in sample.prompts)
    whole = [torch.tensor([*head, *response]) for head, response in zip(heads, sample.responses, strict=True)]
    padded = pad_sequence(whole, batch_first=True)
    row, place = sample.row[rows], sample.place[rows]
    ends = torch.from_numpy(place + (0 if of == LATE else np.array([len(head) for head in heads])[row]))
    before = (torch.arange(padded.shape[1]) < ends[:, None]).double()
    return torch.zeros(len(row), width, dtype=torch.float64).scatter_add_(1, padded[torch.from_numpy(row)], before)


def _repetition(table: LogitTable, x: float, of: str) -> Floats:
    def change(z: Tensor, rows: slice) -> Tensor:
        seen = _counts(table, rows, z.shape[1], of) > 0
        return torch.where(seen, torch.where(z > 0, z / x, z * x), z) / table.temperature

    return table.under(change)


def _presence(table: LogitTable, x: float, of: str) -> Floats:
    def change(z: Tensor, rows: slice) -> Tensor:
        return (z - x * (_counts(table, rows, z.shape[1], of) > 0)) / table.temperature

    return table.under(change)


def _frequency(table: LogitTable, x: float, of: str) -> Floats:
    def change(z: Tensor, rows: slice) -> Tensor:
        return (z - x * _counts(table, rows, z.shape[1], of)) / table.temperature

    return table.under(change)


def _picked(table: LogitTable) -> Floats:
    """Return the tokens' logits, before the temperature."""
    token = torch.from_numpy(table.sample.tokens)[:, None]
    parts = [table.logits[rows].gather(-1, token[rows])[:, 0] for rows in chunks(table.logits)]
    return np.asarray(torch.cat(parts).double().numpy())


def _padded(table: LogitTable, rows: float) -> Floats:
    """Return log-probabilities with `rows` extra vocabulary rows of logit 0, as zero padding has."""
    logit = _picked(table) / table.temperature
    return np.asarray(table.logprob - np.logaddexp(0.0, math.log(rows) - (logit - table.logprob)))


def _favoured(table: LogitTable) -> int | None:
    """Return the token whose bias explains most of the errors of the fitted responses; None if none explains anything.

    A small bias b of token k moves log p by b (onehot - p)_k.
    """
    spread = np.maximum(table.spread, 1e-3)
    error = np.where(table.sample.fits, (table.sample.engine - table.logprob) / spread, 0.0)
    # Clip, because otherwise a few large errors would decide.
    unit = max(float(np.median(np.abs(error[table.sample.fits]))), 1e-9)
    weighed = torch.from_numpy(np.clip(error / unit, -FAR, FAR) / spread)
    kept = torch.from_numpy(table.sample.fits / spread**2)
    above = torch.zeros(table.logits.shape[1], dtype=torch.float64)
    below = torch.zeros_like(above)
    for rows in chunks(table.logits):
        p = (table.logits[rows].double() / table.temperature).softmax(-1)
        moved = torch.zeros_like(p).scatter_(1, torch.from_numpy(table.sample.tokens[rows])[:, None], 1.0) - p
        above += weighed[rows] @ moved
        below += kept[rows] @ moved.square()
    found = above.abs() / below.clamp(min=1e-9).sqrt()
    return int(found.argmax()) if bool(found.any()) else None


def _biased(table: LogitTable, token: int, odds: float) -> Floats:
    p = torch.cat(
        [
            (table.logits[rows].double() / table.temperature).log_softmax(-1)[:, token].exp()
            for rows in chunks(table.logits)
        ]
    ).numpy()
    own = table.sample.tokens == token
    shift = math.log(odds) if odds else -math.inf
    return np.asarray(
        np.where(own, table.logprob + shift, table.logprob) - np.log1p(np.maximum(p * (odds - 1), 1e-12 - 1))
    )


def _without_end(table: LogitTable, ends: Tensor, least: int) -> Floats:
    place, tokens = torch.from_numpy(table.sample.place), torch.from_numpy(table.sample.tokens)

    def change(z: Tensor, rows: slice) -> Tensor:
        forbidden = torch.zeros_like(z, dtype=torch.bool)
        # If an end token was sampled here, it was not forbidden.
        early = (place[rows] < least) & ~torch.isin(tokens[rows], ends)
        forbidden[:, ends] = early[:, None]
        return z.masked_fill(forbidden, -math.inf) / table.temperature

    return table.under(change)


def _shifted(table: LogitTable, by: int) -> Floats:
    """Return the log-probability of the token `by` places later; a token's own if that is outside of its response."""
    at = np.arange(len(table.logprob)) + by
    inside = (at >= 0) & (at < len(at))
    inside[inside] &= table.sample.row[at[inside]] == table.sample.row[inside]
    return np.where(inside, table.logprob[np.where(inside, at, 0)], table.logprob)
