"""Sampling masks in TRL: they travel with the rows of a batch, as `inputs["sampling_mask"]`, and its scoring passes use them.

TRL computes log-probabilities inside of its fused output projection, a chunk of rows at a time, from hidden states either of all
positions or only of those that count. `MaskedPass` knows which tokens come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from mismatch_ext.adapters.trl.replay import RowKey, row_key
from mismatch_ext.patches.vllm.top_logprobs import SampledLogprobs, top_logprobs
from torch import Tensor

from mismatch_ext.errors import RecordError, ReplayError
from mismatch_ext.patching import Patch
from mismatch_ext.ranks import Ranks
from mismatch_ext.rollout import RolloutRecord
from mismatch_ext.sampling_mask import LeftTokens, TokenSupport, head_logprobs, supports_of


@dataclass(frozen=True)
class RowMask:
    """The masks of one completion, with what its row is found by."""

    row: RowKey
    support: TokenSupport


@dataclass(frozen=True)
class EngineMasks:
    """Makes masks of the most likely tokens that an engine reports after truncation."""

    asked: int  # tokens that the engine is asked for; it returns the sampled one in addition
    vocabulary: int  # tokens that its logits are over, at least `asked`

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Patches that keep these tokens as numbers while the engine generates; none where each token has to be an object."""
        return top_logprobs()

    def of(self, result: tuple[Any, ...], outputs: Sequence[Any] | None) -> tuple[list[TokenSupport], tuple[Any, ...]]:
        """Return each completion's masks, and the result with the sampled tokens alone; `outputs` is None without `patches`."""
        prompts, completions, tops, ids = result
        if tops is None or ids is None:
            raise RecordError("the engine returned no log-probabilities, of which sampling masks are made.")
        kept = _kept(outputs or ())
        if kept or (outputs is not None and not outputs):
            left = [self._left_of(row, tokens, kept) for row, tokens in enumerate(completions)]
            return supports_of(left, asked=self.asked, vocabulary=self.vocabulary), result
        supports, sampled = [], []
        for row, (tokens, values, names) in enumerate(zip(completions, tops, ids, strict=True)):
            found = TokenSupport.from_top(names, values, asked=self.asked, vocabulary=self.vocabulary, name=str(row))
            supports.append(found)
            sampled.append([[top[of.index(token)]] for token, top, of in zip(tokens, values, names, strict=True)])
        return supports, (prompts, completions, sampled, [[[token] for token in tokens] for tokens in completions])

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


def masks_of(records: Sequence[RolloutRecord]) -> list[RowMask]:
    """Return the masks of rollouts; an engine that was asked for masks and gave none has been refused before."""
    found = []
    for record in records:
        assert record.support is not None  # CheckedGeneration has read it
        found.append(RowMask(row_key(record.prompt_ids, record.response_ids), record.support))
    return found


def mean_size(masks: Sequence[RowMask], ranks: Ranks, device: torch.device) -> float:
    """Return how many tokens were left to sample from, on average over the sampled tokens of all ranks."""
    mine = [
        sum(mask.support.ids.numel() for mask in masks),
        sum(int((mask.support.counts > 0).sum()) for mask in masks),
    ]
    ids, sampled = ranks.sum(torch.tensor(mine, dtype=torch.float64, device=device)).tolist()
    return float(ids / max(sampled, 1))


def masks_of_rows(masks: Sequence[RowMask], keys: Sequence[RowKey]) -> list[RowMask] | None:
    """Return the mask of each row of a scoring pass, found by its tokens; None if some are not known.

    Rows of the same tokens have one mask in every pass, whatever part of a batch it is over.
    """
    known: dict[RowKey, RowMask] = {}
    for mask in masks:
        known.setdefault(mask.row, mask)
        known.setdefault((mask.row[0], b""), mask)  # a completion may have been turned into padding
    found = [known.get(key) for key in keys]
    return None if None in found else cast("list[RowMask]", found)


class MaskedPass:
    """Scores the tokens of one scoring pass over their masks, in the order in which TRL's fused head comes to them."""

    def __init__(self, masks: Sequence[RowMask], tokens: Tensor, attention_mask: Tensor, length: int) -> None:
        wanted = attention_mask[:, 1:].bool().clone()
        wanted[:, : wanted.shape[1] - length] = False
        self._wanted = wanted
        self._labels = tokens[:, 1:]
        self._ends = wanted.sum(1).cumsum(0).tolist()
        kept = wanted.any(1).tolist()
        parts = [mask.support if keep else mask.support.slice(0, 0) for mask, keep in zip(masks, kept, strict=True)]
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
        if places is None:
            return head_logprobs(hidden, weight, bias, labels, support, **scaling)
        found = head_logprobs(hidden[places], weight, bias, labels[places], support, **scaling)
        return torch.zeros(count, dtype=found.dtype, device=found.device).index_put((places,), found)
