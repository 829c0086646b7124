"""The tokens that both sides score, and the log-probabilities that the engine reported for them.

Suffixes of shapes: N tokens that the policy sampled, over all responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.rollout import RolloutRecord, expect_no_fault
from mismatch_ext.routing import RoutingTrace

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
HALVES = "the doctor fits on one half of the responses and judges on the other"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Responses of an engine, with its log-probabilities of their tokens; raises RecordError and NonFiniteLogprobError."""

    prompts: tuple[tuple[int, ...], ...]  # token ids, as the trainer sees them
    responses: tuple[tuple[int, ...], ...]
    masks: tuple[tuple[bool, ...], ...]  # True where the policy sampled a token, and no tool or environment inserted it
    logprobs: tuple[tuple[float, ...], ...]  # natural logarithm, as the engine reported them while sampling
    routes: tuple[RoutingTrace, ...] | None = None  # the engine's experts; None if it recorded none

    def __post_init__(self) -> None:
        counts = [len(column) for column in (self.prompts, self.responses, self.masks, self.logprobs)]
        if len(set(counts)) != 1:
            raise RecordError(
                f"{', '.join(map(str, counts))} prompts, responses, masks and lists of log-probabilities; the four must be equal."
            )
        if len(self.responses) < 2:
            raise RecordError(f"{len(self.responses)} response: {HALVES}; give at least 2, and 128 for shares.")
        for row, parts in enumerate(zip(self.responses, self.masks, self.logprobs, strict=True)):
            if len({len(part) for part in parts}) != 1:
                raise RecordError(
                    f"response {row}: {len(parts[0])} tokens, {len(parts[1])} mask values and {len(parts[2])} "
                    "log-probabilities; the three must be equal."
                )
        if not any(map(any, self.masks)):
            raise RecordError("every token is masked: nothing that the policy sampled is left to compare.")
        if sum(map(any, self.masks)) < 2:
            raise RecordError(f"all responses but one are masked: {HALVES}; give at least 2 with sampled tokens.")
        wrong = np.flatnonzero(~np.isfinite(self.engine))
        if len(wrong):
            at = wrong[0]
            raise NonFiniteLogprobError(
                f"response {self.row[at]}, token {self.place[at]}: the engine's log-probability is {self.engine[at]}; "
                "log those of all sampled tokens."
            )

    @classmethod
    def of(cls, records: Sequence[RolloutRecord]) -> Sample:
        """Return the sample that rollout records hold; raises the error of the first one that has a fault."""
        expect_no_fault(records)
        routes = tuple(record.routing for record in records if record.routing is not None)
        return cls(
            prompts=tuple(tuple(record.prompt_ids.tolist()) for record in records),
            responses=tuple(tuple(record.response_ids.tolist()) for record in records),
            masks=tuple(tuple(record.response_mask.tolist()) for record in records),
            logprobs=tuple(tuple(record.rollout_logprobs.tolist()) for record in records),
            routes=routes if len(routes) == len(records) else None,
        )

    @classmethod
    def joined(cls, samples: Sequence[Sample]) -> Sample:
        """Return several samples as one, in their order; with routes only if all have them."""
        columns = {name: [getattr(part, name) for part in samples] for name in cls.__dataclass_fields__}
        whole: dict[str, Any] = {name: None if None in rows else tuple(chain(*rows)) for name, rows in columns.items()}
        return cls(**whole)

    @cached_property
    def row(self) -> Integers:
        """The response of each token `[N]`."""
        return np.repeat(np.arange(len(self.masks)), [sum(mask) for mask in self.masks])

    @cached_property
    def place(self) -> Integers:
        """The place of each token in its response `[N]`."""
        return np.array([at for mask in self.masks for at, sampled in enumerate(mask) if sampled], dtype=np.int64)

    @cached_property
    def tokens(self) -> Integers:
        """The id of each token `[N]`."""
        return np.array([self.responses[r][t] for r, t in zip(self.row, self.place, strict=True)], dtype=np.int64)

    @cached_property
    def engine(self) -> Floats:
        """The engine's log-probability of each token `[N]`; NaN where it reported none."""
        return self.sampled(self.logprobs)

    def sampled(self, columns: Sequence[Sequence[float | None]]) -> Floats:
        """Return the values of the sampled tokens `[N]`, from one value for each response token; NaN where it is None."""
        rows = zip(columns, self.masks, strict=True)
        sampled = [value for values, mask in rows for value, is_sampled in zip(values, mask, strict=True) if is_sampled]
        return np.array([math.nan if value is None else float(value) for value in sampled], dtype=np.float64)

    @cached_property
    def fits(self) -> NDArray[np.bool_]:
        """True for the tokens of every other response `[N]`: parameters are fitted on these and judged on the rest."""
        # Count only responses with tokens: a fully masked response is in neither half.
        return np.asarray(np.unique(self.row, return_inverse=True)[1] % 2 == 0)

    def part(self, rows: Sequence[int]) -> Sample:
        """Return some of the responses, in the given order."""
        columns = {
            name: column for name, column in vars(self).items() if name in Sample.__dataclass_fields__ and column
        }
        return Sample(**{name: tuple(column[row] for row in rows) for name, column in columns.items()})
