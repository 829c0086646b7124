"""Provenance of a rollout: engine, dtype, weights, patches and sampling settings; and the checks that refuse a rollout by it.

All rollouts of a batch must have one provenance, and come from the engine's present weights. Every host uses the functions here
to check this, so that the same rollout is refused with the same words everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from mismatch_ext.errors import RecordError
from mismatch_ext.patching import active_patches, digest_of
from mismatch_ext.precision.audit import EngineReading

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """The engine's sampling settings.

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
        """Whether some tokens can never be sampled although the trainer gives them a probability."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def without_truncation(self) -> SamplingSettings:
        """Return these settings without truncation, for a trainer that scores over sampling masks and so truncates alike."""
        return replace(self, top_p=1.0, top_k=0, min_p=0.0)

    def ratio_bias(self, *, renormalised: bool = True) -> str | None:
        """Return a sentence that says why the importance ratio is biased, or None if it is not.

        Args:
            renormalised: Whether the engine normalises log-probabilities over the tokens that top_p, top_k and min_p keep, as
                in vLLM's processed ones; SGLang reports log-probabilities from before truncation.
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
    """Provenance of a rollout.

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
    """Return the provenance of an engine's rollouts.

    Args:
        reading: The settings that the engine was found to run with.
        sampling: Settings that the requests were built with.
        weight_version: Version of the engine's weights.
        patch_digest: Digest of the patches that are active in the engine's process; None takes the patches of this process.

    Raises:
        RecordError: The engine's dtype is unknown, for example "auto".
    """
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
    """Return the one provenance that all rollouts have; each rollout is given with its name.

    Raises:
        RecordError: There is no rollout.
        RecordError: A rollout has no provenance, or two differ; names the rollouts, the field and both values.
    """
    first: tuple[str, Provenance] | None = None
    for name, found in rollouts:
        if not isinstance(found, Provenance):
            raise RecordError(unknown_origin(name, found))
        if first is None:
            first = name, found
        elif found != first[1]:
            field = next(f.name for f in fields(Provenance) if getattr(found, f.name) != getattr(first[1], f.name))
            raise RecordError(
                f"rollouts of mixed provenance: {first[0]} has {field}={getattr(first[1], field)!r}, {name} has "
                f"{field}={getattr(found, field)!r}; split them into batches of one provenance."
            )
    if first is None:
        raise RecordError("a batch needs at least one rollout record, found none.")
    return first[1]


def expect_present(provenance: Provenance, weight_version: int, name: str = "rollouts") -> None:
    """Refuse rollouts of other weights than the engine has now.

    Args:
        provenance: Provenance of the rollouts.
        weight_version: Version of the weights that were sent last.
        name: What to call the rollouts.

    Raises:
        RecordError: Another version sampled the rollouts.
    """
    if provenance.weight_version != weight_version:
        raise RecordError(
            f"{name} of weight version {provenance.weight_version}, but the engine is at {weight_version}; generate again after "
            "the weight update."
        )


def unknown_origin(name: str, found: object, what: str = "provenance") -> str:
    """Return the message about a rollout of unknown origin."""
    return f"rollout {name} has no {what} (found {found!r}); rollouts of unknown origin are not trained on."
