"""The tokens that were left to sample from, read off an engine's most likely ones after truncation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mismatch_ext.errors import RecordError
from mismatch_ext.sampling_mask.support import TokenSupport

# Positions that are read together; until then they hold all that the engine reported.
PENDING = 64


def support_of_top(
    top_ids: Sequence[Sequence[int]],
    top_logprobs: Sequence[Sequence[float | None]],
    *,
    asked: int,
    vocabulary: int,
    name: str = "",
) -> TokenSupport:
    """Return what was left to sample from, by an engine's most likely tokens of each position and their log-probabilities.

    Log-probabilities from after truncation (vLLM's `logprobs_mode="processed_logprobs"`) are -inf for what was cut off. Where
    one of the tokens that were asked for is cut off, every token that is left is among them: the support is the engine's own,
    exactly.

    Args:
        top_ids: Ids of each position, the sampled token's among them.
        top_logprobs: Their log-probabilities after truncation, in the same order.
        asked: Most likely tokens that were asked for per position, the sampled one not counted.
        vocabulary: Tokens that the engine's logits are over.
        name: The response's name.

    Raises:
        RecordError: None of the tokens asked for is cut off, so that there may be more; or a position has no log-probability.
    """
    rows = []
    for token, (ids, logprobs) in enumerate(zip(top_ids, top_logprobs, strict=True)):
        left = [one for one, value in zip(ids, logprobs, strict=True) if value is not None and value > -math.inf]
        # Where none is cut off there may be more, however few were reported.
        known = len(left) < len(ids) and len(left) < min(asked, vocabulary)
        if not known and len(left) < vocabulary:
            raise _unknown(name, token, len(left), asked)
        if not left:
            raise _none_left(name, token)
        rows.append(left)
    return TokenSupport.from_lists(rows, vocabulary, name)


class LeftTokens:
    """What was left to sample from at each position of a response, taken from an engine's arrays as it samples.

    As `support_of_top`, without an object for each token that the engine reports. A token that was left takes 4 bytes, a position
    9, and what was cut off none.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[NDArray[Any], NDArray[Any]]] = []
        # Ids of the most likely tokens that were left, how many these are, whether any was cut off, and the sampled token.
        self._read: list[tuple[Any, ...]] = []

    def take(self, ids: NDArray[Any], logprobs: NDArray[Any]) -> None:
        """Add positions.

        Args:
            ids: The sampled token, then the most likely ones, the sampled one perhaps among them `[positions, 1 + asked]`.
            logprobs: Their log-probabilities after truncation, NaN and -inf where a token could not be sampled.
        """
        self._pending.append((ids, logprobs))
        if len(self._pending) == PENDING:
            self._settle()

    def _settle(self) -> None:
        if not self._pending:
            return
        ids, logprobs = (np.concatenate(columns) for columns in zip(*self._pending, strict=True))
        self._pending = []
        left = logprobs > -math.inf  # NaN is not
        kept, sampled = left[:, 1:], np.where(left[:, 0], ids[:, 0], -1)
        self._read.append(
            (ids[:, 1:][kept].astype(np.int32), kept.sum(1, dtype=np.int32), ~left.all(1), sampled.astype(np.int32))
        )

    def support(self, *, asked: int, vocabulary: int, name: str = "") -> TokenSupport:
        """Return the positions so far.

        Args:
            asked, vocabulary, name: As for `support_of_top`.

        Raises:
            RecordError: As `support_of_top`.
        """
        self._settle()
        if not self._read:
            return TokenSupport.empty(0, vocabulary)
        ids, counts, cut, sampled = (torch.from_numpy(np.concatenate(one)) for one in zip(*self._read, strict=True))
        place = torch.repeat_interleave(torch.arange(len(counts)), counts)
        # A sampled token may be less likely than all that were asked for.
        besides = sampled >= 0
        besides[place[ids == sampled[place]]] = False
        total = counts.long() + besides
        wrong = ~(cut & (total < min(asked, vocabulary))) & (total < vocabulary)
        for token in (wrong | (total == 0)).nonzero()[:1, 0].tolist():
            raise _unknown(name, token, int(total[token]), asked) if wrong[token] else _none_left(name, token)
        ids, place = torch.cat([ids, sampled[besides]]), torch.cat([place, besides.nonzero()[:, 0]])
        return TokenSupport.from_places(ids, place, len(total), vocabulary, name)


def _unknown(name: str, token: int, left: int, asked: int) -> RecordError:
    return RecordError(
        f"rollout {name}, token {token}: at least {left} tokens were left to sample from, and the engine was asked "
        f"for {asked}: what is left is not known. Raise mismatch.sampling_mask.max_support above {asked}, or truncate "
        "harder (top_k)."
    )


def _none_left(name: str, token: int) -> RecordError:
    return RecordError(f"rollout {name}, token {token}: the engine reported no token that could be sampled.")
