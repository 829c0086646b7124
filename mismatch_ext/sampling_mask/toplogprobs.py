"""The support of each position, read from the engine's top log-probabilities after truncation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mismatch_ext.errors import RecordError
from mismatch_ext.sampling_mask.support import TokenSupport

# Positions that are read together; before that, all that the engine reported about them is kept.
PENDING = 64


def support_of_top(
    top_ids: Sequence[Sequence[int]],
    top_logprobs: Sequence[Sequence[float | None]],
    *,
    asked: int,
    vocabulary: int,
    name: str = "",
) -> TokenSupport:
    """Return the support, from the engine's most likely tokens of each position and their log-probabilities.

    After truncation, log-probabilities (vLLM's `logprobs_mode="processed_logprobs"`) are -inf for tokens that were cut off. If
    one of the reported tokens was cut off, then all tokens that were kept are among the reported ones, and the support is
    exactly the engine's.

    Args:
        top_ids: Ids of each position, including the sampled token's.
        top_logprobs: Log-probabilities of these ids after truncation, in the same order.
        asked: Number of most likely tokens that were asked for per position, the sampled one not counted.
        vocabulary: Number of tokens that have logits in the engine.
        name: The response's name.

    Raises:
        RecordError: None of the reported tokens was cut off, so the support may have more; or a position has no log-probability.
    """
    rows = []
    for token, (ids, logprobs) in enumerate(zip(top_ids, top_logprobs, strict=True)):
        left = [one for one, value in zip(ids, logprobs, strict=True) if value is not None and value > -math.inf]
        # If none was cut off, the support may have more tokens, even if the engine reported few.
        known = len(left) < len(ids) and len(left) < min(asked, vocabulary)
        if not known and len(left) < vocabulary:
            raise _unknown(name, token, len(left), asked)
        if not left:
            raise _none_left(name, token)
        rows.append(left)
    return TokenSupport.from_lists(rows, vocabulary, name)


class LeftTokens:
    """The support of each position of a response, taken from an engine's arrays while it samples.

    This class does the same as `support_of_top`, but without an object for each reported token. A kept token takes 4 bytes, a
    position 9; tokens that were cut off take none.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[NDArray[Any], NDArray[Any]]] = []
        # Ids of the most likely tokens that were kept, their number, whether any was cut off, and the sampled token.
        self._read: list[tuple[Any, ...]] = []

    def take(self, ids: NDArray[Any], logprobs: NDArray[Any]) -> None:
        """Add positions.

        Args:
            ids: The sampled token, then the most likely ones, which may include the sampled one `[positions, 1 + asked]`.
            logprobs: Log-probabilities of these ids after truncation; NaN or -inf if a token could not be sampled.
        """
        self._pending.append((ids, logprobs))
        if len(self._pending) == PENDING:
            self._settle()

    def _settle(self) -> None:
        if not self._pending:
            return
        ids, logprobs = (np.concatenate(columns) for columns in zip(*self._pending, strict=True))
        self._pending = []
        left = logprobs > -math.inf  # False for NaN
        kept, sampled = left[:, 1:], np.where(left[:, 0], ids[:, 0], -1)
        self._read.append(
            (ids[:, 1:][kept].astype(np.int32), kept.sum(1, dtype=np.int32), ~left.all(1), sampled.astype(np.int32))
        )

    def support(self, *, asked: int, vocabulary: int, name: str = "") -> TokenSupport:
        """Return the support of the positions so far.

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
        # The sampled token may be less likely than all of the most likely ones.
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
