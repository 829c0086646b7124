"""The rows of the newest batches, found by their tokens: their routes, masks and heads, and which of them are bad.

TRL shuffles the rows of a generation batch and cuts it into micro-batches, and a subclass may drop, move or repeat rows. So
nothing of a row travels with it: each scoring pass asks for its rows by prompt and completion. Equal rows of a batch share the
routes and the mask of the first of them, so that the old policy and the current one score them alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mismatch_ext.centering import TokenHead
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.sampling_mask import TokenSupport

Rows = tuple[Tensor, Tensor, int]
"""Tokens, attention mask and completion positions of a scoring pass."""
RowKey = tuple[bytes, bytes]
"""A row's prompt and completion, without padding, as bytes: a set of them is small, and finds a row by one look."""
Ids = Sequence[int] | NDArray[np.int64]
Known = TypeVar("Known")
STEPS = 2
"""Steps whose batches are known, of those that generated. A subclass may sample several batches for one step, and train once more
on rows of the step before."""


class RowTable:
    """The rows of one generation batch, which was generated at this step."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.routes: dict[RowKey, RoutingTrace] = {}
        self.supports: dict[RowKey, TokenSupport] = {}
        self.heads: dict[RowKey, TokenHead] = {}  # the engine's most likely tokens, for score centering
        self.bad: dict[RowKey, bool] = {}  # whether a row is bad, once the batch has been judged

    def add(
        self, keys: Iterable[RowKey], *, routes: Iterable[RoutingTrace] = (), supports: Iterable[TokenSupport] = ()
    ) -> None:
        """Add what is known of some rows, in their order; of equal rows, the first one counts."""
        keys = list(keys)
        _add_first(self.routes, keys, routes)
        _add_first(self.supports, keys, supports)

    def judge(self, keys: Sequence[RowKey], bad_rows: Iterable[int]) -> None:
        """Note which rows of the batch are bad; of equal rows, one is enough."""
        self.bad |= dict.fromkeys(keys, False)
        self.bad |= {keys[row]: True for row in bad_rows}


class RowTables:
    """The rows of the newest batches of training, and of an evaluation."""

    def __init__(self) -> None:
        self._of_training: list[RowTable] = []
        self._of_evaluation: list[RowTable] = []

    def begin(self, *, training: bool, step: int) -> RowTable:
        """Return the table of a new batch, which is generated at this step."""
        table = RowTable(step)
        if training:
            # An evaluation is over once training goes on, and its rows need no memory.
            self._of_evaluation = []
            self._of_training = of_newest_steps([table, *self._of_training])
        else:
            self._of_evaluation = [table]
        return table

    def newest(self, *, training: bool) -> list[RowTable]:
        """Return the tables, the newest one of training or of evaluation first."""
        if training:
            return [*self._of_training, *self._of_evaluation]
        return [*self._of_evaluation, *self._of_training]


class Generated(Protocol):
    """What was generated at a step."""

    @property
    def step(self) -> int: ...


Batch = TypeVar("Batch", bound=Generated)


def of_newest_steps(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches of the last steps that generated, in their order; older rows are not trained on."""
    known = sorted({batch.step for batch in batches})[-STEPS:]
    return [batch for batch in batches if batch.step in known]


def find_in(tables: Iterable[Mapping[RowKey, Known]], keys: Iterable[RowKey]) -> list[Known | None]:
    """Return what the first table that has a row knows of it; None for rows that none has."""
    tables = list(tables)
    return [next((table[key] for table in tables if key in table), None) for key in keys]


def _add_first(known: dict[RowKey, Known], keys: Sequence[RowKey], values: Iterable[Known]) -> None:
    # Without values, nothing is known of the rows.
    for key, value in zip(keys, values, strict=False):
        known.setdefault(key, value)
        prompt, _ = key
        known.setdefault((prompt, b""), value)  # TRL and subclasses turn completions into padding


def row_keys(tokens: Tensor, attention_mask: Tensor, length: int) -> list[RowKey]:
    """Return what the rows of a scoring pass are found by; a row with padding between its tokens is none that was sampled."""
    ids, real = tokens.to(torch.int32).cpu().numpy(), attention_mask.bool().cpu().numpy()
    begins = real & ~np.pad(real, ((0, 0), (1, 0)))[:, :-1]
    keys = []
    for row, mask, parts in zip(ids, real, begins.sum(1), strict=True):
        prompt, completion = row[:-length][mask[:-length]].tobytes(), row[-length:][mask[-length:]].tobytes()
        keys.append((prompt if parts <= 1 else prompt + b"in parts", completion))
    return keys


def row_key(prompt: Ids, completion: Ids) -> RowKey:
    """Return what a row of these tokens is found by."""
    return np.array(prompt, dtype=np.int32).tobytes(), np.array(completion, dtype=np.int32).tobytes()


def tokens_of(key: RowKey) -> tuple[list[int], list[int]]:
    """Return prompt and completion of a row as token ids."""
    prompt, completion = (np.frombuffer(part.removesuffix(b"in parts"), dtype=np.int32).tolist() for part in key)
    return prompt, completion


def rows_of_batch(inputs: Mapping[str, Any]) -> Rows:
    """Return tokens and attention mask `[B, S]` of a batch as TRL scores it, and its completion positions."""
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return tokens, attention_mask, inputs["completion_ids"].size(1)


def prompts_of(tokens: Tensor, attention_mask: Tensor, length: int) -> list[list[int]]:
    """Return the prompts of a padded batch as token ids."""
    prompts, real = tokens[:, :-length].cpu(), attention_mask[:, :-length].bool().cpu()
    return [row[mask].tolist() for row, mask in zip(prompts, real, strict=True)]
