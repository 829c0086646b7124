"""Sampling masks in TRL: made of the engine's answers, and used in every scoring pass over the rows that they belong to.

TRL computes log-probabilities inside of its fused output projection, a chunk of rows at a time, from hidden states either of all
positions or only of those that count. `MaskedPass` knows which tokens come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mismatch_ext.patches.vllm.top_logprobs import SampledLogprobs, top_logprobs
from torch import Tensor

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.errors import RecordError, ReplayError
from mismatch_ext.patching import Patch
from mismatch_ext.ranks import Ranks
from mismatch_ext.rollout import RolloutRecord
from mismatch_ext.sampling_mask import LeftTokens, TokenSupport, head_logprobs, supports_of


@dataclass(frozen=True)
class EngineMasks:
    """Makes masks of the most likely tokens that an engine reports after truncation."""

    asked: int  # tokens that the engine is asked for; it returns the sampled one in addition
    vocabulary: int  # tokens that its logits are over, at least `asked`

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Patches that keep these tokens as numbers while the engine generates; none where each token has to be an object."""
        return top_logprobs()

    def of(
        self, result: tuple[Any, ...], outputs: Sequence[Any] | None, bad: BadRows
    ) -> tuple[list[TokenSupport | None], tuple[Any, ...]]:
        """Return each completion's masks, None for bad rows, and the result with the sampled tokens alone.

        Args:
            result: What TRL's wrapper returned.
            outputs: The engine's outputs; None without `patches`.
            bad: Takes the rows of which no masks can be made.
        """
        prompts, completions, tops, ids = result
        if tops is None or ids is None:
            raise RecordError("the engine returned no log-probabilities, of which sampling masks are made.")
        kept = _kept(outputs or ())
        if kept or (outputs is not None and not outputs):
            left = [self._left_of(row, tokens, kept) for row, tokens in enumerate(completions)]
            return self._judged(left, bad), result
        supports: list[TokenSupport | None] = []
        sampled = []
        for row, (tokens, values, names) in enumerate(zip(completions, tops, ids, strict=True)):
            support = None
            with bad.judging(row, "mask"):
                support = TokenSupport.from_top(
                    names, values, asked=self.asked, vocabulary=self.vocabulary, name=str(row)
                )
            supports.append(support)
            sampled.append([[top[of.index(token)]] for token, top, of in zip(tokens, values, names, strict=True)])
        _expect_some(supports, bad)
        return supports, (prompts, completions, sampled, [[[token] for token in tokens] for tokens in completions])

    def _judged(self, left: Sequence[LeftTokens], bad: BadRows) -> list[TokenSupport | None]:
        """Return the support of each completion; None for bad rows."""
        try:
            return [*supports_of(left, asked=self.asked, vocabulary=self.vocabulary)]
        except RecordError:
            pass  # one pass over all rows does not say which of them are bad
        supports: list[TokenSupport | None] = []
        for row, tokens in enumerate(left):
            support = None
            with bad.judging(row, "mask"):
                support = tokens.support(asked=self.asked, vocabulary=self.vocabulary, name=str(row))
            supports.append(support)
        _expect_some(supports, bad)
        return supports

    def _left_of(self, row: int, tokens: Any, kept: dict[int, LeftTokens]) -> LeftTokens:
        if not tokens:
            return LeftTokens()
        if (left := kept.get(id(tokens))) is None:
            raise RecordError(
                f"rollout {row}: its tokens are not those of an output of LLM.generate: something stands between the engine and "
                "TRL, so that its sampling masks are not known. Remove it, or mismatch.sampling_mask."
            )
        return left


def _kept(outputs: Sequence[Any]) -> dict[int, LeftTokens]:
    """Return what outputs have kept as numbers, by the identity of the token list that TRL hands on."""
    # With tensor parallelism every rank has the outputs of all ranks, and TRL takes the rank's own.
    rows = [row for output in outputs for row in output.outputs]
    return {id(row.token_ids): row.logprobs.left for row in rows if isinstance(row.logprobs, SampledLogprobs)}


def _expect_some(supports: Sequence[TokenSupport | None], bad: BadRows) -> None:
    """Refuse an engine none of whose answers has masks: that is no fault of single rows."""
    if bad.spoil_all and all(support is None for support in supports):
        raise RecordError(bad.faults[0].message)


def support_of(record: RolloutRecord, vocabulary: int) -> TokenSupport:
    """Return the masks of a rollout over that many tokens; those of a bad row are empty, so that it scores 0."""
    return TokenSupport.empty(len(record.response_ids), vocabulary) if record.support is None else record.support


def mean_size(supports: Sequence[TokenSupport], ranks: Ranks, device: torch.device) -> float:
    """Return how many tokens were left to sample from, on average over the sampled tokens of all ranks."""
    ids = sum(support.ids.numel() for support in supports)
    sampled = sum(np.count_nonzero(np.diff(support.offsets.numpy())) for support in supports)
    ids, sampled = ranks.sum(torch.tensor([ids, sampled], dtype=torch.float64, device=device)).tolist()
    return float(ids / max(sampled, 1))


class MaskedPass:
    """Scores the tokens of one scoring pass over their masks, in the order in which TRL's fused head comes to them."""

    def __init__(self, supports: Sequence[TokenSupport], tokens: Tensor, attention_mask: Tensor, length: int) -> None:
        wanted = attention_mask[:, 1:].bool().clone()
        wanted[:, : wanted.shape[1] - length] = False
        self._wanted = wanted
        self._labels = tokens[:, 1:]
        self._ends = wanted.sum(1).cumsum(0).tolist()
        kept = wanted.any(1).tolist()
        parts = [support if keep else support.slice(0, 0) for support, keep in zip(supports, kept, strict=True)]
        self._support = TokenSupport.joined(parts)
        self._row = self._token = self.done = 0  # `done` counts how often all tokens were scored

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **scaling: Any
    ) -> Tensor | None:
        """Return the log-probabilities of the next tokens, 0 where a position is not of a completion."""
        count, width = len(labels), self._labels.shape[1]
        if not count or not self._ends[-1]:
            return None
        rows = slice(self._row, self._row + count // width)
        wanted = self._wanted[rows].flatten().to(labels.device)
        expected = self._labels[rows].flatten().to(labels.device)
        compact = self._labels[self._wanted][self._token : self._token + count].to(labels.device)
        packed = torch.equal(compact, labels)
        whole = count % width == 0 and len(expected) == count and torch.equal(labels[wanted], expected[wanted])
        # Rows without a completion agree with anything.
        if whole and (not packed or bool(wanted.all())):
            places = wanted.nonzero()[:, 0]
            self._row = rows.stop
            last = self._ends[rows.stop - 1]
        else:
            places, last = None, self._token + count
            if not packed:
                raise ReplayError(
                    f"mismatch.sampling_mask: TRL's fused head is given {count} tokens that are not those which come next "
                    "in the batch. Remove what overrides _get_per_token_logps_and_entropies or the model's forward, or the key."
                )
        support = self._support.slice(self._token, last)
        self._token = last
        if last == self._ends[-1] and (places is None or self._row == len(self._labels)):
            self._row = self._token = 0
            self.done += 1
        # An error of one rank, in the middle of TRL's pass, would leave the others waiting: what is not finite is judged later.
        scaling["expect_finite"] = False
        if places is None:
            return head_logprobs(hidden, weight, bias, labels, support, **scaling)
        found = head_logprobs(hidden[places], weight, bias, labels[places], support, **scaling)
        return torch.zeros(count, dtype=found.dtype, device=found.device).index_put((places,), found)
