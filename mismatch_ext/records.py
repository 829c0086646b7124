"""The record of a rollout on its way from engine to trainer: tokens, log-probabilities, mask and provenance.

Suffixes of shapes: B batch, T response tokens, P prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from numbers import Integral

import torch
from torch import Tensor

from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.provenance import Provenance, SamplingSettings, one_provenance, to_provenance
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.sampling_mask.support import TokenSupport

__all__ = [
    "Provenance",
    "RolloutBatch",
    "RolloutRecord",
    "SamplingSettings",
    "collate",
    "non_finite",
    "to_provenance",
    "to_records",
]


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One response of the engine.

    Args:
        prompt_ids: Token ids of the prompt.
        response_ids: Sampled token ids `[T]`.
        rollout_logprobs: Natural-log probability of each response token under the rollout policy `[T]`.
        response_mask: True where the policy sampled the token, False where a tool or environment inserted it `[T]`.
        finish_reason: Why generation ended, or None if unknown.
        provenance: Where the record comes from.
        request_id: The engine's or caller's name for the request, used in messages.
        routing: Routes from any token of the sequence up to the last token, or the one before it; None if not recorded.
        support: The ids that each response token was sampled from; None if not recorded.

    Raises:
        RecordError: Lengths differ, a token id is negative, the routing belongs to other tokens, or a sampled token is not in
            its support.
        NonFiniteLogprobError: An unmasked log-probability is NaN or infinite; names request and token.
        RecordError: There is no provenance.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    response_mask: tuple[bool, ...]
    finish_reason: str | None
    provenance: Provenance
    request_id: str | None = None
    routing: RoutingTrace | None = None
    support: TokenSupport | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rollout_logprobs, tuple):
            raise RecordError(
                f"rollout {self.request_id}: rollout_logprobs is a {type(self.rollout_logprobs).__name__}; it must be a "
                "tuple of floats, such as tuple(tensor.tolist())."
            )
        lengths = (len(self.response_ids), len(self.rollout_logprobs), len(self.response_mask))
        if len(set(lengths)) != 1:
            raise RecordError(
                f"rollout {self.request_id}: {lengths[0]} response tokens, {lengths[1]} log-probabilities and "
                f"{lengths[2]} mask values; the three must be equal."
            )
        ids, flags = (*self.prompt_ids, *self.response_ids), set(self.response_mask)
        if not all(issubclass(kind, Integral) for kind in set(map(type, ids))):
            raise RecordError(f"rollout {self.request_id}: token ids must be integers, found another type.")
        if not flags <= {0, 1}:
            raise RecordError(
                f"rollout {self.request_id}: response_mask holds {sorted(flags - {0, 1})}; it must be True or False."
            )
        if min((*self.prompt_ids, *self.response_ids), default=0) < 0:
            raise RecordError(f"rollout {self.request_id}: token ids must be >= 0, found a negative one.")
        if not all(map(math.isfinite, compress(self.rollout_logprobs, self.response_mask))):
            kept = zip(self.rollout_logprobs, self.response_mask, strict=True)
            bad = next(at for at, (logprob, counts) in enumerate(kept) if counts and not math.isfinite(logprob))
            raise non_finite(str(self.request_id), bad, self.rollout_logprobs[bad], self.response_ids[bad])
        one_provenance([(str(self.request_id), self.provenance)])
        self._check_routing()
        if self.support is not None:
            self.support.check_sampled(self.response_ids, self.response_mask, str(self.request_id))

    def _check_routing(self) -> None:
        tokens = len(self.prompt_ids) + len(self.response_ids)
        if self.routing is not None and tokens - self.routing.start - self.routing.rows not in (0, 1):
            raise RecordError(
                f"rollout {self.request_id}: {tokens} tokens of prompt and response, but routing of positions "
                f"{self.routing.start} to {self.routing.start + self.routing.rows - 1}; it must end at the last token or the "
                "one before."
            )
        known = None if self.routing is None else self.routing.tokens
        if known is not None and known.tolist() != [*self.prompt_ids, *self.response_ids][: len(known)]:
            raise RecordError(
                f"rollout {self.request_id}: its routing was recorded of other tokens than those of its prompt and response."
            )


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """Rollouts padded to one shape, all with the same provenance.

    Args:
        prompt_ids: Left-padded `[B, P]`, int64.
        prompt_mask: True at prompt tokens `[B, P]`.
        response_ids: Right-padded `[B, T]`, int64.
        rollout_logprobs: `[B, T]`, float32; 0 at padding.
        response_mask: True at tokens that the policy sampled `[B, T]`.
        provenance: The one provenance of all rows.
        routing: Routes of each row, for `align`; None if they were not recorded.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    rollout_logprobs: Tensor
    response_mask: Tensor
    provenance: Provenance
    routing: tuple[RoutingTrace | None, ...]


def to_records(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    rollout_logprobs: Sequence[Sequence[float | None]],
    *,
    provenance: Provenance,
    routing: Sequence[RoutingTrace | None] | None = None,
    supports: Sequence[TokenSupport | None] | None = None,
    finish_reasons: Sequence[str | None] | None = None,
    names: Sequence[str] | None = None,
) -> list[RolloutRecord]:
    """Make records from token ids and log-probabilities, for a host that keeps nothing else of an engine's outputs.

    Args:
        prompt_ids: One list of token ids per rollout.
        response_ids: One list of sampled token ids per rollout.
        rollout_logprobs: Natural-log probability of each sampled token, as the engine reported it; None instead of NaN.
        provenance: Where the rollouts come from.
        routing: One trace per rollout, or None if the engine did not record any.
        supports: One support per rollout, or None if the engine did not report any.
        finish_reasons: Why each rollout ended; None if unknown.
        names: What to call each rollout in messages; None numbers them.

    Raises:
        RecordError: Lengths differ, or a log-probability is missing or not finite; names rollout and token.
    """
    counts = len(prompt_ids), len(response_ids), len(rollout_logprobs)
    columns = [[None] * counts[1] if column is None else column for column in (routing, supports, finish_reasons)]
    if {*counts, *map(len, columns)} != {counts[0]}:
        raise RecordError(
            f"{counts[0]} prompts, {counts[1]} responses, {counts[2]} lists of log-probabilities and {len(columns[0])} routing "
            "traces; the four must be equal."
        )
    return [
        RolloutRecord(
            prompt_ids=tuple(prompt),
            response_ids=tuple(response),
            rollout_logprobs=tuple(math.nan if value is None else float(value) for value in logprobs),
            response_mask=(True,) * len(response),
            finish_reason=reason,
            provenance=provenance,
            request_id=str(row) if names is None else names[row],
            routing=trace,
            support=support,
        )
        for row, (prompt, response, logprobs, trace, support, reason) in enumerate(
            zip(prompt_ids, response_ids, rollout_logprobs, *columns, strict=True)
        )
    ]


def non_finite(rollout: str, token: int, logprob: float, token_id: int | None = None) -> NonFiniteLogprobError:
    """Return the error for a sampled token whose log-probability is not a finite number.

    Args:
        rollout: Name of the rollout.
        token: The token's place in the response.
        logprob: Log-probability that the engine reported.
        token_id: Id of the token, if known.
    """
    known = "" if token_id is None else f" (id {token_id})"
    return NonFiniteLogprobError(
        f"rollout {rollout}, token {token}{known}: the engine reported log-probability {logprob}; its logits overflowed or its "
        "weights are broken. In float16, check the checkpoint with `mismatch-ext readiness`."
    )


def collate(records: Sequence[RolloutRecord], pad_token_id: int) -> RolloutBatch:
    """Pad records into a batch; refuse rollouts with different provenance.

    Args:
        records: At least one record.
        pad_token_id: Token id used for padding.

    Raises:
        RecordError: There is no record.
        RecordError: Provenance differs; names the field, the rows and both values.
    """
    provenance = one_provenance((f"row {row}", record.provenance) for row, record in enumerate(records))
    return RolloutBatch(
        prompt_ids=_pad([r.prompt_ids for r in records], pad_token_id, torch.int64, left=True),
        prompt_mask=_pad([(True,) * len(r.prompt_ids) for r in records], False, torch.bool, left=True),
        response_ids=_pad([r.response_ids for r in records], pad_token_id, torch.int64),
        rollout_logprobs=_pad([r.rollout_logprobs for r in records], 0.0, torch.float32),
        response_mask=_pad([r.response_mask for r in records], False, torch.bool),
        provenance=provenance,
        routing=tuple(record.routing for record in records),
    )


def _pad(
    rows: Sequence[Sequence[int] | Sequence[float]], value: float, dtype: torch.dtype, left: bool = False
) -> Tensor:
    padded = torch.full((len(rows), max(map(len, rows))), value, dtype=dtype)
    for index, row in enumerate(rows):
        if row:
            where = slice(-len(row), None) if left else slice(None, len(row))
            padded[index, where] = torch.tensor(row, dtype=dtype)
    return padded
