"""Sampling masks in TRL: they travel with the rows of a batch, as `inputs["sampling_mask"]`, and its scoring passes use them.

TRL computes log-probabilities inside of its fused output projection, a chunk of rows at a time, from hidden states either of all
positions or only of those that count. `MaskedPass` knows which tokens come next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mismatch_ext.adapters.trl.forward_hooks import RoutingMixin, rows_of_batch
from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.passes import RolloutPass
from mismatch_ext.adapters.trl.replay import Scores
from mismatch_ext.patches.trl.fused_head import scoring_with
from torch import Tensor

from mismatch_ext.config import SamplingMaskConfig
from mismatch_ext.errors import RecordError, ReplayError
from mismatch_ext.ranks import Ranks
from mismatch_ext.rollout import RolloutRecord
from mismatch_ext.sampling_mask import TokenSupport, head_logprobs

KEY = "sampling_mask"


@dataclass(frozen=True)
class RowMask:
    """The masks of one completion, with the tokens that they are of.

    Attributes:
        prompt: Token ids of its prompt.
        completion: The sampled token ids.
        support: The tokens that were left to sample from, for each sampled token.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    support: TokenSupport


def masks_of(records: Sequence[RolloutRecord]) -> list[RowMask]:
    """Return the masks of rollouts; an engine that was asked for masks and gave none has been refused before."""
    found = []
    for record in records:
        assert record.support is not None  # CheckedGeneration has read it
        found.append(RowMask(record.prompt_ids, record.response_ids, record.support))
    return found


def mean_size(masks: Sequence[RowMask], ranks: Ranks, device: torch.device) -> float:
    """Return how many tokens were left to sample from, on average over the sampled tokens of all ranks.

    Args:
        masks: Of this rank's completions.
        ranks: The processes that train together; all of them must call it.
        device: Where the ranks talk.
    """
    mine = [
        sum(mask.support.ids.numel() for mask in masks),
        sum(int((mask.support.counts > 0).sum()) for mask in masks),
    ]
    ids, sampled = ranks.sum(torch.tensor(mine, dtype=torch.float64, device=device)).tolist()
    return float(ids / max(sampled, 1))


def fit(masks: Sequence[RowMask], tokens: Tensor, attention_mask: Tensor, length: int) -> bool:
    """Tell whether masks are of the tokens of a scoring pass, row by row; a completion may have been turned into padding.

    Args:
        masks: One per row.
        tokens: Prompt and completion `[B, S]`.
        attention_mask: 1 for tokens that are not padding `[B, S]`.
        length: Completion positions per row, padding included.
    """
    if len(masks) != len(tokens):
        return False
    ids, real = tokens.cpu(), attention_mask.bool().cpu()
    for row, mask in enumerate(masks):
        prompt, completion = (
            ids[row, part][real[row, part]].tolist() for part in (slice(-length), slice(-length, None))
        )
        if prompt != list(mask.prompt) or completion not in ([], list(mask.completion)):
            return False
    return True


class MaskedPass:
    """Scores the tokens of one scoring pass over their masks, in the order in which TRL's fused head comes to them.

    Args:
        masks: One per row.
        tokens: Prompt and completion `[B, S]`.
        attention_mask: 1 for tokens that are not padding `[B, S]`.
        length: Completion positions per row, padding included.

    Attributes:
        done: How often all tokens were scored.
    """

    def __init__(self, masks: Sequence[RowMask], tokens: Tensor, attention_mask: Tensor, length: int) -> None:
        wanted = attention_mask[:, 1:].bool().clone()
        wanted[:, : wanted.shape[1] - length] = False
        self._wanted = wanted
        self._labels = tokens[:, 1:]
        self._ends = wanted.sum(1).cumsum(0).tolist()
        kept = wanted.any(1).tolist()
        parts = [mask.support if keep else mask.support.slice(0, 0) for mask, keep in zip(masks, kept, strict=True)]
        self._support = TokenSupport.joined(parts)
        self._row = self._token = self.done = 0

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **scaling: Any
    ) -> Tensor | None:
        """Return the log-probabilities of the next tokens, 0 where a position is not of a completion.

        Raises:
            ReplayError: The head is given other tokens than come next.
        """
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
                    f"mismatch.sampling_mask: TRL's fused head is given {count} tokens that are not those which come next in the "
                    "batch, whose masks would be another token's; whatever overrides _get_per_token_logps_and_entropies, or the "
                    "model's forward, changes them. Remove it, or mismatch.sampling_mask."
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


class SamplingMaskMixin(RoutingMixin):
    """Overrides the methods of GRPOTrainer that run its model; `MismatchTrainerMixin` sets what is active."""

    _masking: SamplingMaskConfig | None = None
    # Masks of the micro-batch whose loss is being computed; None outside of a loss.
    _micro_masks: Sequence[RowMask] | None = None
    _masked_passes = 0

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **options: Any
    ) -> Scores:
        """Score tokens as TRL does, over the masks that they were sampled with; other tokens over the vocabulary.

        Raises:
            ReplayError: TRL scored without its fused head, or other tokens than it was given.
        """
        host, rows = super()._get_per_token_logps_and_entropies, (input_ids, attention_mask, logits_to_keep)
        if self._masking is None:
            return host(model, *rows, *args, **options)
        masks = self._masks_at_hand()
        if masks is None or not fit(masks, *rows):
            return host(model, *rows, *args, **options)
        masked = MaskedPass(masks, *rows)
        with scoring_with(masked):
            scores = host(model, *rows, *args, **options)
        if not masked.done and bool(attention_mask[:, -logits_to_keep:].any()):
            raise ReplayError(
                f"mismatch.sampling_mask: {type(self).__name__} scored a batch without TRL's fused head, where masks are "
                "replayed. Remove what overrides _get_per_token_logps_and_entropies, or mismatch.sampling_mask."
            )
        self._masked_passes += 1
        return scores

    def _masks_at_hand(self) -> Sequence[RowMask] | None:
        """Return the masks of the micro-batch, or of the batch that is being scored; None where there is neither."""
        if self._micro_masks is not None:
            return self._micro_masks
        batch: RolloutPass | None = self._rollout_pass
        if batch is None or batch.joining or not batch.fresh or not batch.records:
            return None
        return masks_of(batch.records)

    def _batch_masks(self, batch: RolloutPass, output: Mapping[str, Any]) -> list[RowMask]:
        """Return the masks of a batch that has been scored, one for each row.

        Raises:
            RecordError: The batch's tokens are not those that the engine sampled.
        """
        masks = masks_of(batch.records)
        if not fit(masks, *rows_of_batch(output)):
            raise RecordError(
                "mismatch.sampling_mask: the tokens to be trained on are not those that the engine sampled, row by row, so that "
                "their masks are not known. Leave prompt_ids, completion_ids and their masks as they were sampled."
            )
        return masks

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as TRL does, over the masks that travelled with the micro-batch.

        Raises:
            RecordError: The masks are of other tokens than the micro-batch's.
            ReplayError: The micro-batch has no masks, or TRL did not score it through the pass that replay covers.
        """
        if self._masking is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        if KEY not in inputs:
            raise ReplayError(
                f"mismatch.sampling_mask, but the micro-batch has no {KEY!r}: something between "
                "_generate_and_score_completions and compute_loss dropped it. Pass it on with the other inputs."
            )
        if not fit(inputs[KEY], *rows_of_batch(inputs)):
            raise RecordError(
                "mismatch.sampling_mask: the masks that travelled with the micro-batch are of other tokens than those that are "
                f"trained on: rows moved or tokens changed without their masks. Move inputs[{KEY!r}] with the other inputs."
            )
        before = self._masked_passes
        with overridden(self, _micro_masks=inputs[KEY]):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self._masked_passes == before:
            raise ReplayError(
                "mismatch.sampling_mask, but the loss was computed without a pass over the micro-batch's tokens and masks: "
                "something overrides _get_per_token_logps_and_entropies, or gives it other tokens. Remove it, or "
                "mismatch.sampling_mask."
            )
        return loss
