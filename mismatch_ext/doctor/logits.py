"""Causes that are functions of the oracle's logits: how an engine draws tokens, and what it reports of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mismatch_ext.doctor.causes import Cause
from mismatch_ext.doctor.sample import Floats
from mismatch_ext.doctor.table import LogitTable

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0)
NUCLEI = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
COUNTS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 20.0, 40.0, 50.0, 100.0)
FLOORS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2)
PENALTIES = (0.9, 0.95, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5)
PRESENCES = (0.05, 0.1, 0.2, 0.5, 1.0)
LENGTHS = (5.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 200.0)
CAPS = (10.0, 15.0, 20.0, 30.0, 50.0)


def of_logits(table: LogitTable, end_tokens: Sequence[int] = ()) -> list[Cause]:
    """Return the causes that need no forward pass.

    Args:
        table: The oracle's distributions.
        end_tokens: Ids that end a response, for causes that forbid them.
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
              predict=lambda x: _repetition(table, x), grid=PENALTIES, neutral=1.0, steps=10),
        Cause(key="presence_penalty", family="sampling", said="the engine samples with presence_penalty {x}",
              predict=lambda x: _presence(table, x), grid=PRESENCES, steps=10),
        Cause(key="softcap", family="config", said="the engine caps its logits softly at {x}",
              predict=lambda x: table.under(lambda z, _: x * torch.tanh(z / x) / table.temperature), grid=CAPS, steps=8),
        Cause(key="shifted", family="reporting", said="the engine's log-probabilities are those of the token {x}",
              predict=lambda x: _shifted(table, 1 - 2 * int(x)), grid=(0.0, 1.0), names=("after", "before")),
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
    """Return log-probabilities after all but a part of the distribution is cut off; -inf for tokens that are cut off."""
    return np.where(stays, table.logprob - np.log(np.maximum(mass, 1e-300)), -np.inf)


def _nucleus(table: LogitTable, p: float) -> Floats:
    mass = table.best.cumsum(-1)
    count = ((mass - table.best) < p).sum(-1)
    kept = np.take_along_axis(mass, (count - 1)[:, None], -1)[:, 0]
    # A nucleus that is larger than what is kept of the distribution is taken for all of it.
    whole = (count == table.best.shape[1]) & (kept < p)
    return _kept(table, np.where(whole, 1.0, kept), (table.better < p) | whole)


def _top(table: LogitTable, k: int) -> Floats:
    k = min(k, table.best.shape[1])
    return _kept(table, table.best[:, :k].sum(-1), np.exp(table.logprob) >= table.best[:, k - 1] * (1 - 1e-12))


def _above(table: LogitTable, p: float) -> Floats:
    least = table.best[:, :1] * p
    mass = np.where(table.best >= least, table.best, 0.0).sum(-1)
    return _kept(table, mass, np.exp(table.logprob) >= least[:, 0] * (1 - 1e-12))


def _seen(table: LogitTable, rows: slice, width: int, *, prompt: bool) -> Tensor:
    """Return which tokens stood before each place `[n, V]`."""
    seen = torch.zeros(rows.stop - rows.start, width, dtype=torch.bool)
    for at, token in enumerate(range(rows.start, rows.stop)):
        seen[at, list(table.sample.before(token, prompt=prompt))] = True
    return seen


def _repetition(table: LogitTable, x: float) -> Floats:
    def change(z: Tensor, rows: slice) -> Tensor:
        seen = _seen(table, rows, z.shape[1], prompt=True)
        return torch.where(seen, torch.where(z > 0, z / x, z * x), z) / table.temperature

    return table.under(change)


def _presence(table: LogitTable, x: float) -> Floats:
    return table.under(lambda z, rows: (z - x * _seen(table, rows, z.shape[1], prompt=False)) / table.temperature)


def _without_end(table: LogitTable, ends: Tensor, least: int) -> Floats:
    place, tokens = torch.from_numpy(table.sample.place), torch.from_numpy(table.sample.tokens)

    def change(z: Tensor, rows: slice) -> Tensor:
        forbidden = torch.zeros_like(z, dtype=torch.bool)
        # Where an end was sampled all the same, it was allowed.
        early = (place[rows] < least) & ~torch.isin(tokens[rows], ends)
        forbidden[:, ends] = early[:, None]
        return z.masked_fill(forbidden, -math.inf) / table.temperature

    return table.under(change)


def _shifted(table: LogitTable, by: int) -> Floats:
    """Return each token's neighbour's log-probability; its own at the ends of a response."""
    at = np.arange(len(table.logprob)) + by
    inside = (at >= 0) & (at < len(at))
    inside[inside] &= table.sample.row[at[inside]] == table.sample.row[inside]
    return np.where(inside, table.logprob[np.where(inside, at, 0)], table.logprob)
