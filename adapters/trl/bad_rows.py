"""Bad rows in TRL: what its loss gets instead of their numbers, so that they alone have loss weight 0.

TRL divides by numbers of tokens and rows, and its masks change these numbers. So a bad row stays in the batch and keeps its
mask. Its log-probabilities and entropies become constants where the scoring pass returns them, and its advantage is 0: nothing
that TRL's loss makes of the row has a gradient. A mixture's auxiliary loss has no loss weights, so that the row stays in it.
Constants and the batch's other numbers are equal, so that each ratio is 1 and each KL is 0, and what TRL logs of the row is
finite.

Which rows are bad travels with them, as `inputs["bad_rows"]` `[B]`, through TRL's shuffling and splitting and through a user's
replay buffer: a mark made of a bad row's tokens, and 0 for a good row. A scoring pass may be over any part of a micro-batch, so
that it knows a row by its tokens. If two rows of a batch have the same prompt and completion and one of them is bad, both are,
also if their images differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from mismatch_ext.adapters.trl.replay import RowKey, Scores
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
BAD = "bad_rows"
"""Key of TRL's inputs under which the marks of bad rows travel."""
REMEMBERED = 100_000
"""How many bad rows a run remembers, for passes that no marks come with."""


class Remembered:
    """The marks of the newest bad rows of a run."""

    def __init__(self) -> None:
        self._marks: dict[int, None] = {}

    def add(self, marks: Iterable[int]) -> None:
        """Remember marks, and forget the oldest ones."""
        for mark in marks:
            self._marks.pop(mark, None)
            self._marks[mark] = None
        while len(self._marks) > REMEMBERED:
            del self._marks[next(iter(self._marks))]

    def all(self) -> frozenset[int]:
        """Return the marks that are remembered."""
        return frozenset(self._marks)


def mark_of(key: RowKey) -> int:
    """Return the mark of a bad row of these tokens: never 0, and the same in every process."""
    prompt, completion = key
    digest = blake2b(prompt, digest_size=7, salt=len(completion).to_bytes(8, "little"))
    digest.update(completion)
    return int.from_bytes(digest.digest(), "little") + 1


def marks_of(bad: BadRows, keys: Sequence[RowKey], device: torch.device) -> Tensor:
    """Return the marks of a batch's rows `[B]`, int64; 0 for a good row."""
    marks = [mark_of(key) if row in bad.faults else 0 for row, key in enumerate(keys)]
    return torch.tensor(marks, dtype=torch.int64, device=device)


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
