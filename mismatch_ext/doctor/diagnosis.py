"""What the doctor is given, and what it finds: the gap's parts, named causes, what is left, and what a remedy confirms of it."""

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

# What rounding alone leaves of an error, in units of the trainer's own arithmetic: medians, then the largest hundredth.
ROUNDING, ROUNDING_TAIL = 1.3, 3.0
# A name that leaves something is confirmed where it foretold this part of what the remedy mends: a remedy takes back settings of
# a kind together, and so mends what another of them did, too.
MOST = 0.75
# Families of causes that the engine's score of the same tokens as a prompt does not have: its settings then are mended already.
SAMPLED = ("sampling", "reporting", "prompt")
SCHEMA = 1
DOCTOR_FILE = "doctor.json"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the trainer's side says of a sample's tokens, at the run's temperature.

    Args:
        trainer: Log-probabilities as the run computes them `[N]`.
        own: The trainer's arithmetic in the engine's dtype, under the engine's routes `[N]`.
        logits: Of the oracle: the trainer's model in float32, its weights rounded to the engine's dtype, under the
            engine's routes where they are known `[N, V]`, float32, before the temperature.
        headed: The same with a head in float32; None where that is no other `[N]`.
        native: Log-probabilities of the oracle under the trainer's own routes `[N]`; None for a model without experts.
        straight: The trainer's with right padding, under which every position is its own `[N]`; None where the run pads so.
        layout: How the run lays its batches, in words; "" where it pads on the right.
        rungs: What the trainer differs from itself by.
        temperature: What the trainer divides logits by.
        end_tokens: Ids that end a response.
        engine_dtype, trainer_dtype: What the sides compute in, for remedies; "" where nobody says.
        trainer_head: What the trainer's head computes in, if in something else.
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
        key, family, said: As of the `Cause`; the sentence holds the parameter.
        parameter: Its value.
        status: "fits", "partly" where something is left, "confirmed" where its remedy was applied and the gap fell as
            predicted, or "measured" where a side differs from itself.
        share: Of the mean |Δlogp|; None for too few tokens.
        z, slope, low, high: How sure the fit is; None where the tokens alone say it.
        ties: Keys of causes that fit as well.
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
        tokens, responses: How many were judged.
        gap: `logp_abs_diff_mean`, `k3_kl` and `logp_abs_diff_max` between engine and trainer.
        parts: Terms of the gap, in the order of the path from engine to trainer.
        ratio, tail_ratio: The engine's error in units of the trainer's own arithmetic: of medians, and of the largest hundredth.
        trainer_ratio: The trainer's error in the same units.
        measurable: Whether rounding lies above float32's own, so that the ratios mean something.
        causes: Those that are named.
        hints: Sentences of fits that are not sure enough for a name.
        left, left_tail: The ratios of what the named causes do not say.
        unexplained: Mean size of what is neither named nor rounding, in nats per token.
        notes: Sentences on what else was seen.
        tokens_test: What the tokens themselves say.
        verdict: "clean", "explained", "partly" or "unexplained".
        tried: Keys of the causes on the list.
        engine_dtype, trainer_dtype: What the sides compute in; "" where nobody says.
        mended: What remedies did that were tried.
        rungs: What each side differs from itself by.
        largest: The token of the largest gap; None for a diagnosis without a gap.
        blocks: The network's blocks, each given the engine's own input; empty where that was not asked for, or not possible.
        seconds: What the doctor's rungs took, by their names.
        foretold: What the named causes predict token by token; not in `data`.
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
        """Return 0 for a clean pair, 1 for one that is explained, 2 where more than a threshold is not.

        Args:
            threshold: Mean size of what is not explained, in nats per token.
        """
        if self.verdict == "clean":
            return 0
        hidden = self.verdict == "unexplained" and self.unexplained == 0
        return 2 if self.verdict != "explained" and (hidden or self.unexplained > threshold) else 1

    def data(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        found = {"schema": SCHEMA, **asdict(replace(self, foretold=None))}
        del found["foretold"]
        found["tokens_test"]["finding"] = self.tokens_test.finding
        return found

    @property
    def mendable(self) -> tuple[NamedCause, ...]:
        """The causes that a remedy can confirm: those that predict the error of each token."""
        return tuple(cause for cause in self.causes if self.foretold is not None and cause.key in self.foretold.by)

    def confirmed(self, families: Collection[str], left: float, after: Floats) -> Diagnosis:
        """Return it after remedies were applied to the engine and the same tokens were scored again.

        A cause is confirmed where the error fell to rounding's and fell token by token as the cause predicts. One that leaves
        something has to have predicted most of the fall, too: the remedy of its family mends more than the cause alone.

        Args:
            families: Of the causes whose remedies were applied.
            left: The engine's error then, in units of the trainer's own arithmetic.
            after: That error `[N]`.
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
        # What a fit leaves, such as routes that follow the fault, went with the remedy.
        verdict, unexplained = ("explained", 0.0) if self.verdict == "partly" else (self.verdict, self.unexplained)
        return replace(self, causes=causes, notes=(*self.notes, said), verdict=verdict, unexplained=unexplained)

    def _scaled(self, after: Floats) -> bool:
        """Tell whether an error like that of a temperature is there where no token is sampled."""
        assert self.foretold is not None
        return SLOPES[0] <= self.foretold.stays(["temperature"], after) <= SLOPES[1]

    def _of_the_logits(self, said: str) -> Diagnosis:
        """Return it with logits that are scaled in the place of a temperature, which only sampling has."""
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
