"""The doctor's input and its result: the parts of the gap, named causes, what they leave, and which of them a remedy confirms."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from mismatch_ext.doctor.blocks import Block
from mismatch_ext.doctor.causes import SLOPES
from mismatch_ext.doctor.foretold import Foretold, Mended
from mismatch_ext.doctor.remedies import Remedy, remedy
from mismatch_ext.doctor.rungs import FLOAT32, Largest, Rung
from mismatch_ext.doctor.sample import Floats
from mismatch_ext.doctor.split import Part
from mismatch_ext.doctor.table import Logits
from mismatch_ext.doctor.tokens import TokensTest

# An error up to this size is rounding, in units of the trainer's own arithmetic: of medians, then of the largest hundredth.
ROUNDING, ROUNDING_TAIL = 1.3, 3.0
# A named cause that leaves something is confirmed if it predicted at least this part of what the remedy mends. A remedy resets
# all settings of a kind together, so that it also mends what another of them did.
MOST = 0.75
# Families of causes that do not act when the engine scores the same tokens as a prompt: that score alone is their remedy.
SAMPLED = ("sampling", "reporting", "prompt")
SCHEMA = 1
DOCTOR_FILE = "doctor.json"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The trainer side's scores of a sample's tokens, at the run's temperature.

    Args:
        trainer: Log-probabilities as the run computes them `[N]`.
        own: The trainer's arithmetic in the engine's dtype, under the engine's routes `[N]`.
        logits: Logits of the oracle `[N, V]`, float32, before the temperature. The oracle is the trainer's model in float32, with
            weights rounded to the engine's dtype, under the engine's routes if they are known.
        headed: `own` with a head in float32 `[N]`; None if that is the same.
        native: Log-probabilities of the oracle under the trainer's own routes `[N]`; None for a model without experts.
        straight: `trainer` with right padding, which shifts no position `[N]`; None if `trainer` itself has right padding.
        layout: How the run lays out its batches, in words; "" if it pads on the right.
        rungs: Measured differences of the trainer from itself.
        temperature: Number that the trainer divides logits by.
        end_tokens: Ids that end a response.
        engine_dtype, trainer_dtype: Dtypes that the sides compute in, for remedies; "" if unknown.
        trainer_head: Dtype that the trainer's head computes in; "" if it is `trainer_dtype`.
    """

    trainer: Floats
    own: Floats
    logits: Tensor | Logits
    headed: Floats | None = None
    native: Floats | None = None
    straight: Floats | None = None
    layout: str = ""
    rungs: tuple[Rung, ...] = ()
    temperature: float = 1.0
    end_tokens: tuple[int, ...] = ()
    engine_dtype: str = ""
    trainer_dtype: str = ""
    trainer_head: str = ""


@dataclass(frozen=True, kw_only=True)
class NamedCause:
    """A cause that a report names.

    Args:
        key, family, said: Those of the `Cause`; the sentence `said` contains the parameter.
        parameter: Value of the cause's parameter.
        status: "fits"; "partly" if something is left; "confirmed" if its remedy was applied and the gap fell as predicted; or
            "measured" if a side differs from itself.
        share: The part of the mean |Δlogp| that the cause makes; None for too few tokens.
        z, slope, low, high: How sure the fit is; None for a cause that was not fitted.
        ties: Keys of causes that fit equally well.
        remedy: What to change.
    """

    key: str
    family: str
    said: str
    parameter: float
    status: Literal["fits", "partly", "confirmed", "measured"]
    share: float | None
    z: float | None
    slope: float | None
    low: float | None
    high: float | None
    ties: tuple[str, ...]
    remedy: Remedy


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the doctor found.

    Args:
        tokens, responses: Numbers of judged tokens and responses.
        gap: `logp_abs_diff_mean`, `k3_kl` and `logp_abs_diff_max` between engine and trainer.
        parts: Terms of the gap, in the order of the path from engine to trainer.
        ratio, tail_ratio: The engine's error in units of the trainer's own arithmetic: of medians, and of the largest hundredth.
        trainer_ratio: The trainer's error in the same units.
        measurable: Whether rounding is larger than float32's own, so that the ratios mean something.
        causes: The named causes.
        hints: Sentences on fits that are not sure enough to name a cause.
        left, left_tail: `ratio` and `tail_ratio` of the error that the named causes leave.
        unexplained: Mean size of the error that is neither named nor rounding, in nats per token.
        notes: Sentences on what else was seen.
        tokens_test: Result of the test on which tokens were sampled.
        verdict: "clean", "explained", "partly" or "unexplained".
        tried: Keys of all causes that were tried.
        engine_dtype, trainer_dtype: Dtypes that the sides compute in; "" if unknown.
        mended: Effects of the remedies that were tried.
        rungs: Measured differences of each side from itself.
        largest: The token of the largest gap; None for a diagnosis without a gap.
        blocks: The network's blocks, each run on the engine's own input; empty if that was not asked for, or not possible.
        seconds: Duration of each of the doctor's rungs, by name.
        foretold: Predictions of the named causes, token by token; not in `data`.
    """

    tokens: int
    responses: int
    gap: dict[str, float]
    parts: tuple[Part, ...]
    ratio: float
    tail_ratio: float
    trainer_ratio: float
    measurable: bool
    causes: tuple[NamedCause, ...]
    hints: tuple[str, ...]
    left: float
    left_tail: float
    unexplained: float
    notes: tuple[str, ...]
    tokens_test: TokensTest
    verdict: str
    tried: tuple[str, ...]
    engine_dtype: str = ""
    trainer_dtype: str = ""
    mended: tuple[Mended, ...] = ()
    rungs: tuple[Rung, ...] = ()
    largest: Largest | None = None
    blocks: tuple[Block, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    foretold: Foretold | None = field(default=None, repr=False, compare=False)

    def exit_status(self, threshold: float) -> int:
        """Return 0 for a clean pair, 1 if the gap is explained up to the threshold, otherwise 2.

        An "unexplained" verdict with an unexplained size of 0 gives 2, too.

        Args:
            threshold: Largest mean size of the unexplained error that still gives 1, in nats per token.
        """
        if self.verdict == "clean":
            return 0
        hidden = self.verdict == "unexplained" and self.unexplained == 0
        return 2 if self.verdict != "explained" and (hidden or self.unexplained > threshold) else 1

    def data(self) -> dict[str, Any]:
        """Return the diagnosis as JSON-able data."""
        found = {"schema": SCHEMA, **asdict(replace(self, foretold=None))}
        del found["foretold"]
        found["tokens_test"]["finding"] = self.tokens_test.finding
        return found

    @property
    def mendable(self) -> tuple[NamedCause, ...]:
        """The causes that a remedy can confirm: those that predict the error of each token."""
        return tuple(cause for cause in self.causes if self.foretold is not None and cause.key in self.foretold.by)

    def confirmed(self, families: Collection[str], left: float, after: Floats) -> Diagnosis:
        """Return the diagnosis after remedies were applied to the engine and the engine scored the same tokens again.

        A cause is confirmed if the error fell to the size of rounding, and fell token by token as the cause predicts. A cause
        that left something must also have predicted most of the fall, because the remedy of its family mends more than it.

        Args:
            families: Families of the causes whose remedies were applied.
            left: The engine's error after the remedies, in units of the trainer's own arithmetic.
            after: That error of each token `[N]`, nats.
        """
        keys = [cause.key for cause in self.mendable if cause.family in families]
        if self.foretold is None or not keys:
            return self
        gap = float(np.abs(after).mean())
        slope, (predicted, fell) = self.foretold.slope(keys, after), self.foretold.falls(keys, after)
        tried = Mended(causes=tuple(keys), predicted=predicted, measured=fell, slope=slope, left=left)
        self = replace(self, mended=(*self.mended, tried))
        sure = (left <= ROUNDING or gap <= FLOAT32) and SLOPES[0] <= slope <= SLOPES[1]
        whole = self.verdict != "partly" or predicted >= MOST * fell
        said = (
            f"after the remedy of {', '.join(keys)}: the engine's error is {gap:.1e} nats per token, {left:.2f} of rounding's; "
            f"it fell by {fell:.0%}, {predicted:.0%} were predicted (slope {slope:.2f})"
        )
        if sure and not whole:
            said += "; the remedy mends more than the named cause: another setting of its kind differs too, or instead"
        elif not sure:
            said += "; that does not confirm it"
            if keys == ["temperature"] and self._scaled(after):
                return self._of_the_logits(said)
        if not (sure and whole):
            return replace(self, notes=(*self.notes, said))
        causes = tuple(replace(cause, status="confirmed") if cause.key in keys else cause for cause in self.causes)
        # The remedy also removed what the fit left, for example routes that changed because of the fault.
        verdict, unexplained = ("explained", 0.0) if self.verdict == "partly" else (self.verdict, self.unexplained)
        return replace(self, causes=causes, notes=(*self.notes, said), verdict=verdict, unexplained=unexplained)

    def _scaled(self, after: Floats) -> bool:
        """Tell whether an error like that of a temperature remains when the engine scores tokens without sampling."""
        assert self.foretold is not None
        return SLOPES[0] <= self.foretold.stays(["temperature"], after) <= SLOPES[1]

    def _of_the_logits(self, said: str) -> Diagnosis:
        """Return the diagnosis with the cause "scaled logits" instead of a temperature, which only sampling has."""
        causes = tuple(
            replace(
                cause, key="logit_scale", family="config", remedy=remedy("logit_scale"), parameter=1 / cause.parameter,
                said=f"the engine's logits are {1 / cause.parameter:.3g} times what the trainer's temperature makes of them",
            )
            if cause.key == "temperature" else cause for cause in self.causes
        )  # fmt: skip
        parts = tuple(replace(part, name="logit_scale") if part.name == "temperature" else part for part in self.parts)
        note = f"{said}: the engine's score of a prompt shows it too, and has no temperature"
        return replace(self, causes=causes, parts=parts, notes=(*self.notes, note))
