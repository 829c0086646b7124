"""Work on a batch that needs no model, spread over the actor's ranks: each fetches rows of its own from verl's TransferQueue.

The driver sends only keys, in whole groups of rows that belong together, and the results are as small. A rank takes `TOGETHER`
rows at a time, so that its memory does not grow with the batch either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transfer_queue as tq
from mismatch_ext.adapters.verl.worker.kl import BASELINE, sampled_by
from mismatch_ext.adapters.verl.worker.measuring import MASK, ROLLOUT, PartMeasured, fields_of, measured
from tensordict import TensorDict
from torch import Tensor
from verl.workers.utils.padding import response_to_nested

from mismatch_ext.config import KlConfig
from mismatch_ext.kl import kl_baseline, kl_sums
from mismatch_ext.sums import Sums, merged

Group = list[str]
"""Keys of rows that belong together."""
TOGETHER = 64
"""Rows that a rank fetches at a time, unless a group has more."""
KL_FIELDS = ("old_log_probs", "ref_log_prob", MASK)


def shares(groups: Sequence[Group], ranks: int) -> list[list[Group]]:
    """Return the groups of each rank, in their order."""
    return [list(groups[rank::ranks]) for rank in range(ranks)]


def looked_at(keys: Sequence[str], partition: str, first: int) -> list[PartMeasured]:
    """Look at rows that no pass scores, `TOGETHER` at a time.

    Args:
        keys: The rows' keys, in the batch's order.
        partition: The batch's.
        first: Number of the first part.
    """
    found = []
    for number, at in enumerate(range(0, len(keys), TOGETHER)):
        data = tq.kv_batch_get(
            keys=list(keys[at : at + TOGETHER]), partition_id=partition, select_fields=[ROLLOUT, MASK]
        )
        found.append(measured(fields_of(data), part=first + number))
    return found


def kl_of(groups: Sequence[Group], partition: str, section: KlConfig) -> Sums:
    """Return `kl_sums` over groups of rows, and put their leave-one-out baseline into the batch if the section has one.

    Args:
        groups: Rows whose responses answer the same prompt, whole.
        partition: The batch's.
        section: The `kl` section.
    """
    sums = [kl_sums(*torch.zeros(3, 0))]
    for block in _blocks(groups):
        keys = [key for group in block for key in group]
        wanted = [*KL_FIELDS, ROLLOUT] if section.has_baseline and section.ratio != "none" else list(KL_FIELDS)
        found = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=wanted)
        nested, padded = found[MASK], found.to_padded_tensor()
        sums.append(kl_sums(*(padded[name] for name in KL_FIELDS)))
        if section.has_baseline:
            numbers = torch.tensor([number for number, group in enumerate(block) for _ in group])
            values = block_baseline(padded, section, numbers)
            fields = TensorDict({BASELINE: response_to_nested(values, nested)}, batch_size=len(keys))
            tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields)
    return merged(*sums)


def block_baseline(fields: Any, section: KlConfig, groups: Tensor) -> Tensor:
    """Return the leave-one-out baseline of each token `[B, T]`, nats; see `kl_baseline`.

    Args:
        fields: `old_log_probs`, `ref_log_prob` and `response_mask` before rejection `[B, T]`; with `rollout_log_probs` where the
            engine reports them.
        section: The `kl` section.
        groups: The group of each row `[B]`.
    """
    behavior = sampled_by(fields) if section.ratio != "none" else None
    old, reference, mask = (fields[name] for name in KL_FIELDS)
    return kl_baseline(old, reference, mask.bool(), section, behavior=behavior, groups=groups)


def _blocks(groups: Sequence[Group]) -> Iterator[list[Group]]:
    block: list[Group] = []
    for group in groups:
        if block and sum(map(len, block)) + len(group) > TOGETHER:
            yield block
            block = []
        block.append(group)
    if block:
        yield block
