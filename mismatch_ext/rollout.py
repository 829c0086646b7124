"""Rollouts on their way from engine to trainer: where they come from, one record for each, and a batch of tensors.

All rollouts of a batch have one provenance, and come from the engine's present weights. Every host asks the functions here, so
that the same rollout is refused with the same words everywhere.

Shapes: B rollouts, S tokens of prompt and response, T response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mismatch_ext.bad_rows import Fault
from mismatch_ext.centering import TokenHead
from mismatch_ext.errors import MismatchError, NonFiniteLogprobError, RecordError, RoutingError
from mismatch_ext.patching import active_patches, digest_of
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.routing import RoutingTrace
from mismatch_ext.sampling_mask import TokenSupport

DTYPES = ("float32", "float16", "bfloat16")

Ids = NDArray[np.int64]
Logprobs = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """The settings that an engine samples with; they say which distribution a rollout's log-probabilities are of.

    Args:
        temperature: Divides the logits; > 0.
        top_p: Nucleus mass; 1 keeps the whole vocabulary.
        top_k: Number of most likely tokens that are kept; 0 and -1 keep all.
        min_p: Least probability relative to the most likely token; 0 keeps all.
        repetition_penalty: Penalty on tokens that occurred before; 1 means no penalty.

    Raises:
        RecordError: A value is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        self._expect("temperature", self.temperature > 0, "> 0")
        self._expect("top_p", 0 < self.top_p <= 1, "0 < x <= 1")
        self._expect("top_k", self.top_k >= -1, "an integer >= -1 (0 and -1 keep all tokens)")
        self._expect("min_p", 0 <= self.min_p <= 1, "0 <= x <= 1")
        self._expect("repetition_penalty", self.repetition_penalty > 0, "> 0")

    def _expect(self, name: str, is_in_range: bool, allowed: str) -> None:
        value = getattr(self, name)
        if not (math.isfinite(value) and is_in_range):
            raise RecordError(f"sampling {name}={value!r} is out of range; allowed: {allowed}.")

    @property
    def truncates_support(self) -> bool:
        """Whether some tokens can never be sampled although the trainer gives them a probability."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def without_truncation(self) -> SamplingSettings:
        """Return these settings without truncation, for a trainer that scores over sampling masks and so truncates alike."""
        return replace(self, top_p=1.0, top_k=0, min_p=0.0)

    def ratio_bias(self, *, renormalized: bool = True) -> str | None:
        """Return why the importance ratio is biased, or None if it is not.

        `renormalized` says whether the engine normalizes over the tokens that truncation keeps, as vLLM's processed
        log-probabilities are; SGLang reports those from before truncation.
        """
        active = [f"top_p={self.top_p}"] * (self.top_p < 1)
        active += [f"top_k={self.top_k}"] * (self.top_k > 0)
        active += [f"min_p={self.min_p}"] * (self.min_p > 0)
        sentences = []
        if active:
            of, size = ("those", "small") if renormalized else ("all", "large")
            sentences.append(
                f"{' and '.join(active)} is active: tokens are sampled from those that survive. The engine's probabilities are "
                f"among {of}, the trainer's among all, so every ratio is too {size}, by the surviving mass. Sample with top_p=1, "
                "top_k=0 and min_p=0 to measure the gap."
            )
        if self.repetition_penalty != 1:
            sentences.append(
                f"repetition_penalty={self.repetition_penalty} is active: the engine's log-probabilities contain it and "
                "the trainer's do not; set it to 1 to measure the gap."
            )
        return " ".join(sentences) or None


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a rollout comes from: engine, dtypes, version of the weights, patches and sampling settings.

    Args:
        engine: Name of the rollout engine.
        engine_version: Version of the engine.
        dtype: Compute dtype: float32, float16 or bfloat16.
        kv_cache_dtype: Dtype of the KV cache, or None if unknown.
        weight_version: Version of the engine's weights: the number of updates that it had received, or the step after which the
            weights were sent. No update lowers it.
        patch_digest: Digest of the patches that were active.
        sampling: Settings that the tokens were sampled with.
        logprobs_mode: The engine's name for the kind of log-probabilities that it reports.

    Raises:
        RecordError: A field is missing or malformed.
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
                raise RecordError(f"provenance {name} is {getattr(self, name)!r}; it must be a non-empty string.")
        if self.dtype not in DTYPES:
            raise RecordError(f"provenance dtype {self.dtype!r} is not one of {', '.join(DTYPES)}.")
        if not isinstance(self.weight_version, int) or self.weight_version < 0:
            raise RecordError(f"provenance weight_version is {self.weight_version!r}; it must be an integer >= 0.")
        if not isinstance(self.sampling, SamplingSettings):
            raise RecordError(f"provenance sampling is {self.sampling!r}; it must be a SamplingSettings.")


def to_provenance(
    reading: EngineReading, *, sampling: SamplingSettings, weight_version: int, patch_digest: str | None = None
) -> Provenance:
    """Return the provenance of an engine's rollouts; without `patch_digest`, with that of this process's patches."""
    return Provenance(
        engine=reading.engine,
        engine_version=reading.version,
        dtype=reading.model_dtype,
        kv_cache_dtype=reading.kv_cache_dtype,
        weight_version=weight_version,
        patch_digest=digest_of(active_patches()) if patch_digest is None else patch_digest,
        sampling=sampling,
        logprobs_mode=reading.logprobs_mode,
    )


def one_provenance(rollouts: Iterable[tuple[str, Provenance | None]]) -> Provenance:
    """Return the one provenance that all rollouts have, each given with its name; refuse none, unknown and mixed ones."""
    first: tuple[str, Provenance] | None = None
    for name, provenance in rollouts:
        if not isinstance(provenance, Provenance):
            raise RecordError(_unknown(name, provenance))
        if first is None:
            first = name, provenance
        elif provenance != first[1]:
            name_of = next(
                f.name for f in fields(Provenance) if getattr(provenance, f.name) != getattr(first[1], f.name)
            )
            raise RecordError(
                f"rollouts of mixed provenance: {first[0]} has {name_of}={getattr(first[1], name_of)!r}, {name} has "
                f"{name_of}={getattr(provenance, name_of)!r}; split them into batches of one provenance."
            )
    if first is None:
        raise RecordError("a batch needs at least one rollout record, found none.")
    return first[1]


def expect_present(provenance: Provenance, weight_version: int, name: str = "rollouts") -> None:
    """Refuse rollouts of other weights than those that were sent last."""
    if provenance.weight_version != weight_version:
        raise RecordError(
            f"{name} of weight version {provenance.weight_version}, but the engine is at {weight_version}; generate again after "
            "the weight update."
        )


def sampled_by(
    name: str, provenance: Provenance | None, first: int | None, last: int | None, *, allow_mixed: bool = False
) -> Provenance:
    """Return the provenance of a rollout, sampled by one version, or by several if `allow_mixed`; raises RecordError."""
    if provenance is None:
        raise RecordError(_unknown(name, provenance))
    if first is None or last is None:
        raise RecordError(_unknown(name, None, "weight version"))
    if first != last and not allow_mixed:
        raise RecordError(
            f"rollouts of mixed provenance: rollout {name} was sampled with weight_version={first} and weight_version={last}; "
            "let no weight update come in between, or drop it."
        )
    return replace(provenance, weight_version=last)


def _unknown(name: str, value: object, what: str = "provenance") -> str:
    return f"rollout {name} has no {what} (found {value!r}); rollouts of unknown origin are not trained on."


@dataclass(frozen=True, kw_only=True)
class EngineAnswer:
    """An engine's report about itself after a weight update; its version of the weights is None if it does not know it."""

    name: str
    reading: EngineReading
    patch_digest: str
    weight_version: int | None


class Origins:
    """Follows the weights of a run's engines, whose rollouts have the provenance `present` from the first update on."""

    def __init__(self, sampling: SamplingSettings) -> None:
        self._sampling = sampling
        self.present: Provenance | None = None

    def sent(self, version: int, answers: Iterable[EngineAnswer]) -> Provenance:
        """Take every engine's report after weights of a version were sent, and return their provenance; raises RecordError."""
        engines = []
        for answer in answers:
            digest, stamp, name = answer.patch_digest, answer.weight_version, f"of {answer.name}"
            of = to_provenance(answer.reading, sampling=self._sampling, weight_version=version, patch_digest=digest)
            engines.append((name, sampled_by(name, of, stamp, stamp)))
        now = one_provenance(engines)
        expect_present(now, version, "engines with weights")
        if self.present is not None:
            one_provenance([("the run so far", replace(self.present, weight_version=version)), ("the run", now)])
        self.present = now
        return now

    def check(self, rollouts: Iterable[tuple[str, int | None, int | None]], *, older: bool = False) -> Provenance:
        """Return the provenance of a batch, of (name, version at the first token, at the last); refuse other weights.

        With `older`, earlier and several versions are accepted, because an asynchronous host trains on them. Raises RecordError.
        """
        sampled = [
            (name, first, sampled_by(name, self.present, first, last, allow_mixed=older))
            for name, first, last in rollouts
        ]
        if not older:
            batch = one_provenance((f"rollout {name}", provenance) for name, _, provenance in sampled)
            expect_present(batch, 0 if self.present is None else self.present.weight_version)
            return batch
        now = one_provenance([("the engines", self.present)])
        for name, first, provenance in sampled:
            if first is None or not first <= provenance.weight_version <= now.weight_version:
                raise RecordError(
                    f"rollout {name} was sampled with weight_version={first} to {provenance.weight_version}, and the engines "
                    f"have weight_version={now.weight_version}: versions rise, and none is ahead of the engines. Something has "
                    "changed its stamps, or it is of another run."
                )
        return one_provenance((name, replace(of, weight_version=now.weight_version)) for name, _, of in sampled)


# Columns of a rollout as arrays.


def to_ids(values: Sequence[int] | NDArray[Any] | Tensor, where: str) -> Ids:
    """Return token ids as an array `[T]`; raises RecordError if one is not an integer >= 0."""
    found = _to_array(values)
    if found.ndim != 1 or (found.size and (found.dtype.kind not in "iu" or found.min() < 0)):
        raise RecordError(f"{where}: token ids must be integers >= 0.")
    return found.astype(np.int64, copy=False)


def to_logprobs(values: Sequence[float] | NDArray[Any] | Tensor, where: str) -> Logprobs:
    """Return log-probabilities as an array `[T]`; raises RecordError if one is not a number."""
    found = _to_array(values)
    if found.ndim != 1 or found.dtype.kind not in "fiu":
        raise RecordError(f"{where}: log-probabilities must be numbers, one for each token.")
    return found.astype(np.float64, copy=False)


def to_flags(values: Sequence[int] | NDArray[Any] | Tensor, where: str) -> Flags:
    """Return a response mask as an array `[T]`; raises RecordError if a value is neither True nor False."""
    found = _to_array(values)
    if found.ndim == 1 and found.dtype.kind == "b":
        return found
    others = sorted({*found.flatten().tolist()} - {0, 1})
    if found.ndim != 1 or others:
        raise RecordError(f"{where}: response_mask holds {others}; it must be True or False.")
    return found.astype(np.bool_)


def _to_array(values: Sequence[float] | NDArray[Any] | Tensor) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.is_floating_point():
            values = values.double()  # numpy has no bfloat16
        return values.numpy()
    return np.asarray(values)


# One record for each rollout.


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutRecord:
    """One response of the engine, as the trainer gets it: T tokens, their log-probabilities, and where they come from.

    Give lists, arrays or tensors; the record holds arrays. Leave them as they are, because an array of the right dtype is not
    copied.

    Args:
        prompt_ids: Token ids of the prompt, int64.
        response_ids: Sampled token ids `[T]`, int64.
        rollout_logprobs: Natural-log probability of each response token under the rollout policy `[T]`, float64.
        response_mask: True where the policy sampled the token, False where a tool or environment inserted it `[T]`, bool.
        finish_reason: Why generation ended, or None if unknown.
        provenance: Where the record comes from.
        request_id: The engine's or caller's name for the request, used in messages.
        routing: Routes from any token of the sequence up to the last token, or the one before it; None if not recorded.
        support: The ids that each response token was sampled from; None if not recorded.
        head: The engine's most likely tokens at each response token, for score centering; None if not recorded.
        cached_tokens: Prompt tokens whose keys and values the engine took from its prefix cache; None if unknown.
        fault: Why the row cannot be trained on; None if it can. A record with a fault has 0 for log-probabilities that are not
            finite, and neither routes nor support if these do not fit. `record_of` makes one.

    Raises:
        RecordError: Lengths differ, a token id is negative, there is no provenance, the routing belongs to other tokens, or a
            sampled token is not in its support.
        NonFiniteLogprobError: An unmasked log-probability is NaN or infinite; names request and token.
    """

    prompt_ids: Ids
    response_ids: Ids
    rollout_logprobs: Logprobs
    response_mask: Flags
    finish_reason: str | None
    provenance: Provenance
    request_id: str | None = None
    routing: RoutingTrace | None = None
    support: TokenSupport | None = None
    head: TokenHead | None = None
    cached_tokens: int | None = None
    fault: Fault | None = None

    def __post_init__(self) -> None:
        where = f"rollout {self.request_id}"
        arrays = {
            "prompt_ids": to_ids(self.prompt_ids, where),
            "response_ids": to_ids(self.response_ids, where),
            "rollout_logprobs": to_logprobs(self.rollout_logprobs, where),
            "response_mask": to_flags(self.response_mask, where),
        }
        for name, values in arrays.items():
            object.__setattr__(self, name, values)
        lengths = (len(self.response_ids), len(self.rollout_logprobs), len(self.response_mask))
        if len(set(lengths)) != 1:
            raise RecordError(
                f"{where}: {lengths[0]} response tokens, {lengths[1]} log-probabilities and {lengths[2]} mask values; the three "
                "must be equal."
            )
        broken = ~np.isfinite(self.rollout_logprobs) & self.response_mask
        if broken.any():
            bad = int(broken.argmax())
            raise non_finite(str(self.request_id), bad, float(self.rollout_logprobs[bad]), int(self.response_ids[bad]))
        one_provenance([(str(self.request_id), self.provenance)])
        if self.routing is not None:
            self._check_routing(self.routing, where)
        if self.support is not None:
            self.support.check_sampled(self.response_ids, self.response_mask, str(self.request_id))
        if self.head is not None and len(self.head) != len(self.response_ids):
            raise RecordError(
                f"{where}: {len(self.response_ids)} response tokens, and a head of {len(self.head)} places; both must be equal."
            )

    def _check_routing(self, routing: RoutingTrace, where: str) -> None:
        count = len(self.prompt_ids) + len(self.response_ids)
        first, rows, tokens = routing.start, routing.rows, routing.tokens
        if count - first - rows not in (0, 1):
            raise RecordError(
                f"{where}: {count} tokens of prompt and response, but routing of positions {first} to {first + rows - 1}; "
                "it must end at the last token or the one before."
            )
        if tokens is not None and not np.array_equal(tokens.cpu().numpy(), self.token_ids[: len(tokens)]):
            raise RecordError(
                f"{where}: its routing was recorded of other tokens than those of its prompt and response."
            )

    @property
    def token_ids(self) -> Ids:
        """Token ids of prompt and response, int64."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RolloutRecord):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, np.ndarray):
        return np.array_equal(value, other, equal_nan=True)
    return bool(value == other)


def to_records(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    rollout_logprobs: Sequence[Sequence[float | None]],
    *,
    provenance: Provenance,
    routing: Sequence[RoutingTrace | None] | None = None,
    supports: Sequence[TokenSupport | None] | None = None,
    heads: Sequence[TokenHead | None] | None = None,
    finish_reasons: Sequence[str | None] | None = None,
    cached_tokens: Sequence[int | None] | None = None,
    names: Sequence[str] | None = None,
) -> list[RolloutRecord]:
    """Make records of columns with an entry per rollout; a log-probability is None where the engine reported NaN.

    A rollout whose log-probabilities, routes or support are wrong becomes a record with a `fault`.
    """
    count = len(prompt_ids)
    given = (routing, supports, heads, finish_reasons, cached_tokens)
    columns = [[None] * count if column is None else column for column in given]
    return [
        record_of(
            prompt_ids=prompt,
            response_ids=response,
            # In an array of floats, None is NaN.
            rollout_logprobs=np.array(logprobs, dtype=np.float64),
            response_mask=np.ones(len(response), dtype=np.bool_),
            finish_reason=reason,
            provenance=provenance,
            request_id=str(row) if names is None else names[row],
            routing=trace,
            support=support,
            head=head,
            cached_tokens=cached,
        )
        for row, (prompt, response, logprobs, trace, support, head, reason, cached) in enumerate(
            zip(prompt_ids, response_ids, rollout_logprobs, *columns, strict=True)
        )
    ]


def record_of(**fields: Any) -> RolloutRecord:
    """Return a record of `RolloutRecord`'s fields; if one of them does not fit, a record without it, with a `fault`.

    Raises RecordError for what is not the fault of one row: lengths that differ, or a field of the wrong type.
    """
    try:
        return RolloutRecord(**fields)
    except MismatchError:
        pass  # below it is found out which field is wrong
    logprobs = to_logprobs(fields["rollout_logprobs"], f"rollout {fields.get('request_id')}")
    finite = np.where(np.isfinite(logprobs), logprobs, 0.0)
    plain = RolloutRecord(**fields | {"rollout_logprobs": finite, "routing": None, "support": None})
    fitting: dict[str, Any] = {}
    faults: list[Fault] = []
    for reason, name in (("rollout_logprobs", "rollout_logprobs"), ("routes", "routing"), ("mask", "support")):
        try:
            with_field: dict[str, Any] = {name: fields.get(name)}
            replace(plain, **with_field)
            fitting |= with_field
        except MismatchError as error:
            faults.append(Fault(reason=reason, message=str(error)))
    return replace(plain, **fitting, fault=faults[0])


FAULT_ERRORS: dict[str, type[MismatchError]] = {"rollout_logprobs": NonFiniteLogprobError, "routes": RoutingError}
"""The error for a fault of each reason, for callers that cannot leave a rollout out; RecordError for the other reasons."""


def expect_no_fault(records: Iterable[RolloutRecord]) -> None:
    """Raise the error of the first record that has a fault."""
    for record in records:
        if record.fault is not None:
            error = FAULT_ERRORS.get(record.fault.reason, RecordError)
            raise error(record.fault.message)


def non_finite(rollout: str, token: int, logprob: float, token_id: int | None = None) -> NonFiniteLogprobError:
    """Return the error for a sampled token, at a place of a response, whose log-probability is not a finite number."""
    known = "" if token_id is None else f" (id {token_id})"
    return NonFiniteLogprobError(
        f"rollout {rollout}, token {token}{known}: the engine reported log-probability {logprob}; its logits overflowed or its "
        "weights are broken. In float16, check the checkpoint with `mismatch-ext readiness`."
    )


# A batch of tensors.


@dataclass(kw_only=True, eq=False)
class Batch:
    """Rollouts as tensors: each row is a prompt followed by its response, padded on the right.

    With padding on the right, positions begin at 0 in every row. A batch lives from `run.batch` to the step that learns from it.
    """

    tokens: Tensor  # `[B, S]`, int64; 0 at padding
    attention_mask: Tensor  # True at tokens `[B, S]`
    prompt_lengths: Tensor  # in tokens `[B]`, int64
    response_mask: Tensor  # True at tokens that the policy sampled `[B, T]`
    rollout_logprobs: Tensor  # the engine's `[B, T]`, nats, float32; 0 at padding
    groups: Tensor  # number of each row's prompt in the batch `[B]`, int64; rows of one prompt share it
    # True for rows that cannot be trained on `[B]`. Parts of a batch share this memory, so that a row which turns out to be
    # bad later is bad in all of them.
    bad: Tensor
    temperature: float  # that the tokens were sampled at
    provenance: Provenance  # of all rows
    records: tuple[RolloutRecord, ...]
    split: str = "train"  # "train" or "eval/<name>"
    # A trace per row; None while no routes are known. Under R2 the first scoring pass sets it.
    routing: list[RoutingTrace] | None = field(default=None, repr=False)
    origin: object = field(default_factory=object, repr=False)  # shared with all batches that are cut from this one
    part: bool = False  # whether this is only a part of the rows of a batch

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each response `[B]`, int64."""
        return self.attention_mask.sum(1) - self.prompt_lengths

    @property
    def response_ids(self) -> Tensor:
        """Token ids of the responses `[B, T]`, int64; 0 at padding."""
        return self.of_responses(self.tokens[:, 1:])

    @property
    def good_tokens(self) -> Tensor:
        """True at the sampled tokens of rows that are not bad `[B, T]`."""
        return self.response_mask & ~self.bad[:, None]

    def of_responses(self, values: Tensor) -> Tensor:
        """Return the values of the response tokens `[B, T]`, 0 at padding, from those of all tokens but the first `[B, S-1]`."""
        places = torch.arange(self.response_mask.shape[1], device=values.device) + self.prompt_lengths[:, None] - 1
        inside = places < (self.attention_mask.sum(1) - 1)[:, None]
        return values.gather(1, places.clamp(max=values.shape[1] - 1)).masked_fill(~inside, 0)

    def rows(self, first: int, last: int) -> Batch:
        """Return rows `first` to `last - 1` as a batch, for example as a micro-batch; padding stays as it is."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        per_row = {
            name: value[first:last]
            for name, value in values.items()
            if isinstance(value, Tensor) or name == "records" or (name == "routing" and value is not None)
        }
        return replace(self, **per_row, part=self.part or len(per_row["records"]) < len(self))


USELESS_ROUTES = ("routes", "tokens", "weight_version")
"""Faults of rows whose routes, if there are any, belong to other tokens or other weights than the batch's."""


def collate(
    records: Sequence[RolloutRecord],
    device: torch.device | str = "cpu",
    split: str = "train",
    *,
    weight_version: int | None = None,
) -> Batch:
    """Turn rollouts of one provenance into a batch; rollouts of one prompt form a group, in any order. Raises RecordError.

    A record with a fault stays in the batch as a bad row. So does a row without routes if other rows have some, and, if you
    give the engine's present `weight_version`, a row of another version if other rows have that version.
    """
    for row, record in enumerate(records):
        if not len(record.prompt_ids):
            raise RecordError(f"row {row} has no prompt; give at least one token, such as the one that begins a text.")
    records = _with_faults(records, weight_version)
    faults = [record.fault for record in records]
    of_batch = [
        record.provenance if fault is None or fault.reason != "weight_version" else _at(record, weight_version)
        for record, fault in zip(records, faults, strict=True)
    ]
    provenance = one_provenance((f"row {row}", of_row) for row, of_row in enumerate(of_batch))
    routing = _routing_of(records)
    numbers: dict[bytes, int] = {}
    groups = [numbers.setdefault(record.prompt_ids.tobytes(), len(numbers)) for record in records]
    tokens = _padded([(record.prompt_ids, record.response_ids) for record in records], np.int64).to(device)
    mask = _padded([(record.response_mask,) for record in records], np.bool_).to(device)
    rollout_logprobs = _padded([(record.rollout_logprobs,) for record in records], np.float32).to(device)
    prompt_lengths = torch.tensor([len(record.prompt_ids) for record in records], device=device)
    response_lengths = torch.tensor([len(record.response_ids) for record in records], device=device)
    lengths = prompt_lengths + response_lengths
    return Batch(
        tokens=tokens,
        attention_mask=torch.arange(tokens.shape[1], device=device) < lengths[:, None],
        prompt_lengths=prompt_lengths,
        response_mask=mask,
        rollout_logprobs=rollout_logprobs,
        groups=torch.tensor(groups, device=device),
        bad=torch.tensor([fault is not None for fault in faults], dtype=torch.bool, device=device),
        temperature=provenance.sampling.temperature,
        provenance=provenance,
        records=tuple(records),
        split=split,
        routing=routing,
    )


def _padded(rows: Sequence[Sequence[NDArray[Any]]], dtype: type[np.generic]) -> Tensor:
    """Return rows, each given in parts that follow one another, padded with 0 on the right."""
    width = max((sum(map(len, parts)) for parts in rows), default=0)
    padded = np.zeros((len(rows), width), dtype)
    for row, parts in zip(padded, rows, strict=True):
        first = 0
        for part in parts:
            row[first : first + len(part)] = part
            first += len(part)
    return torch.from_numpy(padded)


def _at(record: RolloutRecord, weight_version: int | None) -> Provenance:
    """Return a record's provenance with the version of its batch, if that is known."""
    if weight_version is None:
        return record.provenance
    return replace(record.provenance, weight_version=weight_version)


def _with_faults(records: Sequence[RolloutRecord], weight_version: int | None) -> list[RolloutRecord]:
    """Return records with the faults that only the other rows of the batch reveal."""
    have_routes = any(record.routing is not None for record in records)
    have_version = any(record.provenance.weight_version == weight_version for record in records)
    checked = []
    for record in records:
        version = record.provenance.weight_version
        fault = record.fault
        if fault is None and have_version and version != weight_version:
            message = f"it was sampled with weight version {version}, but the engine is at {weight_version}."
            fault = Fault(reason="weight_version", message=message)
        elif fault is None and have_routes and record.routing is None:
            fault = Fault(reason="routes", message="it has no routes, although other rollouts of its batch have some.")
        checked.append(record if fault is record.fault else replace(record, fault=fault))
    return checked


def _routing_of(records: Sequence[RolloutRecord]) -> list[RoutingTrace] | None:
    """Return a trace for each record, which is empty for those whose routes are of no use; None if nothing was recorded."""
    like = next((record.routing for record in records if record.routing is not None), None)
    if like is None:
        return None
    traces = []
    for record in records:
        useless = record.fault is not None and record.fault.reason in USELESS_ROUTES
        if record.routing is None or useless:
            traces.append(unrouted(record, layers=like.layers, top_k=like.top_k, num_experts=like.num_experts))
        else:
            traces.append(record.routing)
    return traces


def unrouted(record: RolloutRecord, *, layers: Sequence[int], top_k: int, num_experts: int) -> RoutingTrace:
    """Return a trace without rows for a record, which the model then routes itself."""
    return RoutingTrace.unrouted(
        torch.from_numpy(record.token_ids),
        layers=layers,
        top_k=top_k,
        num_experts=num_experts,
        version=record.provenance.weight_version,
    )


def routes_of(passes: Sequence[RoutingTrace], batch: Batch) -> list[RoutingTrace]:
    """Return the routes of each row from the last recorded pass over the whole batch, padding included; raises RoutingError."""
    rows, width = batch.tokens.shape
    whole = next((trace for trace in reversed(passes) if trace.rows == rows * width), None)
    if whole is None:
        sizes = [trace.rows for trace in passes]
        raise RoutingError(
            f"the forward passes that were recorded are over {sizes} tokens, and the batch is {rows} x {width}; run the model on "
            "batch.tokens, all rows at once."
        )
    trace = whole.to("cpu")
    lengths = batch.attention_mask.sum(1).tolist()
    return [trace.sequence(row * width, row * width + length) for row, length in enumerate(lengths)]
