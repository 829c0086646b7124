"""The bad rows of a batch of verl's keys: what the driver does with them before and after verl computes advantages.

verl's loss takes its denominators from `loss_mask`, and multiplies terms by `response_mask`. So a row whose `response_mask` is 0
leaves the losses of actor and critic, and no other row's gradient changes, but under clip_cov and kl_cov, which choose among all
tokens of a micro-batch. The mask is set after verl has computed advantages, because several estimators normalize them over
`response_mask`. A bad row stays in its group's statistics, and in the mean of weights that verl normalizes.

Shapes: T tokens of a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue as tq
from mismatch_ext.adapters.verl.bad_rows import BAD, marks
from mismatch_ext.adapters.verl.measure import MASK, OLD, REFERENCE, ROLLOUT, BadKeys, finite
from tensordict import TensorDict
from torch import Tensor


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


def take_out(batch: Any, bad: BadKeys) -> None:
    """Take bad rows out of verl's losses, in the batch's queue, once advantages are computed."""
    keys = [key for key in batch.keys if key in bad]
    masks = _get(batch, keys, [MASK])[MASK].unbind()
    _put(batch, keys, {MASK: _nested([torch.zeros_like(mask) for mask in masks])})


def _get(batch: Any, keys: list[str], names: list[str]) -> Any:
    return tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=names)


def _put(batch: Any, keys: list[str], fields: dict[str, Tensor]) -> None:
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(keys)))
    if batch.fields is not None:
        # Workers fetch only the fields that the batch lists.
        batch.fields = [*batch.fields, *(name for name in fields if name not in batch.fields)]


def _nested(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
