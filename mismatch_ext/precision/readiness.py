"""Scan a checkpoint before training: do its weights, and its activations on sample inputs, fit a compute dtype?

The verdict's thresholds, for every scanned tensor:

- not ready: a value is not finite, or its magnitude exceeds the dtype's largest (65504 for float16).
  Computing in the dtype then gives infinity, and no loss scale repairs a forward pass.
- risky: the headroom (the dtype's largest value over the tensor's largest magnitude) is below 8, so that growth of weights and
  activations in training can use it up; or more than 10 % of the nonzero elements are subnormal in the dtype,
  so that they lose relative precision; or more than 5 % of the nonzero elements round to zero.

Shares are of nonzero elements, because zeros are exact in every dtype and would only make shares smaller. Gradients are not
scanned; the loss scaler keeps them in range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mismatch_ext.config import PrecisionConfig
from mismatch_ext.errors import PrecisionError
from mismatch_ext.precision.dtypes import DtypeFacts, canonical, facts

Verdict = Literal["ready", "risky", "not ready"]

HEADROOM = 8.0
SUBNORMAL_FRAC = 0.10
FLUSH_FRAC = 0.05
CHUNK = 1 << 22  # elements; keeps the scan's own memory to a few tens of MiB, whatever the size of a tensor
WORST = 10  # tensors listed in a report


@dataclass(frozen=True, kw_only=True)
class TensorReadiness:
    """How a tensor, or all tensors seen at one place of a model, would fare in a dtype.

    Args:
        name: Name of the parameter, or of the module with "(in)" or "(out)".
        numel: Elements scanned.
        max_abs: Largest magnitude; infinity if an element is not finite.
        headroom: The dtype's largest value over `max_abs`.
        overflow_frac: Share of all elements that are not finite or exceed the dtype's largest value.
        subnormal_frac: Share of nonzero elements that are subnormal in the dtype, but do not round to zero.
        flush_frac: Share of nonzero elements that round to zero.
    """

    name: str
    numel: int
    max_abs: float
    headroom: float
    overflow_frac: float
    subnormal_frac: float
    flush_frac: float


class _Tally:
    """Streaming counts over tensors; stores only numbers, no tensors."""

    def __init__(self, limits: DtypeFacts) -> None:
        self.limits = limits
        self.numel = self.nonzero = self.overflow = self.subnormal = self.flushed = 0
        self.max_abs = 0.0

    def add(self, tensor: Tensor) -> None:
        """Count the elements of a floating-point tensor."""
        flat = tensor.detach().reshape(-1)
        # Values are widened, because a narrow dtype cannot represent the limits of a wider dtype.
        wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
        # Exactly half of the smallest subnormal is a tie, which rounds to even, here zero.
        lowest = self.limits.smallest_subnormal / 2
        for start in range(0, flat.numel(), CHUNK):
            magnitude = flat[start : start + CHUNK].to(wide).abs()
            counts = torch.stack(
                [
                    (magnitude != 0).sum(),
                    (~(magnitude <= self.limits.max)).sum(),  # also true for NaN
                    ((magnitude > lowest) & (magnitude < self.limits.smallest_normal)).sum(),
                    ((magnitude > 0) & (magnitude <= lowest)).sum(),
                ]
            ).tolist()
            largest = float(magnitude.max())
            self.max_abs = math.inf if math.isnan(largest) else max(self.max_abs, largest)
            self.numel += magnitude.numel()
            self.nonzero += counts[0]
            self.overflow += counts[1]
            self.subnormal += counts[2]
            self.flushed += counts[3]

    def result(self, name: str) -> TensorReadiness:
        """Return the shares."""
        nonzero = max(self.nonzero, 1)
        return TensorReadiness(
            name=name,
            numel=self.numel,
            max_abs=self.max_abs,
            headroom=self.limits.max / self.max_abs if self.max_abs else math.inf,
            overflow_frac=self.overflow / self.numel,
            subnormal_frac=self.subnormal / nonzero,
            flush_frac=self.flushed / nonzero,
        )


def scan_weights(
    named_tensors: Iterable[tuple[str, Tensor]], dtype: str | torch.dtype = "float16"
) -> list[TensorReadiness]:
    """Scan weights; integer and empty tensors are skipped.

    Args:
        named_tensors: Names and tensors, for example `model.named_parameters()`.
        dtype: The compute dtype in question.

    Raises:
        PrecisionError: `dtype` is no compute dtype.
    """
    limits = facts(dtype)
    results = []
    for name, tensor in named_tensors:
        if tensor.is_floating_point() and tensor.numel():
            tally = _Tally(limits)
            tally.add(tensor)
            results.append(tally.result(name))
    return results


def scan_activations(
    model: nn.Module, forward: Callable[[], None], dtype: str | torch.dtype = "float16"
) -> list[TensorReadiness]:
    """Scan the inputs and outputs of every leaf module during forward passes.

    Inputs are scanned too, because values that are computed between modules (residual sums, gated products) are not
    a module's output. Attention scores inside a fused attention are not seen at all. Run the pass in float32, so that
    values which would overflow in the dtype are measured.

    Args:
        model: The model; it is not changed.
        forward: Runs the model on sample inputs, any number of times.
        dtype: The compute dtype in question.

    Returns:
        One entry per leaf module and direction, in order of first use.

    Raises:
        PrecisionError: `forward` ran no leaf module of this model.
        PrecisionError: `dtype` is no compute dtype.
    """
    limits = facts(dtype)
    tallies: dict[str, _Tally] = {}

    def hook(name: str) -> Callable[..., None]:
        def observe(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            for side, values in (("in", (args, kwargs)), ("out", output)):
                for tensor in _floating(values):
                    tallies.setdefault(f"{name} ({side})", _Tally(limits)).add(tensor)

        return observe

    leaves = [(name or type(module).__name__, module) for name, module in model.named_modules() if _is_leaf(module)]
    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in leaves]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    if not tallies:
        raise PrecisionError(
            f"the forward pass ran none of the {len(leaves)} leaf modules of {type(model).__name__}; "
            "call the very model that is being scanned."
        )
    return [tally.result(name) for name, tally in tallies.items()]


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _floating(value: Any) -> Iterator[Tensor]:
    """Yield the non-empty floating-point tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floating(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floating(item)


EVENT = "readiness"
"""Name of the event, at the start of a run, that contains the result of `check_readiness`."""


def check_readiness(named_tensors: Iterable[tuple[str, Tensor]], precision: PrecisionConfig | None) -> str | None:
    """Check before a run that weights fit the dtype in which both sides will compute.

    Args:
        named_tensors: Names and tensors of the model, or of this rank's part of it.
        precision: The `precision` section; None, or one whose `readiness` is "off", checks nothing.

    Returns:
        The text of a warning, if weights are risky, or not ready while the section says "warn"; otherwise None.

    Raises:
        PrecisionError: Weights are not ready, and the section says "error".
    """
    if precision is None or precision.readiness == "off":
        return None
    weights = scan_weights(named_tensors, precision.dtype)
    report = ReadinessReport.of(weights=weights, activations=[], dtype=precision.dtype)
    reasons = "; ".join(report.reasons)
    if report.verdict == "not ready":
        message = f"the checkpoint is not ready for {precision.dtype}: {reasons}"
        if precision.readiness == "error":
            raise PrecisionError(f"{message}. Use another dtype, or set mismatch.precision.readiness='warn'.")
        return message
    return f"the checkpoint is risky in {precision.dtype}: {reasons}" if report.verdict == "risky" else None


@dataclass(frozen=True, kw_only=True)
class ReadinessReport:
    """Verdict on a checkpoint for one dtype; the thresholds are at the top of this file.

    Args:
        dtype: The compute dtype in question.
        weights: Scan of the weights.
        activations: Scan of the activations; empty when none was run.
        verdict: "ready", "risky" or "not ready".
        reasons: One sentence per broken rule, which names the worst tensors.
    """

    dtype: str
    weights: tuple[TensorReadiness, ...]
    activations: tuple[TensorReadiness, ...]
    verdict: Verdict
    reasons: tuple[str, ...]

    @classmethod
    def of(
        cls,
        *,
        weights: Sequence[TensorReadiness],
        activations: Sequence[TensorReadiness],
        dtype: str | torch.dtype = "float16",
    ) -> ReadinessReport:
        """Judge the scans.

        Args:
            weights: From `scan_weights` for this dtype.
            activations: From `scan_activations` for this dtype.
            dtype: The compute dtype in question.

        Raises:
            PrecisionError: Both scans are empty.
        """
        if not weights and not activations:
            raise PrecisionError("nothing was scanned: no floating-point weight and no activation.")
        limits = facts(dtype)
        fatal: list[str] = []
        risks: list[str] = []
        for kind, scan in (("weights", weights), ("activations", activations)):
            over = [t for t in scan if t.overflow_frac > 0]
            tight = [t for t in scan if t.overflow_frac == 0 and t.headroom < HEADROOM]
            fatal += _reason(kind, over, lambda t: t.max_abs, f"exceed {limits.max:g} or are not finite", "max {:.3g}")
            risks += _reason(
                kind,
                tight,
                lambda t: t.max_abs,
                f"are within a factor {HEADROOM:g} of {limits.max:g}",
                "max {:.3g}",
            )
            subnormal = [t for t in scan if t.subnormal_frac > SUBNORMAL_FRAC]
            risks += _reason(
                kind,
                subnormal,
                lambda t: t.subnormal_frac,
                f"are subnormal in more than {SUBNORMAL_FRAC:.0%} of their nonzero elements",
                "{:.1%}",
            )
            flushed = [t for t in scan if t.flush_frac > FLUSH_FRAC]
            risks += _reason(
                kind,
                flushed,
                lambda t: t.flush_frac,
                f"round to zero in more than {FLUSH_FRAC:.0%} of their nonzero elements",
                "{:.1%}",
            )
        verdict: Verdict = "not ready" if fatal else "risky" if risks else "ready"
        return cls(
            dtype=canonical(dtype),
            weights=tuple(weights),
            activations=tuple(activations),
            verdict=verdict,
            reasons=tuple(fatal + risks),
        )

    def tightest(self, kind: Literal["weights", "activations"], count: int = WORST) -> list[TensorReadiness]:
        """Return the tensors with the least headroom, smallest first."""
        return sorted(getattr(self, kind), key=lambda t: t.headroom)[:count]

    def to_dict(self) -> dict[str, Any]:
        """Return verdict, reasons and tightest tensors as strict JSON data; infinity becomes None."""
        return {
            "dtype": self.dtype,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "weights_scanned": len(self.weights),
            "activations_scanned": len(self.activations),
            "weights": [_plain(t) for t in self.tightest("weights")],
            "activations": [_plain(t) for t in self.tightest("activations")],
        }

    def __str__(self) -> str:
        scanned = f"{len(self.weights)} weights, {len(self.activations)} activations"
        lines = [f"{self.dtype}: {self.verdict} ({scanned} scanned)"]
        lines += [f"  - {reason}" for reason in self.reasons]
        rows = self.tightest("weights", 5) + self.tightest("activations", 5)
        width = max(len(t.name) for t in rows)
        lines.append(f"  {'tightest'.ljust(width)}  {'max':>9}  {'headroom':>9}  subnormal  to zero")
        lines += [
            f"  {t.name.ljust(width)}  {t.max_abs:9.3g}  {t.headroom:9.3g}  {t.subnormal_frac:9.2%}  "
            f"{t.flush_frac:7.2%}"
            for t in rows
        ]
        return "\n".join(lines)


def _reason(
    kind: str,
    found: Sequence[TensorReadiness],
    size: Callable[[TensorReadiness], float],
    rule: str,
    form: str,
) -> list[str]:
    """Return a sentence that says how many tensors break a rule and names the three worst."""
    if not found:
        return []
    worst = sorted(found, key=size, reverse=True)[:3]
    named = ", ".join(f"{t.name} ({form.format(size(t))})" for t in worst)
    return [f"{len(found)} {kind} {rule}: {named}" + (", ..." if len(found) > 3 else "")]


def _plain(tensor: TensorReadiness) -> dict[str, Any]:
    values = dataclasses.asdict(tensor)
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
