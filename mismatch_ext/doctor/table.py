"""What the doctor keeps of the oracle's logits after one pass: enough to truncate, to whiten errors and to test tokens.

Suffixes of shapes: N tokens, V vocabulary, K best tokens of each place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mismatch_ext.doctor.sample import Floats, Sample

# Elements of a chunk of logits: 128 MiB in float64.
CHUNK = 2**24
# A nucleus is searched among this many most probable tokens of each place.
BEST = 1024


class Logits(Protocol):
    """Logits `[N, V]`, float32, read in stretches of rows: a tensor, or an object that computes them when they are read."""

    @property
    def shape(self) -> torch.Size:
        """N and V."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Return a stretch of rows, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class LogitTable:
    """The oracle's distribution at each token, at the trainer's temperature.

    Args:
        sample: The tokens.
        logits: Logits before the temperature `[N, V]`, float32, on the CPU.
        temperature: The trainer divides the logits by this.
        logprob: Log-probability of the sampled token `[N]`.
        entropy: Entropy in nats `[N]`.
        variance: Variance of the log-probability of a token drawn at this place, in squared nats `[N]`.
        spread: Length of onehot(token) - probabilities `[N]`: errors in the logits move the log-probability in proportion to it.
        best: The largest probabilities at each place `[N, K]`, descending.
        better: Total probability of the tokens that are more probable than the sampled one `[N]`.
    """

    sample: Sample
    logits: Tensor | Logits
    temperature: float
    logprob: Floats
    entropy: Floats
    variance: Floats
    spread: Floats
    best: Floats
    better: Floats

    @classmethod
    def of(cls, sample: Sample, logits: Tensor | Logits, temperature: float) -> LogitTable:
        """Compute the table from the oracle's logits `[N, V]`."""
        parts: list[list[Floats]] = []
        for rows in chunks(logits):
            logp = (logits[rows].double() / temperature).log_softmax(-1)
            p = logp.exp()
            token = torch.from_numpy(sample.tokens[rows.start : rows.stop])[:, None]
            own = logp.gather(-1, token)[:, 0]
            entropy = -torch.xlogy(p, p).sum(-1)
            variance = (p * torch.nan_to_num(logp, neginf=0.0).add(entropy[:, None]).square()).sum(-1)
            spread = (1 - 2 * own.exp() + p.square().sum(-1)).clamp(min=0).sqrt()
            best = p.topk(min(BEST, p.shape[1]), -1).values
            better = torch.where(p > own.exp()[:, None], p, 0.0).sum(-1)
            parts.append([part.numpy() for part in (own, entropy, variance, spread, best, better)])
        own_, entropy_, variance_, spread_, best_, better_ = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        return cls(
            sample=sample, logits=logits, temperature=temperature,
            logprob=own_, entropy=entropy_, variance=variance_, spread=spread_, best=best_, better=better_,
        )  # fmt: skip

    def under(self, change: Callable[[Tensor, slice], Tensor]) -> Floats:
        """Return the tokens' log-probabilities `[N]` under changed logits.

        Args:
            change: Maps the logits `[n, V]` of a stretch of tokens, float64 and before the temperature, to the logits whose
                softmax is taken.
        """
        parts = []
        for rows in chunks(self.logits):
            token = torch.from_numpy(self.sample.tokens[rows.start : rows.stop])[:, None]
            logp = change(self.logits[rows].double(), rows).log_softmax(-1)
            parts.append(logp.gather(-1, token)[:, 0].numpy())
        return np.concatenate(parts)


def chunks(logits: Tensor | Logits) -> Iterator[slice]:
    """Yield slices of the rows of logits `[N, V]`, small enough for copies in float64."""
    count = max(1, CHUNK // logits.shape[1])
    return (slice(first, min(first + count, len(logits))) for first in range(0, len(logits), count))
