"""The bad rows of a batch of verl's keys: what the driver does with them before and after verl computes advantages.

verl's loss takes its denominators from `loss_mask`, and multiplies terms by `response_mask`. So a row whose `response_mask` is 0
leaves the losses of actor and critic, and no other row's gradient changes. The mask is set after verl has computed advantages,
because several estimators normalize them over `response_mask`; the reward of a bad row stays in its group's statistics.

Shapes: T tokens of a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue as tq
from mismatch_ext.adapters.verl.bad_rows import BAD, marks
from mismatch_ext.adapters.verl.loss import WEIGHTS
from mismatch_ext.adapters.verl.measure import BEFORE, MASK, OLD, REFERENCE, ROLLOUT, BadKeys, finite
from tensordict import TensorDict
from torch import Tensor

SMALLEST_MEAN = 1e-8
"""verl leaves weights alone whose mean is not above this."""
SELECTING = ("clip_cov", "kl_cov")
"""verl's policy losses that choose tokens by comparing all those of a micro-batch: a mask would change which they choose."""


def mark(batch: Any, bad: BadKeys) -> None:
    """Mark the bad rows of a batch for the workers, in its queue."""
    keys = list(batch.keys)
    field = marks([key in bad for key in keys])
    _put(batch, keys, {BAD: field})


def replace_non_finite(batch: Any, bad: BadKeys) -> None:
    """Replace log-probabilities of bad rows that are not finite, in the batch's queue: 0 times NaN would be NaN."""
    keys = [key for key in batch.keys if key in bad]
    data = _get(batch, keys, [ROLLOUT, OLD, REFERENCE])
    pairs = zip(data[ROLLOUT].unbind(), data[OLD].unbind(), strict=True)
    rollout, old = zip(*(finite(*pair) for pair in pairs), strict=True)
    fields = {ROLLOUT: _nested(rollout), OLD: _nested(old)}
    given = data.get(REFERENCE, None)
    if given is not None:
        rows = zip(given.unbind(), old, strict=True)
        fields[REFERENCE] = _nested([torch.where(row.isfinite(), row, policy.to(row)) for row, policy in rows])
    _put(batch, keys, fields)


def renormalize(batch: Any, bad: BadKeys, level: str) -> None:
    """Let the mean weight of good rows be 1, in the batch's queue: verl's own mean has counted the bad rows too.

    `level` is verl's `rollout_is`: the mean is one of tokens, or of rows.
    """
    good = [key for key in batch.keys if key not in bad]
    if not good:
        return
    data = _get(batch, good, [WEIGHTS, BEFORE])
    weights, masks = data[WEIGHTS].unbind(), [mask.bool() for mask in data[BEFORE].unbind()]
    sampled = [row[mask].double() for row, mask in zip(weights, masks, strict=True) if bool(mask.any())]
    if level == "sequence":
        sampled = [row.mean(0, keepdim=True) for row in sampled]
    mean = float(torch.cat(sampled).mean()) if sampled else 0.0
    if mean > SMALLEST_MEAN:
        _put(batch, good, {WEIGHTS: _nested([row / mean for row in weights])})


def take_out(batch: Any, bad: BadKeys, loss_mode: str) -> None:
    """Take bad rows out of verl's losses, in the batch's queue, once advantages are computed.

    A loss that is one of `SELECTING` gets the weight 0 for them instead of a mask. That leaves other rows as they are, but
    verl's own KL and entropy terms, and the critic's loss, keep the row.
    """
    if loss_mode not in SELECTING:
        keys = [key for key in batch.keys if key in bad]
        masks = _get(batch, keys, [MASK])[MASK].unbind()
        _put(batch, keys, {MASK: _nested([torch.zeros_like(mask) for mask in masks])})
        return
    keys = list(batch.keys)
    data = _get(batch, keys, [MASK, WEIGHTS])
    given = data.get(WEIGHTS, None)
    weights = [torch.ones(len(mask)) for mask in data[MASK].unbind()] if given is None else list(given.unbind())
    _put(batch, keys, {WEIGHTS: _nested([w * float(key not in bad) for key, w in zip(keys, weights, strict=True)])})


def _get(batch: Any, keys: list[str], names: list[str]) -> Any:
    return tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=names)


def _put(batch: Any, keys: list[str], fields: dict[str, Tensor]) -> None:
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(keys)))
    if batch.fields is not None:
        # Workers fetch only the fields that the batch lists.
        batch.fields = [*batch.fields, *(name for name in fields if name not in batch.fields)]


def _nested(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
