"""Compare the dtypes read back from trainer, weight update and engine with those that were asked for.

Half-applied FP16 is common: a trainer that ignores `fp16=True`, an engine that turns "auto" into bfloat16, a
weight update that passes through bfloat16. Each of these has a check here, which says what to change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mismatch_ext.errors import PrecisionError
from mismatch_ext.precision.fixes import TrainerFixes
from mismatch_ext.precision.names import NAMES, spelled
from mismatch_ext.precision.policy import PrecisionPolicy

NONE = "none"


@dataclass(frozen=True, kw_only=True)
class TrainerReading:
    """The precision of the live trainer.

    Args:
        parameter_dtypes: Number of trainable parameters by dtype name.
        autocast_dtype: Dtype that autocast gives a float32 matrix product in the forward pass; None if autocast is
            off.
        scaler: The loss scaler's "class", "enabled" and "scale"; None if there is no scaler.
        reduce_dtype: Dtype in which gradients are summed over ranks; None if they are not summed, or if the dtype is that of
            the master weights.
        device: Device type.
    """

    parameter_dtypes: Mapping[str, int]
    autocast_dtype: str | None
    scaler: Mapping[str, Any] | None
    reduce_dtype: str | None
    device: str

    @property
    def compute_dtype(self) -> str:
        """The dtype of matrix products: autocast's; without autocast the dtype of most parameters, float32 if there are none."""
        return self.autocast_dtype or max(
            self.parameter_dtypes, key=self.parameter_dtypes.__getitem__, default="float32"
        )


@dataclass(frozen=True, kw_only=True)
class EngineReading:
    """The precision of the live engine.

    Args:
        engine: Name of the engine, for example "vllm".
        version: Version of the engine.
        model_dtype: Compute dtype after the engine resolved "auto".
        parameter_dtypes: Number of parameters by dtype name; empty if they are out of reach in another process.
        kv_cache_dtype: Dtype of the KV cache, or "auto" for the compute dtype.
        logprobs_mode: Which log-probabilities the engine returns.
        quantization: Name of the quantisation method; None if there is none.
    """

    engine: str
    version: str
    model_dtype: str
    parameter_dtypes: Mapping[str, int]
    kv_cache_dtype: str
    logprobs_mode: str
    quantization: str | None

    @property
    def renormalises(self) -> bool:
        """Whether log-probabilities are normalised over the tokens that truncation keeps; only vLLM's processed ones are."""
        return self.engine == "vllm" and self.logprobs_mode.startswith("processed")


@dataclass(frozen=True, kw_only=True)
class SyncReading:
    """How weights travel from trainer to engine.

    Args:
        sent_dtype: Dtype in which the trainer sends the weights.
        received_dtype: Dtype in which the engine stores the weights.
    """

    sent_dtype: str
    received_dtype: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One property that is not as asked for.

    Args:
        side: "trainer", "sync" or "engine".
        what: The property.
        expected: What the policy asks for.
        found: What was read back.
        fix: What to change.
    """

    side: str
    what: str
    expected: str
    found: str
    fix: str

    def __str__(self) -> str:
        return f"{self.side} {self.what}: expected {self.expected}, found {self.found}. {self.fix}"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One property that was compared; a failed one is also a `Finding`.

    Args:
        side: "trainer", "sync" or "engine".
        what: The property.
        expected: What the policy asks for.
        found: What was read back.
        ok: Whether the two agree.
    """

    side: str
    what: str
    expected: str
    found: str
    ok: bool


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Outcome of an audit.

    Args:
        dtype: Compute dtype asked for.
        checks: Every property that was compared, in order.
        findings: The properties that are not as asked for.
        unread: Sides that were not audited, because they do not exist or cannot be read yet.
    """

    dtype: str
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    unread: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything that was read is as asked for."""
        return not self.findings

    def raise_for_findings(self) -> None:
        """Refuse a run that is not in the precision asked for.

        Raises:
            PrecisionError: There is a finding; the message lists each on a line, with what to change.
        """
        if self.findings:
            lines = "\n".join(f"  - {finding}" for finding in self.findings)
            raise PrecisionError(
                f"{self.dtype} was asked for on both sides, but {len(self.findings)} of {len(self.checks)} "
                f"readings differ:\n{lines}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON-able data, for the header of a run."""
        return {
            "dtype": self.dtype,
            "ok": self.ok,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "unread": list(self.unread),
        }

    def __str__(self) -> str:
        rows = [("side", "what", "expected", "found", "")]
        rows += [(c.side, c.what, c.expected, c.found, "ok" if c.ok else "WRONG") for c in self.checks]
        rows += [(side, "-", "-", "not read", "") for side in self.unread]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]).rstrip() for row in rows
        ]
        lines += [f"fix: {finding.side} {finding.what}: {finding.fix}" for finding in self.findings]
        return "\n".join(lines)


@dataclass
class _Audit:
    """Collects checks and findings."""

    checks: list[Check] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def check(self, side: str, what: str, expected: str, found: str, ok: bool, fix: str) -> None:
        self.checks.append(Check(side=side, what=what, expected=expected, found=found, ok=ok))
        if not ok:
            self.findings.append(Finding(side=side, what=what, expected=expected, found=found, fix=fix))


def audit(
    policy: PrecisionPolicy,
    trainer: TrainerReading,
    engine: EngineReading | None,
    sync: SyncReading | None,
    fixes: TrainerFixes | None = None,
) -> AuditReport:
    """Compare the readings with the policy.

    Args:
        policy: The precision asked for.
        trainer: Reading of the trainer.
        engine: Reading of the engine; None if the trainer generates with its own model.
        sync: Reading of a weight update; None before the first one, or without an engine.
        fixes: Advice on what to change in the trainer, in the host's terms; None for a training loop of your own.

    Returns:
        All checks and findings; call `raise_for_findings` to refuse a half-applied precision.
    """
    collected = _Audit()
    _audit_trainer(collected, policy, trainer, TrainerFixes() if fixes is None else fixes)
    if sync is not None:
        _audit_sync(collected, policy, sync)
    if engine is not None:
        _audit_engine(collected, policy, engine)
    return AuditReport(
        dtype=policy.dtype,
        checks=tuple(collected.checks),
        findings=tuple(collected.findings),
        unread=tuple(side for side, reading in (("sync", sync), ("engine", engine)) if reading is None),
    )


def _audit_trainer(collected: _Audit, policy: PrecisionPolicy, trainer: TrainerReading, fixes: TrainerFixes) -> None:
    masters = _counted(trainer.parameter_dtypes)
    collected.check(
        "trainer",
        "parameters",
        policy.master_dtype,
        _mix(masters),
        set(masters) == {policy.master_dtype},
        f"{fixes.masters}: in float16 masters Adam's epsilon underflows and torch refuses to unscale, and in any half dtype "
        "small updates are rounded away."
        if masters
        else "The model has no trainable parameter; check which parameters require gradients.",
    )
    found = NONE if trainer.autocast_dtype is None else spelled(trainer.autocast_dtype)
    expected = policy.autocast_dtype or NONE
    off_on_cpu = found == NONE and trainer.device == "cpu"
    fix = fixes.for_autocast(policy.dtype, off_on_cpu=off_on_cpu)
    collected.check("trainer", "autocast", expected, found, found == expected, fix)
    _audit_scaler(collected, policy, trainer)
    if trainer.reduce_dtype is not None:
        reduce = spelled(trainer.reduce_dtype)
        collected.check(
            "trainer",
            "gradient reduction",
            " or ".join(policy.reduce_dtypes),
            reduce,
            reduce in policy.reduce_dtypes,
            f"{fixes.reduction}: a sum over ranks in a half dtype overflows or loses bits that its terms still have.",
        )


def _audit_scaler(collected: _Audit, policy: PrecisionPolicy, trainer: TrainerReading) -> None:
    scaler = trainer.scaler
    enabled = scaler is not None and scaler.get("enabled") is True
    if scaler is None:
        found = NONE
    else:
        scale = f" at {scaler['scale']:g}" if enabled and "scale" in scaler else ""
        found = f"{scaler.get('class', 'a scaler')} {'enabled' if enabled else 'disabled'}{scale}"
    collected.check(
        "trainer",
        "loss scaler",
        "enabled" if policy.needs_scaler else NONE,
        found,
        enabled == policy.needs_scaler,
        "Use mismatch_ext.precision.scaler.LossScaler: without scaling, float16 gradients below about 6e-8 "
        "become zero. torch's scalers disable themselves where their device (by default cuda) is missing."
        if policy.needs_scaler
        else f"Remove the loss scaler: {policy.dtype} has float32's range; a scaler would only skip steps.",
    )


def _audit_sync(collected: _Audit, policy: PrecisionPolicy, sync: SyncReading) -> None:
    sent, received = spelled(sync.sent_dtype), spelled(sync.received_dtype)
    collected.check(
        "sync",
        "sent dtype",
        " or ".join(policy.sent_dtypes),
        sent,
        sent in policy.sent_dtypes,
        f"Send weights in {' or '.join(policy.sent_dtypes)}: each step through another dtype rounds them "
        "again, and the engine then holds other weights than the trainer.",
    )
    collected.check(
        "sync",
        "received dtype",
        policy.engine_dtype,
        received,
        received == policy.engine_dtype,
        f"Start the engine with dtype={policy.engine_dtype!r}, so that it stores what the trainer computes with.",
    )


def _audit_engine(collected: _Audit, policy: PrecisionPolicy, engine: EngineReading) -> None:
    name = f"{engine.engine} {engine.version}"
    dtype = spelled(engine.model_dtype)
    collected.check(
        "engine",
        "dtype",
        policy.engine_dtype,
        dtype,
        dtype == policy.engine_dtype,
        f"Start {name} with dtype={policy.engine_dtype!r}; its default 'auto' follows the checkpoint and "
        "turns float32 into bfloat16.",
    )
    held = _counted(engine.parameter_dtypes)
    # Routers, their biases and lm_head may be float32 on purpose: a wider dtype than the one asked for is not a
    # mismatch.
    foreign = sorted(set(held) - {policy.engine_dtype, "float32"})
    quantized = policy.quantization is not None
    if held:
        # The quantisation method decides how it stores weights, but another compute dtype beside them is wrong.
        wrong = set(foreign) & set(NAMES) if quantized else foreign
        mostly = quantized or max(held, key=lambda key: held[key]) == policy.engine_dtype
        collected.check(
            "engine",
            "parameters",
            f"{policy.engine_dtype} beside {policy.quantization} weights"
            if quantized
            else f"mostly {policy.engine_dtype}",
            _mix(held),
            not wrong and mostly,
            f"Start {name} with dtype={policy.engine_dtype!r} and without quantisation; read the engine's "
            "weights again after its weight update.",
        )
    cache = spelled(engine.kv_cache_dtype)
    collected.check(
        "engine",
        "KV cache",
        policy.kv_cache or policy.engine_dtype,
        f"auto ({dtype})" if cache == "auto" else cache,
        cache in policy.kv_cache_dtypes,
        f"Start {name} with kv_cache_dtype='auto': another cache dtype rounds keys and values that the "
        "trainer does not. If it is on purpose, say so: mismatch.precision.engine_kv_cache."
        if policy.kv_cache is None
        else f"Start {name} with kv_cache_dtype={policy.kv_cache!r}, or correct mismatch.precision.engine_kv_cache.",
    )
    collected.check(
        "engine",
        "log-probabilities",
        policy.logprobs_mode,
        engine.logprobs_mode,
        engine.logprobs_mode == policy.logprobs_mode,
        f"Start {name} with logprobs_mode={policy.logprobs_mode!r}: raw ones ignore the temperature that is "
        "sampled with, so the ratio compares two different distributions.",
    )
    collected.check(
        "engine",
        "quantization",
        policy.quantization or NONE,
        engine.quantization or NONE,
        engine.quantization == policy.quantization,
        f"Start {name} without quantisation: quantised weights are not the trainer's. If they are quantised on purpose, say so: "
        "mismatch.precision.engine_weights."
        if policy.quantization is None
        else f"Start {name} with quantization={policy.quantization!r}, or correct mismatch.precision.engine_weights.",
    )


def _counted(dtypes: Mapping[str, int]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for dtype, count in dtypes.items():
        if count:
            counts[spelled(dtype)] = counts.get(spelled(dtype), 0) + count
    return counts


def _mix(counts: Mapping[str, int]) -> str:
    """Return the dtypes in words, with their shares if there are several."""
    total = sum(counts.values())
    if len(counts) <= 1:
        return next(iter(counts), NONE)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{dtype} {count / total:.1%}" for dtype, count in ordered)
