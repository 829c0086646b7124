"""Scan a checkpoint before training: do its weights, and its activations on sample inputs, fit a compute dtype?

The verdict's thresholds, for every scanned tensor:

- not ready: a value is not finite, or its magnitude exceeds the dtype's largest (65504 for float16). Computing in the dtype
  then gives infinity, and no loss scale repairs a forward pass.
- risky: the headroom (the dtype's largest value over the tensor's largest magnitude) is below 8, so that growth of weights and
  activations in training can use it up; or more than 10 % of the nonzero elements are subnormal in the dtype, so that they lose
  relative precision; or more than 5 % of the nonzero elements round to zero.

Zeros are exact in every dtype, so that they count in no share. Gradients are not scanned; the loss scaler keeps them in range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mismatch_ext.config import PrecisionConfig
from mismatch_ext.errors import PrecisionError
from mismatch_ext.precision.dtypes import canonical, limits

HEADROOM = 8.0
SUBNORMAL_FRAC = 0.10
FLUSH_FRAC = 0.05
CHUNK = 1 << 22  # elements; keeps the scan's own memory to a few tens of MiB, whatever the size of a tensor
SHOWN = 5  # tensors of a kind in the table
EVENT = "readiness"
"""Name of the event, at the start of a run, that contains the result of `check_readiness`."""


@dataclass(kw_only=True)
class TensorReadiness:
    """Counts of a tensor's elements, or of all tensors seen at one place of a model, by how they would fare in a dtype."""

    name: str
    dtype: str
    numel: int = 0
    nonzero: int = 0
    overflow: int = 0
    subnormal: int = 0
    flushed: int = 0
    max_abs: float = 0.0

    def add(self, tensor: Tensor) -> None:
        """Count the elements of a floating-point tensor, or of this rank's shard of it."""
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        limit, flat = limits(self.dtype), local.detach().reshape(-1)
        # Values are widened, because a narrow dtype cannot represent the limits of a wider dtype.
        wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
        # Exactly half of the smallest subnormal is a tie, which rounds to even, here zero.
        lowest = limit.smallest_normal * limit.eps / 2
        for start in range(0, flat.numel(), CHUNK):
            magnitude = flat[start : start + CHUNK].to(wide).abs()
            is_nonzero = magnitude != 0
            is_too_large = ~(magnitude <= limit.max)  # also true for NaN
            is_subnormal = (magnitude > lowest) & (magnitude < limit.smallest_normal)
            is_flushed = (magnitude > 0) & (magnitude <= lowest)
            counts = torch.stack([is_nonzero.sum(), is_too_large.sum(), is_subnormal.sum(), is_flushed.sum()])
            nonzero, overflow, subnormal, flushed = counts.tolist()
            largest = float(magnitude.max())
            self.max_abs = math.inf if math.isnan(largest) else max(self.max_abs, largest)
            self.numel += magnitude.numel()
            self.nonzero += nonzero
            self.overflow += overflow
            self.subnormal += subnormal
            self.flushed += flushed

    @property
    def headroom(self) -> float:
        """The dtype's largest value over the largest magnitude."""
        return limits(self.dtype).max / self.max_abs if self.max_abs else math.inf

    @property
    def overflow_frac(self) -> float:
        """Share of all elements that are not finite or exceed the dtype's largest value."""
        return self.overflow / self.numel

    @property
    def subnormal_frac(self) -> float:
        """Share of nonzero elements that are subnormal in the dtype, but do not round to zero."""
        return self.subnormal / max(self.nonzero, 1)

    @property
    def flush_frac(self) -> float:
        """Share of nonzero elements that round to zero."""
        return self.flushed / max(self.nonzero, 1)


def scan_weights(
    named_tensors: Iterable[tuple[str, Tensor]], dtype: str | torch.dtype = "float16"
) -> list[TensorReadiness]:
    """Scan weights, such as `model.named_parameters()`; integer and empty tensors are skipped."""
    scans, name_of_dtype = [], canonical(dtype)
    for name, tensor in named_tensors:
        if tensor.is_floating_point() and tensor.numel():
            scans.append(TensorReadiness(name=name, dtype=name_of_dtype))
            scans[-1].add(tensor)
    return scans


def scan_activations(
    model: nn.Module, forward: Callable[[], None], dtype: str | torch.dtype = "float16"
) -> list[TensorReadiness]:
    """Scan the inputs and outputs of every leaf module while `forward` runs the model in float32 on sample inputs.

    Inputs too, because residual sums and gated products are no module's output. Scores inside a fused attention are not seen.
    """
    scans: dict[str, TensorReadiness] = {}
    name_of_dtype = canonical(dtype)

    def hook(name: str) -> Callable[..., None]:
        def observe(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            for place, values in ((f"{name} (in)", (args, kwargs)), (f"{name} (out)", output)):
                for tensor in _floating(values):
                    scans.setdefault(place, TensorReadiness(name=place, dtype=name_of_dtype)).add(tensor)

        return observe

    leaves = {
        name or type(module).__name__: module for name, module in model.named_modules() if not [*module.children()]
    }
    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in leaves.items()]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    if not scans:
        raise PrecisionError(
            f"the forward pass ran none of the {len(leaves)} leaf modules of {type(model).__name__}; "
            "call the very model that is being scanned."
        )
    return list(scans.values())


def _floating(value: Any) -> Iterator[Tensor]:
    """Yield the non-empty floating-point tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _floating(item)


def check_readiness(named_tensors: Iterable[tuple[str, Tensor]], precision: PrecisionConfig | None) -> str | None:
    """Return a warning of weights that do not fit the dtype of both sides, or raise PrecisionError if the section says so."""
    if precision is None or precision.readiness == "off":
        return None
    report = ReadinessReport(dtype=precision.dtype, weights=scan_weights(named_tensors, precision.dtype))
    if report.verdict == "ready":
        return None
    verdict = "not ready for" if report.verdict == "not ready" else "risky in"
    message = f"the checkpoint is {verdict} {precision.dtype}: {'; '.join(report.reasons)}"
    if report.verdict == "not ready" and precision.readiness == "error":
        raise PrecisionError(f"{message}. Use another dtype, or set mismatch.precision.readiness='warn'.")
    return message


class ReadinessReport:
    """Verdict on a checkpoint for one dtype, with a sentence per broken rule that names the worst."""

    def __init__(
        self,
        *,
        dtype: str = "float16",
        weights: list[TensorReadiness] | None = None,
        activations: list[TensorReadiness] | None = None,
    ) -> None:
        self.dtype, self.weights, self.activations = dtype, weights or [], activations or []
        if not self.weights and not self.activations:
            raise PrecisionError("nothing was scanned: no floating-point weight and no activation.")
        largest = f"{limits(dtype).max:g}"
        overflows = (f"exceed {largest} or are not finite", "max {:.3g}", "max_abs", lambda t: t.overflow > 0)
        fatal, risks = self._broken(overflows), []
        near = f"are within a factor {HEADROOM:g} of {largest}"
        small = f"are subnormal in more than {SUBNORMAL_FRAC:.0%} of their nonzero elements"
        zero = f"round to zero in more than {FLUSH_FRAC:.0%} of their nonzero elements"
        risks += self._broken((near, "max {:.3g}", "max_abs", lambda t: not t.overflow and t.headroom < HEADROOM))
        risks += self._broken((small, "{:.1%}", "subnormal_frac", lambda t: t.subnormal_frac > SUBNORMAL_FRAC))
        risks += self._broken((zero, "{:.1%}", "flush_frac", lambda t: t.flush_frac > FLUSH_FRAC))
        self.reasons = (*fatal, *risks)
        self.verdict: Literal["ready", "risky", "not ready"] = "not ready" if fatal else "risky" if risks else "ready"

    def _broken(self, rule: tuple[str, str, str, Callable[[TensorReadiness], bool]]) -> list[str]:
        """Return a sentence for the weights and for the activations that break a rule, with the three worst."""
        text, form, size, breaks = rule
        sentences = []
        for kind, scans in (("weights", self.weights), ("activations", self.activations)):
            worst = sorted(filter(breaks, scans), key=lambda scan: -getattr(scan, size))
            named = [f"{scan.name} ({form.format(getattr(scan, size))})" for scan in worst[:3]]
            if worst:
                sentences.append(f"{len(worst)} {kind} {text}: {', '.join(named)}{', ...' if len(worst) > 3 else ''}")
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Return what `mismatch-ext readiness --json` prints."""
        scans = {"weights": self.weights, "activations": self.activations}
        tensors = {kind: [dataclasses.asdict(scan) for scan in found] for kind, found in scans.items()}
        return {"dtype": self.dtype, "verdict": self.verdict, "reasons": list(self.reasons), **tensors}

    def __str__(self) -> str:
        lines = [
            f"{self.dtype}: {self.verdict} ({len(self.weights)} weights, {len(self.activations)} activations scanned)"
        ]
        lines += [f"  - {reason}" for reason in self.reasons]
        kinds = (self.weights, self.activations)
        rows = [scan for scans in kinds for scan in sorted(scans, key=lambda scan: scan.headroom)[:SHOWN]]
        width = max(len(scan.name) for scan in rows)
        lines.append(f"  {'tightest'.ljust(width)}  {'max':>9}  {'headroom':>9}  subnormal  to zero")
        for scan in rows:
            shares = f"{scan.subnormal_frac:9.2%}  {scan.flush_frac:7.2%}"
            lines.append(f"  {scan.name.ljust(width)}  {scan.max_abs:9.3g}  {scan.headroom:9.3g}  {shares}")
        return "\n".join(lines)
