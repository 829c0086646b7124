"""Compare the dtypes read back from trainer, weight update and engine with those that were asked for.

Half-applied FP16 is common: a trainer that ignores `fp16=True`, an engine that turns "auto" into bfloat16, a weight update
that passes through bfloat16. Each of these has a check here, which says what to change.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_ext.config import PrecisionConfig, section_of
from mismatch_ext.errors import PrecisionError
from mismatch_ext.precision.dtypes import LOGPROBS_MODE, NAMES, TrainerFixes, spelled

NONE = "none"
HEAD_UNREAD = "trainer's output head"
"""Stands in `AuditReport.unread` if a head in float32 was asked for and the trainer's cannot be read."""
HEAD_ARGUMENTS = {"vllm": "hf_overrides={'head_dtype': 'float32'}", "sglang": "enable_fp32_lm_head=True"}
"""What starts an engine with an output head in float32."""


@dataclass(frozen=True, kw_only=True)
class TrainerReading:
    """The precision of the live trainer: trainable parameters by dtype, autocast's dtype of a float32 product in the forward
    pass (None: off), the loss scaler's "class", "enabled" and "scale", the dtype of gradient sums over ranks (None: the
    masters', or no sum), and the dtype that the output head multiplies in (None: it cannot be read).
    """

    parameter_dtypes: Mapping[str, int]
    autocast_dtype: str | None
    scaler: Mapping[str, Any] | None
    reduce_dtype: str | None
    device: str
    head_dtype: str | None = None

    @property
    def compute_dtype(self) -> str:
        """The dtype of matrix products: autocast's; without autocast the dtype of most parameters, float32 if there are none."""
        return self.autocast_dtype or max(
            self.parameter_dtypes, key=self.parameter_dtypes.__getitem__, default="float32"
        )


@dataclass(frozen=True, kw_only=True)
class EngineReading:
    """The precision of the live engine: its dtype after "auto" was resolved, its parameters by dtype (empty if out of reach in
    another process), its KV cache's dtype ("auto": the compute dtype), which log-probabilities it returns, and the dtype that its
    output head multiplies in (None: it cannot be read).
    """

    engine: str
    version: str
    model_dtype: str
    parameter_dtypes: Mapping[str, int]
    kv_cache_dtype: str
    logprobs_mode: str
    quantization: str | None
    head_dtype: str | None = None

    @property
    def renormalizes(self) -> bool:
        """Whether log-probabilities are normalized over the tokens that truncation keeps; only vLLM's processed ones are."""
        return self.engine == "vllm" and self.logprobs_mode.startswith("processed")


@dataclass(frozen=True, kw_only=True)
class SyncReading:
    """The dtype in which the trainer sends weights, and the one in which the engine stores them."""

    sent_dtype: str
    received_dtype: str


@dataclass(frozen=True)
class Check:
    """One property that was compared."""

    side: str
    what: str
    expected: str
    found: str
    ok: bool
    fix: str

    def __str__(self) -> str:
        return f"{self.side} {self.what}: expected {self.expected}, found {self.found}. {self.fix}"


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Outcome of an audit: the dtype asked for, every property that was compared, and the sides that could not be read yet."""

    dtype: str
    checks: tuple[Check, ...]
    unread: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Check, ...]:
        """The properties that are not as asked for."""
        return tuple(check for check in self.checks if not check.ok)

    @property
    def ok(self) -> bool:
        """Whether everything that was read is as asked for."""
        return not self.findings

    def raise_for_findings(self) -> None:
        """Raise PrecisionError if there is a finding; the message lists each on a line, with what to change."""
        if not self.ok:
            lines = "".join(f"\n  - {finding}" for finding in self.findings)
            raise PrecisionError(
                f"{self.dtype} was asked for on both sides, but {len(self.findings)} of {len(self.checks)} readings "
                f"differ:{lines}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON-able data, for the header of a run."""
        rows = [dataclasses.asdict(check) for check in self.checks]
        for row in rows:
            row |= {"fix": "" if row["ok"] else row["fix"]}
        return {"dtype": self.dtype, "ok": self.ok, "checks": rows, "unread": list(self.unread)}


def audit(
    precision: PrecisionConfig | Mapping[str, Any] | str,
    trainer: TrainerReading,
    engine: EngineReading | None,
    sync: SyncReading | None,
    fixes: TrainerFixes | None = None,
) -> AuditReport:
    """Compare the dtypes read back from both sides with the one precision asked for (uniform FP16, arXiv 2510.26788).

    Args:
        precision: The precision asked for: a `precision` section, a mapping of its keys, or its dtype.
        trainer: Reading of the trainer.
        engine: Reading of the engine; None if the trainer generates with its own model.
        sync: Reading of a weight update; None before the first one, or without an engine.
        fixes: Advice on what to change in the trainer, in the host's terms; None for a training loop of your own.

    Returns:
        All checks; `findings` are those that failed. `raise_for_findings` raises PrecisionError for them.
    """
    precision = section_of(PrecisionConfig, precision, "precision", "dtype")
    checks = _trainer_checks(precision, trainer, fixes or TrainerFixes())
    checks += [] if sync is None else _sync_checks(precision, sync)
    checks += [] if engine is None else engine_checks(precision, engine)
    unread = tuple(side for side, reading in (("sync", sync), ("engine", engine)) if reading is None)
    if precision.head is not None and trainer.head_dtype is None:
        unread += (HEAD_UNREAD,)
    return AuditReport(dtype=precision.dtype, checks=tuple(checks), unread=unread)


def _trainer_checks(precision: PrecisionConfig, trainer: TrainerReading, fixes: TrainerFixes) -> list[Check]:
    checks = [
        _masters_check(trainer, fixes),
        _autocast_check(precision, trainer, fixes),
        _scaler_check(precision, trainer),
    ]
    if trainer.reduce_dtype is not None:
        # A float16 sum may overflow even if no term does.
        allowed = ("float32", "bfloat16") if precision.dtype == "bfloat16" else ("float32",)
        reduce = spelled(trainer.reduce_dtype)
        fix = f"{fixes.reduction}: a sum over ranks in a half dtype overflows or loses bits that its terms still have."
        checks.append(Check("trainer", "gradient reduction", " or ".join(allowed), reduce, reduce in allowed, fix))
    if trainer.head_dtype is not None:
        checks.append(_head_check(precision, "trainer", trainer.head_dtype, f"{fixes.head}."))
    return checks


def _masters_check(trainer: TrainerReading, fixes: TrainerFixes) -> Check:
    masters = _counted(trainer.parameter_dtypes)
    fix = "The model has no trainable parameter; check which parameters require gradients."
    if masters:
        fix = (
            f"{fixes.masters}: in float16 masters Adam's epsilon underflows and torch refuses to unscale, and in any half "
            "dtype small updates are rounded away."
        )
    return Check("trainer", "parameters", "float32", _shares(masters), set(masters) == {"float32"}, fix)


def _autocast_check(precision: PrecisionConfig, trainer: TrainerReading, fixes: TrainerFixes) -> Check:
    autocast = NONE if trainer.autocast_dtype is None else spelled(trainer.autocast_dtype)
    computes = NONE if precision.dtype == "float32" else precision.dtype
    off_on_cpu = autocast == NONE and trainer.device == "cpu"
    fix = fixes.for_autocast(precision.dtype, off_on_cpu=off_on_cpu)
    return Check("trainer", "autocast", computes, autocast, autocast == computes, fix)


def _scaler_check(precision: PrecisionConfig, trainer: TrainerReading) -> Check:
    scaler = trainer.scaler or {}
    enabled = scaler.get("enabled") is True
    found = NONE
    if scaler:
        found = f"{scaler.get('class', 'a scaler')} {'enabled' if enabled else 'disabled'}"
    if enabled and "scale" in scaler:
        found += f" at {scaler['scale']:g}"
    expected = "enabled"
    fix = (
        "Use mismatch_ext.LossScaler: without scaling, float16 gradients below about 6e-8 become zero. torch's scalers "
        "disable themselves where their device (by default cuda) is missing."
    )
    if not precision.needs_scaler:
        expected = NONE
        fix = f"Remove the loss scaler: {precision.dtype} has float32's range; a scaler would only skip steps."
    return Check("trainer", "loss scaler", expected, found, enabled == precision.needs_scaler, fix)


def _head_check(precision: PrecisionConfig, side: str, found: str | None, fix: str) -> Check:
    head = "unknown" if found is None else spelled(found)
    return Check(side, "output head", " or ".join(precision.head_dtypes), head, head in precision.head_dtypes, fix)


def _sync_checks(precision: PrecisionConfig, sync: SyncReading) -> list[Check]:
    sent, received = spelled(sync.sent_dtype), spelled(sync.received_dtype)
    # The masters' dtype or the engine's: either way weights are rounded once, and the same.
    allowed = tuple(dict.fromkeys((precision.dtype, "float32")))
    choices = " or ".join(allowed)
    send = (
        f"Send weights in {choices}: each step through another dtype rounds them again, and the engine then holds other "
        "weights than the trainer."
    )
    start = f"Start the engine with dtype={precision.dtype!r}, so that it stores what the trainer computes with."
    return [
        Check("sync", "sent dtype", choices, sent, sent in allowed, send),
        Check("sync", "received dtype", precision.dtype, received, received == precision.dtype, start),
    ]


def engine_checks(precision: PrecisionConfig, engine: EngineReading) -> list[Check]:
    """Compare an engine's reading with the precision asked for."""
    name = f"{engine.engine} {engine.version}"
    dtype = spelled(engine.model_dtype)
    fix = (
        f"Start {name} with dtype={precision.dtype!r}; its default 'auto' follows the checkpoint and turns float32 into "
        "bfloat16."
    )
    checks = [Check("engine", "dtype", precision.dtype, dtype, dtype == precision.dtype, fix)]
    stored = _counted(engine.parameter_dtypes)
    if stored:
        checks.append(_stored_check(precision, name, stored))
    if precision.head is not None or engine.head_dtype is not None:
        head = "without another dtype for its head"
        if precision.head is not None:
            head = f"with {HEAD_ARGUMENTS.get(engine.engine, 'a head in float32')}"
        checks.append(_head_check(precision, "engine", engine.head_dtype, f"Start {name} {head}."))
    checks.append(_cache_check(precision, name, engine, dtype))
    fix = (
        f"Start {name} with logprobs_mode={LOGPROBS_MODE!r}: raw ones ignore the temperature that is sampled with, so the "
        "ratio compares two different distributions."
    )
    mode = engine.logprobs_mode
    checks.append(Check("engine", "log-probabilities", LOGPROBS_MODE, mode, mode == LOGPROBS_MODE, fix))
    checks.append(_quantization_check(precision, name, engine.quantization))
    return checks


def _stored_check(precision: PrecisionConfig, name: str, stored: Counter[str]) -> Check:
    # Routers, their biases and lm_head may be float32 on purpose. A quantization method decides how it stores weights, but
    # another compute dtype next to them is wrong.
    foreign = set(stored) - {precision.dtype, "float32"}
    if precision.engine_weights is None:
        expected = f"mostly {precision.dtype}"
        ok = not foreign and max(stored, key=lambda key: stored[key]) == precision.dtype
    else:
        expected = f"{precision.dtype} beside {precision.engine_weights} weights"
        ok = not foreign & set(NAMES)
    fix = (
        f"Start {name} with dtype={precision.dtype!r} and without quantization; read the engine's weights again after its "
        "weight update."
    )
    return Check("engine", "parameters", expected, _shares(stored), ok, fix)


def _cache_check(precision: PrecisionConfig, name: str, engine: EngineReading, dtype: str) -> Check:
    cache = spelled(engine.kv_cache_dtype)
    found = f"auto ({dtype})" if cache == "auto" else cache
    wanted = precision.engine_kv_cache
    fix = f"Start {name} with kv_cache_dtype={wanted!r}, or correct mismatch.precision.engine_kv_cache."
    if wanted is None:
        fix = (
            f"Start {name} with kv_cache_dtype='auto': another cache dtype rounds keys and values that the trainer does not. "
            "If it is on purpose, say so: mismatch.precision.engine_kv_cache."
        )
    return Check("engine", "KV cache", wanted or precision.dtype, found, cache in precision.kv_cache_dtypes, fix)


def _quantization_check(precision: PrecisionConfig, name: str, found: str | None) -> Check:
    wanted = precision.engine_weights
    fix = f"Start {name} with quantization={wanted!r}, or correct mismatch.precision.engine_weights."
    if wanted is None:
        fix = (
            f"Start {name} without quantization: quantized weights are not the trainer's. If they are quantized on purpose, "
            "say so: mismatch.precision.engine_weights."
        )
    return Check("engine", "quantization", wanted or NONE, found or NONE, found == wanted, fix)


def _counted(dtypes: Mapping[str, int]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for dtype, count in dtypes.items():
        if count:
            counts[spelled(dtype)] += count
    return counts


def _shares(counts: Counter[str]) -> str:
    """Return the dtypes in words, with their shares if there are several."""
    if len(counts) <= 1:
        return next(iter(counts), NONE)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{dtype} {count / counts.total():.1%}" for dtype, count in ordered)
