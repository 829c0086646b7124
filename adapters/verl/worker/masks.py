"""Sampling masks in verl's FSDP engine: they travel as two fields of a batch, and every pass that scores it applies them.

Shapes: T tokens of a sample, prompt included, N rows of logits of a forward pass, each of which predicts the next token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.verl.replay import names
from mismatch_ext.adapters.verl.rollout.masks import IDS, SIZES, support_of
from mismatch_ext.patches.verl.response_logprobs import scoring_with
from torch import Tensor
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank, get_ulysses_sequence_parallel_world_size

from mismatch_ext.config import MismatchConfig, SamplingMaskConfig
from mismatch_ext.errors import RecordError, ReplayError
from mismatch_ext.ranks import WORLD, together
from mismatch_ext.sampling_mask import TokenSupport, support_logprobs

if TYPE_CHECKING:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead as _Host
else:
    _Host = object

ROW = "mismatch_mask_row"


class MaskMixin(_Host):
    """Overrides the methods of verl's engine that run its model; `super()` leads to this package's other mixins first."""

    block: MismatchConfig | None
    _of_samples: list[TokenSupport] | None = None  # masks of the running mini-batch, by sample
    _of_rows: TokenSupport | None = None  # masks of the running micro-batch, by row of logits
    _scored = 0  # how many passes took log-probabilities over masks
    _ids = _tokens = 0  # ids in the masks of updates, and tokens with a mask, since `mask_metrics` was called last

    @property
    def _masking(self) -> SamplingMaskConfig | None:
        return None if self.block is None else self.block.sampling_mask

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """Run a mini-batch as the parent does, its log-probabilities over the tokens that were left to sample from.

        Raises:
            RecordError: The masks are not those of a sample's tokens, on any rank; names it. No forward pass has run then.
            ReplayError: The batch has no masks.
        """
        if self._masking is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        found: list[TokenSupport] | None = None
        with together(WORLD):
            found = self._read(data)
        data = data.exclude(IDS, SIZES)  # a copy: what has been read need not be split, or moved to the device
        if found is not None:
            data[ROW] = torch.arange(len(data))
            if not forward_only:
                self._ids += sum(one.ids.numel() for one in found)
                self._tokens += sum(int((one.counts > 0).sum()) for one in found)
        self._of_samples = found
        try:
            return super().forward_backward_batch(data, loss_function, forward_only)
        finally:
            self._of_samples = None

    def _read(self, data: Any) -> list[TokenSupport]:
        """Return the masks of each sample; the position of a token has the mask of the token after it."""
        if IDS not in data or SIZES not in data:
            raise ReplayError(
                f"mismatch.sampling_mask, but the batch of {len(data)} samples has no {IDS!r} and {SIZES!r}: something between "
                "the agent loops and this pass dropped them, or an agent loop's process is not this package's. Pass them on with "
                "the other fields."
            )
        vocabulary = int(self.model_config.hf_config.get_text_config().vocab_size)
        rows = zip(
            names(data, self.rank),
            [ids.cpu() for ids in data["input_ids"].unbind()],
            *(data[name].unbind() for name in (IDS, SIZES, "loss_mask")),
            strict=True,
        )
        return [_of_sample(*row, vocabulary=vocabulary) for row in rows]

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """Run a micro-batch as the parent does, over the masks of its samples.

        Raises:
            ReplayError: verl took its log-probabilities where masks are not replayed.
        """
        if self._of_samples is None:
            return super().forward_step(micro_batch, loss_function, forward_only)
        rows = TokenSupport.joined([self._of_samples[row] for row in micro_batch[ROW].tolist()])
        before, self._of_rows = self._scored, rows
        try:
            found = super().forward_step(micro_batch, loss_function, forward_only)
        finally:
            self._of_rows = None
        if self._scored == before:
            raise ReplayError(
                f"mismatch.sampling_mask: {type(self).__name__} scored a micro-batch without verl's logprobs_from_logits, where "
                "masks are replayed. Remove what overrides prepare_model_outputs, or mismatch.sampling_mask."
            )
        return found

    def prepare_model_outputs(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a pass's outputs as the parent does, with log-probabilities over the masks."""
        if self._of_rows is None:
            return super().prepare_model_outputs(*args, **kwargs)
        with scoring_with(self._score):
            return super().prepare_model_outputs(*args, **kwargs)

    def _score(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log-probabilities of the next tokens `[N]` over their masks; 0 where nothing was sampled."""
        assert self._of_rows is not None
        rows, ranks = len(labels), get_ulysses_sequence_parallel_world_size()
        rank = get_ulysses_sequence_parallel_rank() if ranks > 1 else 0
        support = self._of_rows.padded(rows * ranks).slice(rank * rows, (rank + 1) * rows)
        self._scored += 1
        return support_logprobs(logits, labels, support)

    def mask_metrics(self) -> dict[str, float]:
        """Return the mean size of the masks that were trained on since the last call; all ranks must call this."""
        if self._masking is None:
            return {}
        total, count = (sum(one) for one in zip(*WORLD.gather((self._ids, self._tokens)), strict=True))
        self._ids = self._tokens = 0
        return {"sampling_mask_size": total / count} if count else {}


def _of_sample(
    name: str, tokens: Tensor, ids: Tensor, sizes: Tensor, loss_mask: Tensor, *, vocabulary: int
) -> TokenSupport:
    """Return the masks of one sample `[T]`.

    A sample without a loss has no masks: verl fills batches up with such samples, whose tokens nobody has sampled.
    """
    mask = loss_mask.cpu().bool()
    if not bool(mask.any()):
        return TokenSupport.empty(len(tokens), vocabulary)
    support, given = support_of(ids, sizes, vocabulary), len(tokens) - len(mask)
    try:
        support.check_sampled(tokens[given:].tolist(), mask.tolist(), name)
    except RecordError as error:
        raise RecordError(
            f"mismatch.sampling_mask: {error} Give a pass the tokens that were sampled, with {IDS!r} and {SIZES!r} of their rows."
        ) from error
    return TokenSupport.joined([TokenSupport.empty(given - 1, vocabulary), support, TokenSupport.empty(1, vocabulary)])
