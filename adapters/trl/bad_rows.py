"""Bad rows in TRL: what its loss gets instead of their numbers, so that they alone have loss weight 0.

TRL divides by numbers of tokens and rows, and its masks change these numbers. So a bad row stays in the batch and keeps its
mask. Its log-probabilities and entropies become constants where the scoring pass returns them, and its advantage is 0: nothing
that TRL's loss makes of the row has a gradient. A mixture's auxiliary loss has no loss weights, so that the row stays in it.
Constants and the batch's other numbers are equal, so that each ratio is 1 and each KL is 0, and what TRL logs of the row is
finite.

A scoring pass knows a bad row by its tokens. If two rows of a batch have the same prompt and completion and one of them is bad,
both are, also if their images differ. A replay buffer may hold rows of any earlier batch, so the run remembers a mark of each bad
row, made of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from mismatch_ext.adapters.trl.replay import Scores
from mismatch_ext.adapters.trl.rows import RowKey
from torch import Tensor

from mismatch_ext.bad_rows import BadRows
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
REMEMBERED = 100_000
"""How many bad rows a run remembers, for rows whose batch is no longer known."""


class Remembered:
    """The marks of the newest bad rows of a run."""

    def __init__(self) -> None:
        self._marks: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._marks)

    def __contains__(self, key: RowKey) -> bool:
        return _mark_of(key) in self._marks

    def add(self, keys: Iterable[RowKey]) -> None:
        """Remember rows, and forget the oldest ones."""
        for mark in map(_mark_of, keys):
            self._marks.pop(mark, None)
            self._marks[mark] = None
        while len(self._marks) > REMEMBERED:
            del self._marks[next(iter(self._marks))]


def _mark_of(key: RowKey) -> bytes:
    """Return the mark of a row of these tokens."""
    prompt, completion = key
    digest = blake2b(prompt, digest_size=8, salt=len(completion).to_bytes(8, "little"))
    digest.update(completion)
    return digest.digest()


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


def include_equal_rows(bad: BadRows, keys: Sequence[RowKey]) -> None:
    """Call rows bad that have the tokens of a bad row, because a scoring pass cannot tell them apart."""
    found: dict[RowKey, int] = {}
    for row in sorted(bad.faults):
        # A completion that was turned into padding has no loss weight in any case.
        if keys[row][1]:
            found.setdefault(keys[row], row)
    for row, key in enumerate(keys):
        if key in found and row not in bad.faults:
            fault = bad.faults[found[key]]
            bad.add(row, fault.reason, f"row {row} has the tokens of row {found[key]}, which is bad: {fault.message}")


def has_non_finite(values: Tensor, mask: Tensor) -> bool:
    """Tell whether a sampled token has a log-probability that is not finite; both are `[B, T]`."""
    return bool((~values.isfinite() & mask.bool()).any())


def mask_of(output: Mapping[str, Any], bad: BadRows) -> Tensor:
    """Return the policy's tokens of the rows that are not bad `[B, T]`, in the dtype of TRL's masks."""
    mask: Tensor = output["completion_mask"] * output.get("tool_mask", 1)
    return mask.masked_fill(bad.flags(mask.device)[:, None], 0)
