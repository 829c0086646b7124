"""Work on a batch that needs no model, spread over the actor's ranks: each fetches rows of its own from verl's TransferQueue.

The driver sends only keys, in whole groups of rows that belong together, and the results are as small. A rank takes `TOGETHER`
rows at a time, so that its memory does not grow with the batch either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import transfer_queue as tq
from mismatch_ext.adapters.verl.worker.kl import BASELINE
from mismatch_ext.adapters.verl.worker.measuring import MASK, ROLLOUT, PartMeasured, fields_of, measured
from tensordict import TensorDict
from torch import Tensor, tensor
from verl.workers.utils.padding import response_to_nested

from mismatch_ext.kl import KlTerm

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


def kl_of(groups: Sequence[Group], partition: str, term: KlTerm, *, baseline: bool) -> list[float]:
    """Return the sums of `KlTerm.sums` over groups of rows, and put their leave-one-out baseline into the batch.

    Args:
        groups: Rows whose responses answer the same prompt, whole.
        partition: The batch's.
        term: Estimator, target and ratio.
        baseline: Whether one is needed.
    """
    total = [0.0, 0.0, 0.0]
    for block in _blocks(groups):
        keys = [key for group in block for key in group]
        wanted = [*KL_FIELDS, ROLLOUT] if baseline and term.config.ratio != "none" else list(KL_FIELDS)
        found = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=wanted)
        nested, padded = found[MASK], found.to_padded_tensor()
        sums = term.sums(*(padded[name] for name in KL_FIELDS))
        total = [a + b for a, b in zip(total, sums.tolist(), strict=True)]
        if baseline:
            numbers = tensor([number for number, group in enumerate(block) for _ in group])
            values = block_baseline(padded, term, numbers)
            fields = TensorDict({BASELINE: response_to_nested(values, nested)}, batch_size=len(keys))
            tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields)
    return total


def block_baseline(fields: Any, term: KlTerm, groups: Tensor) -> Tensor:
    """Return the leave-one-out baseline of each token `[B, T]`, nats; see `KlTerm.baseline`.

    Args:
        fields: `old_log_probs`, `ref_log_prob` and `response_mask` before rejection `[B, T]`; with `rollout_log_probs` where the
            engine reports them.
        term: The run's.
        groups: The group of each row `[B]`.
    """
    rollout = fields[ROLLOUT] if ROLLOUT in fields else None
    old, reference, mask = (fields[name] for name in KL_FIELDS)
    return term.baseline(old, reference, mask, groups, rollout)


def _blocks(groups: Sequence[Group]) -> Iterator[list[Group]]:
    block: list[Group] = []
    for group in groups:
        if block and sum(map(len, block)) + len(group) > TOGETHER:
            yield block
            block = []
        block.append(group)
    if block:
        yield block
