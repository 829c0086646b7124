"""A rollout on its way from engine to trainer: tokens, log-probabilities, mask, and where they come from.

Suffixes of shapes: B batch, T response tokens, P prompt tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Integral

import torch
from torch import Tensor

from mismatch_ext.errors import NonFiniteLogprobError, ProvenanceError, RecordError
from mismatch_ext.routing import RoutingTrace

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """What the engine samples with.

    Args:
        temperature: Divides the logits; > 0.
        top_p: Nucleus mass; 1 keeps the whole vocabulary.
        top_k: Most likely tokens kept; 0 and -1 keep all.
        min_p: Least probability relative to the most likely token; 0 keeps all.
        repetition_penalty: Penalty on tokens that occurred; 1 is none.

    Raises:
        RecordError: A value is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, ok, allowed in (
            ("temperature", self.temperature > 0, "> 0"),
            ("top_p", 0 < self.top_p <= 1, "0 < x <= 1"),
            ("top_k", self.top_k >= -1, "an integer >= -1 (0 and -1 keep all tokens)"),
            ("min_p", 0 <= self.min_p <= 1, "0 <= x <= 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "> 0"),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and ok):
                raise RecordError(f"sampling {name}={value!r} is out of range; allowed: {allowed}.")

    @property
    def truncates_support(self) -> bool:
        """Whether tokens that the trainer gives probability can never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def ratio_bias(self, *, renormalised: bool = True) -> str | None:
        """Say in a sentence why the importance ratio is biased, or return None when it is not.

        Args:
            renormalised: Whether the engine's log-probabilities are of the tokens that survive top_p, top_k and min_p, as
                vLLM's processed ones are; SGLang reports those before truncation.
        """
        active = [f"top_p={self.top_p}"] * (self.top_p < 1)
        active += [f"top_k={self.top_k}"] * (self.top_k > 0)
        active += [f"min_p={self.min_p}"] * (self.min_p > 0)
        sentences = []
        if active and not renormalised:
            sentences.append(
                f"{' and '.join(active)} is active: tokens are sampled from those that survive, and the engine reports their "
                "probability among all, so that every ratio is too large, by one over the surviving mass; sample with top_p=1, "
                "top_k=0 and min_p=0 to be on-policy."
            )
        elif active:
            sentences.append(
                f"{' and '.join(active)} is active: the engine renormalises its log-probabilities over the tokens that "
                "survive and the trainer does not, so every ratio is too small by the surviving mass and the gap is not "
                "numerics alone; sample with top_p=1, top_k=0 and min_p=0 to measure it."
            )
        if self.repetition_penalty != 1:
            sentences.append(
                f"repetition_penalty={self.repetition_penalty} is active: the engine's log-probabilities contain it and "
                "the trainer's do not; set it to 1 to measure the gap."
            )
        return " ".join(sentences) or None


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a rollout comes from.

    Args:
        engine: Name of the rollout engine.
        engine_version: Its version.
        dtype: Compute dtype: float32, float16 or bfloat16.
        kv_cache_dtype: Dtype of the KV cache, or None when unknown.
        weight_version: Number of weight updates that the engine had received.
        patch_digest: Digest of the patches that were active.
        sampling: Settings that the tokens were sampled with.
        logprobs_mode: The engine's name for the kind of log-probabilities that it reports.

    Raises:
        ProvenanceError: A field is missing or malformed.
    """

    engine: str
    engine_version: str
    dtype: str
    kv_cache_dtype: str | None
    weight_version: int
    patch_digest: str
    sampling: SamplingSettings
    logprobs_mode: str

    def __post_init__(self) -> None:
        for name in ("engine", "engine_version", "patch_digest", "logprobs_mode"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ProvenanceError(f"provenance {name} is {getattr(self, name)!r}; it must be a non-empty string.")
        if self.dtype not in DTYPES:
            raise ProvenanceError(f"provenance dtype {self.dtype!r} is not one of {', '.join(DTYPES)}.")
        if not isinstance(self.weight_version, int) or self.weight_version < 0:
            raise ProvenanceError(f"provenance weight_version is {self.weight_version!r}; it must be an integer >= 0.")
        if not isinstance(self.sampling, SamplingSettings):
            raise ProvenanceError(f"provenance sampling is {self.sampling!r}; it must be a SamplingSettings.")


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One response of the engine.

    Args:
        prompt_ids: Token ids of the prompt.
        response_ids: Sampled token ids `[T]`.
        rollout_logprobs: Natural-log probability of each response token under the rollout policy `[T]`.
        response_mask: True where the policy sampled the token, False where a tool or environment put it `[T]`.
        finish_reason: Why generation ended, or None when unknown.
        provenance: Where the record comes from.
        request_id: The engine's or caller's name for the request, used in messages.
        routing: Experts of every token but the last, or of the response's alone; None when they were not recorded.

    Raises:
        RecordError: Lengths differ, a token id is negative, or the routing is of other tokens.
        NonFiniteLogprobError: An unmasked log-probability is NaN or infinite; names request and token.
        ProvenanceError: There is no provenance.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    response_mask: tuple[bool, ...]
    finish_reason: str | None
    provenance: Provenance
    request_id: str | None = None
    routing: RoutingTrace | None = None

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
        for position, (logprob, kept) in enumerate(zip(self.rollout_logprobs, self.response_mask, strict=True)):
            if kept and not math.isfinite(logprob):
                raise NonFiniteLogprobError(
                    f"rollout {self.request_id}, token {position} (id {self.response_ids[position]}): the engine reported "
                    f"log-probability {logprob}; its logits overflowed or its weights are broken. In float16, check the "
                    "checkpoint with `mismatch-ext readiness`."
                )
        if not isinstance(self.provenance, Provenance):
            raise ProvenanceError(
                f"rollout {self.request_id} has no provenance (found {self.provenance!r}); rollouts of unknown origin "
                "are not trained on."
            )
        self._check_routing()

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
    """Rollouts padded to one shape, all of one provenance.

    Args:
        prompt_ids: Left-padded `[B, P]`, int64.
        prompt_mask: True at prompt tokens `[B, P]`.
        response_ids: Right-padded `[B, T]`, int64.
        rollout_logprobs: `[B, T]`, float32; 0 at padding.
        response_mask: True at tokens that the policy sampled `[B, T]`.
        provenance: The one provenance of all rows.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    rollout_logprobs: Tensor
    response_mask: Tensor
    provenance: Provenance


def collate(records: Sequence[RolloutRecord], pad_token_id: int) -> RolloutBatch:
    """Pad records into a batch, refusing rollouts of different origin.

    Args:
        records: At least one record.
        pad_token_id: Token id at padding.

    Raises:
        RecordError: There is no record.
        ProvenanceError: Provenance differs; names the field, the rows and both values.
    """
    if not records:
        raise RecordError("a batch needs at least one rollout record, found none.")
    first = records[0].provenance
    for row, record in enumerate(records):
        if record.provenance != first:
            field = next(
                f.name for f in fields(Provenance) if getattr(record.provenance, f.name) != getattr(first, f.name)
            )
            raise ProvenanceError(
                f"rollouts of mixed provenance: row 0 has {field}={getattr(first, field)!r}, row {row} has "
                f"{field}={getattr(record.provenance, field)!r}; split them into batches of one provenance."
            )
    return RolloutBatch(
        prompt_ids=_pad([r.prompt_ids for r in records], pad_token_id, torch.int64, left=True),
        prompt_mask=_pad([(True,) * len(r.prompt_ids) for r in records], False, torch.bool, left=True),
        response_ids=_pad([r.response_ids for r in records], pad_token_id, torch.int64),
        rollout_logprobs=_pad([r.rollout_logprobs for r in records], 0.0, torch.float32),
        response_mask=_pad([r.response_mask for r in records], False, torch.bool),
        provenance=first,
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
