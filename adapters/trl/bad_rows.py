"""Bad rows in TRL: what its loss gets instead of their numbers, so that they alone have loss weight 0.

TRL divides by numbers of tokens and rows, and its masks change these numbers. So a bad row stays in the batch and keeps its
mask. Its log-probabilities and entropies become constants where the scoring pass returns them, and its advantage is 0: nothing
that TRL's loss makes of the row has a gradient. A mixture's auxiliary loss has no loss weights, so that the row stays in it.
Constants and the batch's other numbers are equal, so that each ratio is 1 and each KL is 0, and what TRL logs of the row is
finite.

TRL shuffles rows and cuts them into micro-batches, so that the scoring pass knows a row by its tokens alone. If two rows of a
batch have the same prompt and completion and one of them is bad, nothing tells them apart there: both are bad. A row that is
trained on together with a later batch is still known, for one batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mismatch_ext.adapters.trl.replay import RowKey, Scores
from torch import Tensor

from mismatch_ext.bad_rows import FEW, BadRows
from mismatch_ext.rollout import RolloutRecord

NEUTRAL = {
    "advantages": 0.0,
    "old_per_token_logps": 0.0,
    "old_logps": 0.0,
    "sampling_per_token_logps": 0.0,
    "ref_per_token_logps": 0.0,
    "importance_sampling_ratio": 1.0,
}
"""What a bad row has instead, by TRL's keys of its batches; 0 is also the constant of `as_constants`."""
KEPT = 2
"""Batches whose rows are remembered: a user's replay buffer may train on rows of the batch before."""


class MarkedRows:
    """The rows of the last batches, and which of them are bad; of a row in several batches, the newest one decides."""

    def __init__(self) -> None:
        self._batches: deque[tuple[set[RowKey], set[RowKey]]] = deque(maxlen=KEPT)

    @property
    def has_bad(self) -> bool:
        """Whether a row of these batches is bad."""
        return any(bad for _, bad in self._batches)

    def add(self, rows: set[RowKey], bad: set[RowKey]) -> None:
        """Add a batch, and forget the oldest one."""
        self._batches.append((rows, bad))

    def flags_of(self, keys: Sequence[RowKey]) -> Tensor:
        """Return which of some rows are bad `[B]`, bool; rows of no known batch are not."""
        return torch.tensor([self._is_bad(key) for key in keys], dtype=torch.bool)

    def _is_bad(self, key: RowKey) -> bool:
        for rows, bad in reversed(self._batches):
            if key in bad:
                return True
            if key in rows:
                return False
        return False


def take_out(output: dict[str, Any], bad: Tensor) -> None:
    """Replace the numbers of bad rows `[B]` in a batch; the other rows keep theirs."""
    for name, value in NEUTRAL.items():
        values = output.get(name)
        if values is not None:
            of_rows = bad.view(-1, *[1] * (values.dim() - 1))
            output[name] = torch.where(of_rows, value, values)


def as_constants(scores: Scores, bad: Tensor) -> Scores:
    """Return what a scoring pass returned, in which rows `[B]` have log-probability 0, and no gradient."""
    logps, entropies, auxiliary = scores
    rows = bad.to(logps.device)[:, None]
    logps = torch.where(rows, 0.0, logps)
    if entropies is not None:
        # Their values stay, because a quantile of all entropies chooses which tokens of the other rows count.
        entropies = torch.where(rows, entropies.detach(), entropies)
    return logps, entropies, auxiliary


def judge_records(bad: BadRows, records: Sequence[RolloutRecord | None], weight_version: int) -> None:
    """Call rows bad whose record has a fault or is of other weights."""
    for row, record in enumerate(records):
        if record is None:
            continue  # it was called bad when no record was found
        version = record.provenance.weight_version
        if record.fault is not None:
            bad.add(row, record.fault.reason, record.fault.message)
        elif version != weight_version:
            message = f"row {row} was sampled with weight version {version}, but the engine is at {weight_version}."
            bad.add(row, "weight_version", message)


def include_equal_rows(bad: BadRows, keys: Sequence[RowKey]) -> set[RowKey]:
    """Call rows bad that have the tokens of a bad row, and return by what the scoring pass finds all of them."""
    found: dict[RowKey, int] = {}
    for row in sorted(bad.faults):
        # A completion that was turned into padding has no loss weight in any case.
        if keys[row][1]:
            found.setdefault(keys[row], row)
    for row, key in enumerate(keys):
        if key in found and row not in bad.faults:
            fault = bad.faults[found[key]]
            bad.add(row, fault.reason, f"row {row} has the tokens of row {found[key]}, which is bad: {fault.message}")
    return set(found)


def is_nowhere_finite(scores: Tensor, mask: Tensor) -> bool:
    """Tell whether all rows with sampled tokens, at least `FEW`, have log-probabilities `[B, T]` that are not finite."""
    sampled = mask.bool()
    broken = ~scores.isfinite() & sampled
    rows = int(sampled.any(1).sum())
    return rows >= FEW and int(broken.any(1).sum()) == rows


def mask_of(output: Mapping[str, Any], bad: BadRows) -> Tensor:
    """Return the policy's tokens of the rows that are not bad `[B, T]`, in the dtype of TRL's masks."""
    mask: Tensor = output["completion_mask"] * output.get("tool_mask", 1)
    return mask.masked_fill(bad.flags(mask.device)[:, None], 0)
