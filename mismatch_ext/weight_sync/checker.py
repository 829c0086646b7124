"""Tells stale or garbled engine weights from numerics after each weight update.

Both sides score a fixed set of probe tokens; N sequences, T tokens. The gap is the mean of |engine - trainer|
over the probes. The rules, strongest evidence first, and why each decides:

1. An engine log-probability is not finite: garbled. Rounding cannot make one from finite weights.
2. Tensors that both sides hold under one name and layout (embeddings, norms) are compared bit by bit after
   rounding to the engine's dtype. A tensor that differs but equals the trainer's previous version is stale,
   because that does not happen by chance. Any other difference is stale if rule 3 or 4 holds, or if the engine's
   probes have not changed in a bit although the trainer's weights have; otherwise it is garbled.
3. The engine's probes have not changed in a bit while the trainer's moved by more than the movement floor:
   stale. Movement is counted from when the engine's probes last changed, so that small steps add up.
4. The engine's probes are nearer than half the gap to those of an older trainer version that lies beyond the
   movement floor: stale. Unlike rule 3, this also catches engines whose numerics are not reproducible.
5. The gap exceeds `max(factor * baseline, floor)`, or the ceiling: garbled, or stale if the engine's probes have
   not changed in a bit although the trainer's weights have. The baseline is this model's own gap between two
   sides with the same weights: the smaller of the gap before the first update and the gap after it. The gap
   before is wrong if the trainer's model is not the one on disk, the gap after if the first update garbles.
   Rounding errors grow with the logits, so the baseline grows with the spread of the probes.

The floors and ceilings come from measured gaps (one vLLM, seven models, dense and MoE, same weights):
float32 1e-7 to 7e-6, float16 9e-5 to 2e-2, bfloat16 7e-4 to 0.2. The floor is one unit in the last place of a
log-probability of size 1 for the half dtypes, and 14 times the largest gap for float32; the ceilings are far
above the largest gap. Within one dtype the gaps of models differ by a factor of 200, so each model has a
baseline of its own instead of one threshold. The errors to be caught: an update that left MoE weights unpacked,
1.1e-2 on a model with gaps of 1e-7 (float32) to 8e-4 (bfloat16); a sleep mode that loses weights, 0.201 after
0.015 (bfloat16). Both exceed the factor of 10.

The engine scores the probes as prompts, so a verdict here is about its prefill. `decoding.py` compares what the engine decodes
with its prefill.

Known limits: if a change of the weights moves the probes by less than the movement floor, log-probabilities
cannot tell it from numerics. Rule 3 sees such changes once they have added up; until then only the exact
comparison of tensors sees them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mismatch_ext.errors import ConfigError, NonFiniteLogprobError, RecordError, WeightSyncError
from mismatch_ext.precision.dtypes import canonical, coarser

Status = Literal["in_sync", "unchanged", "stale", "garbled", "stale_decode"]

FACTOR = 10.0
FLOOR = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 8e-3}
CEILING = {"float32": 1e-3, "float16": 0.2, "bfloat16": 1.0}
# Every step changes some bit of float32 weights, so in float32 even a small movement should have reached the engine.
MOVEMENT_FLOOR = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}
HISTORY = 8
STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """A tensor that both sides hold in one layout, compared after rounding to the engine's dtype.

    Args:
        name: Its name.
        equal: Whether the two are equal in every bit.
        max_abs_diff: Largest difference; 0 when equal, None when unknown.
        matches_previous: Whether the engine's tensor equals the trainer's before this update; None when unknown.
    """

    name: str
    equal: bool
    max_abs_diff: float | None
    matches_previous: bool | None = None


@dataclass(frozen=True, kw_only=True)
class SyncObservation:
    """The measurements after one weight update.

    Args:
        engine_logprobs: `[N, T]` log-probabilities of the probe tokens, by the engine's prefill.
        trainer_logprobs: `[N, T]` log-probabilities of the same tokens, by the trainer under its present weights.
        trainer_changed: Whether the trainer's weights differ from those at the previous observation.
        comparisons: Exact comparisons of tensors; may be empty.
    """

    engine_logprobs: Tensor
    trainer_logprobs: Tensor
    trainer_changed: bool
    comparisons: tuple[TensorComparison, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SyncVerdict:
    """Judgement of one weight update.

    Args:
        status: "in_sync"; "unchanged" (the trainer had nothing new, and the engine still agrees); "stale";
            "garbled"; "stale_decode" (prefill is in sync, but the engine decodes with older weights).
        gap_mean: Mean |engine - trainer| over the probes, nats per token; infinity if a value of the engine is not finite.
        gap_max: Largest |engine - trainer| over the probes.
        baseline: Gap between two sides with the same weights, scaled to the present spread of the probes.
        threshold: Gap above which the weights count as garbled.
        movement: Mean change of the trainer's probes since the engine's probes last changed.
        message: One sentence with the figures, and what to do when the status is bad.
        decode_gap: Mean |decode - prefill| of tokens that the engine sampled, nats; None when the engine did not decode.
    """

    status: Status
    gap_mean: float
    gap_max: float
    baseline: float
    threshold: float
    movement: float
    message: str
    decode_gap: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the engine computes with the trainer's weights, as far as can be seen."""
        return self.status in ("in_sync", "unchanged")


class WeightSyncChecker:
    """Judges every weight update; keeps a few probe sets and no weights.

    Args:
        dtype: Compute dtype of the engine.
        trainer_dtype: Compute dtype of the trainer; None if it is the engine's or finer. The coarser of the
            two sets the limits, because it sets the gap.
        factor: A gap of up to this many baselines still counts as numerics.

    Raises:
        ConfigError: `factor` is below 1.
        PrecisionError: A name is not a compute dtype.
    """

    def __init__(
        self,
        dtype: str | torch.dtype,
        *,
        trainer_dtype: str | torch.dtype | None = None,
        factor: float = FACTOR,
    ) -> None:
        self.dtype = canonical(dtype) if trainer_dtype is None else coarser(dtype, trainer_dtype)
        if not factor >= 1:
            raise ConfigError(f"weight-sync check: factor={factor!r} is not allowed; allowed: a number >= 1.")
        self.factor = factor
        self._baseline: tuple[float, float] | None = None  # gap, and the spread of the trainer's probes then
        self._observations = 0
        self._engine: Tensor | None = None  # engine's probes at the last look
        self._anchor: Tensor | None = None  # trainer's probes when the engine's last changed
        self._versions: list[Tensor] = []  # trainer's probes: the first and the latest few

    def baseline(self, engine_logprobs: Tensor, trainer_logprobs: Tensor) -> None:
        """Note the gap before the first update, when the engine holds the weights that training starts from.

        Args:
            engine_logprobs: `[N, T]`, by the engine.
            trainer_logprobs: `[N, T]`, by the trainer.

        Raises:
            RecordError: The shapes differ or are empty.
            NonFiniteLogprobError: A trainer's log-probability is not finite.
        """
        engine, trainer = _checked(engine_logprobs, trainer_logprobs)
        self._offer_baseline(_gap(engine, trainer)[0], trainer)
        self._engine, self._anchor, self._versions = engine, trainer, [trainer]

    def observe(self, observation: SyncObservation) -> SyncVerdict:
        """Judge one weight update.

        Raises:
            RecordError: The shapes differ from each other or from earlier ones.
            NonFiniteLogprobError: A trainer's log-probability is not finite.
        """
        engine, trainer = _checked(observation.engine_logprobs, observation.trainer_logprobs)
        if self._versions and self._versions[0].shape != trainer.shape:
            raise RecordError(
                f"probe log-probabilities have shape {tuple(trainer.shape)}, those before had "
                f"{tuple(self._versions[0].shape)}; score the same probes after every update."
            )
        gap_mean, gap_max = _gap(engine, trainer)
        if self._observations == 0:
            self._offer_baseline(gap_mean, trainer)
        baseline = self._scaled_baseline(trainer)
        threshold = min(max(self.factor * baseline, FLOOR[self.dtype]), CEILING[self.dtype])
        frozen = self._engine is not None and torch.equal(engine, self._engine)
        movement = _mean_abs(trainer - self._anchor) if frozen and self._anchor is not None else 0.0
        status, why = self._judge(observation, engine, trainer, gap_mean, baseline, threshold, frozen, movement)
        self._remember(engine, trainer, observation.trainer_changed, frozen)
        return SyncVerdict(
            status=status,
            gap_mean=gap_mean,
            gap_max=gap_max,
            baseline=baseline,
            threshold=threshold,
            movement=movement,
            message=f"weight update {self._observations}: {status}. {why} Mean gap on the probes "
            f"{gap_mean:.3g}, largest {gap_max:.3g}; {self.dtype} baseline {baseline:.3g}, "
            f"threshold {threshold:.3g}.",
        )

    def _judge(
        self,
        seen: SyncObservation,
        engine: Tensor,
        trainer: Tensor,
        gap: float,
        baseline: float,
        threshold: float,
        frozen: bool,
        movement: float,
    ) -> tuple[Status, str]:
        """Apply the rules at the top of the file in their order."""
        if not bool(torch.isfinite(engine).all()):
            bad = int((~torch.isfinite(engine)).sum())
            return "garbled", f"{bad} of {engine.numel()} engine log-probabilities are not finite."
        # Weights that moved by less than a rounding error may be the same ones in the engine's dtype.
        floor = max(MOVEMENT_FLOOR[self.dtype], baseline)
        held = frozen and movement > floor
        older = self._nearest_version(engine, trainer, gap, floor)
        stale = ""
        if held:
            stale = f"The trainer's log-probabilities moved by {movement:.3g}, the engine's not in a bit."
        elif older is not None:
            stale = f"The engine is at {older:.3g} from the probes of an older trainer version."
        differ = [c for c in seen.comparisons if not c.equal]
        if differ:
            return _judge_tensors(seen.comparisons, differ, stale, frozen and seen.trainer_changed)
        if stale:
            return "stale", stale
        if gap > threshold:
            if frozen and seen.trainer_changed:
                return "stale", "The trainer's weights changed, the engine's log-probabilities not in a bit."
            return "garbled", "The engine's weights are neither the trainer's nor an older version's."
        if not seen.trainer_changed:
            return "unchanged", "The trainer's weights are those of the previous update."
        exact = f", {len(seen.comparisons)} tensors are equal bit by bit" if seen.comparisons else ""
        return "in_sync", f"The gap of prefill is within numerics{exact}."

    def raise_for(self, verdict: SyncVerdict) -> None:
        """Refuse to go on with an engine that does not hold the trainer's weights.

        Raises:
            WeightSyncError: The verdict is bad; the message has the figures and says what to do.
        """
        if verdict.status == "stale_decode":
            raise WeightSyncError(verdict.message)
        if verdict.status == "stale":
            raise WeightSyncError(
                f"{verdict.message} The update did not reach the weights that the engine computes with: "
                "check that the weights are sent after each optimizer step, that the engine reloads its "
                "packed or captured copies, that it was awake, and that its prefix cache was reset."
            )
        if verdict.status == "garbled":
            raise WeightSyncError(
                f"{verdict.message} Weights arrived, but wrong: check names and layouts (fused, packed or "
                "expert weights that the engine must repack after an update), casts on the way, and "
                "truncated transfers."
            )

    def _offer_baseline(self, gap: float, trainer: Tensor) -> None:
        if math.isfinite(gap) and (self._baseline is None or gap < self._baseline[0]):
            self._baseline = (gap, float(trainer.std(correction=0)))

    def _scaled_baseline(self, trainer: Tensor) -> float:
        if self._baseline is None:
            return 0.0
        gap, spread = self._baseline
        return gap * max(1.0, float(trainer.std(correction=0)) / spread) if spread > 0 else gap

    def _nearest_version(self, engine: Tensor, trainer: Tensor, gap: float, floor: float) -> float | None:
        """Return the distance to the nearest older version if it is so small that the engine must hold that version."""
        distances = [_mean_abs(engine - version) for version in self._versions if _mean_abs(trainer - version) > floor]
        nearest = min(distances, default=math.inf)
        return nearest if nearest < gap / 2 else None

    def _remember(self, engine: Tensor, trainer: Tensor, changed: bool, frozen: bool) -> None:
        self._observations += 1
        if not frozen:
            finite = bool(torch.isfinite(engine).all())
            self._engine, self._anchor = (engine, trainer) if finite else (None, None)
        if changed or not self._versions:
            # Keep the first version: an engine that never got an update stays near it.
            self._versions = self._versions[:1] + [*self._versions[1:], trainer][-HISTORY:]

    @property
    def begun(self) -> bool:
        """Whether a baseline or an update is known, by which the next update can be judged."""
        return bool(self._versions)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able data."""
        return {
            "version": STATE_VERSION,
            "dtype": self.dtype,
            "baseline": self._baseline,
            "observations": self._observations,
            "engine": None if self._engine is None else self._engine.tolist(),
            "anchor": None if self._anchor is None else self._anchor.tolist(),
            "versions": [version.tolist() for version in self._versions],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state.

        Raises:
            WeightSyncError: The state is of another version or another dtype.
        """
        if state.get("version") != STATE_VERSION or state.get("dtype") != self.dtype:
            raise WeightSyncError(
                f"the weight-sync state has version {state.get('version')!r} and dtype "
                f"{state.get('dtype')!r}; allowed: version {STATE_VERSION} and dtype {self.dtype!r}. Start "
                "with a new checker."
            )
        self._baseline = None if state["baseline"] is None else (state["baseline"][0], state["baseline"][1])
        self._observations = int(state["observations"])
        self._engine = _restored(state["engine"])
        self._anchor = _restored(state["anchor"])
        self._versions = [torch.tensor(version, dtype=torch.float64) for version in state["versions"]]


def _judge_tensors(
    compared: tuple[TensorComparison, ...], differ: list[TensorComparison], stale: str, held: bool
) -> tuple[Status, str]:
    previous = [c for c in differ if c.matches_previous]
    known = {c.name: c.max_abs_diff for c in differ if c.max_abs_diff is not None}
    text = f"{len(differ)} of {len(compared)} tensors differ from the trainer's"
    if known:
        largest = max(known, key=lambda name: math.inf if math.isnan(known[name]) else known[name])
        text += f", most {largest} by {known[largest]:.3g}"
    else:
        text += f", such as {differ[0].name}"
    if previous:
        return (
            "stale",
            f"{text}; {len(previous)} are the trainer's previous version, such as {previous[0].name}.",
        )
    if stale:
        return "stale", f"{text}. {stale}"
    if held:
        return "stale", f"{text}, and the engine's log-probabilities have not changed in a bit."
    return "garbled", f"{text}."


def _restored(rows: list[list[float]] | None) -> Tensor | None:
    return None if rows is None else torch.tensor(rows, dtype=torch.float64)


def _mean_abs(difference: Tensor) -> float:
    return float(difference.abs().mean())


def _gap(engine: Tensor, trainer: Tensor) -> tuple[float, float]:
    difference = (engine - trainer).abs()
    if not bool(torch.isfinite(difference).all()):
        return math.inf, math.inf
    return float(difference.mean()), float(difference.max())


def _checked(engine: Tensor, trainer: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as float64 on the CPU, or say what is wrong with them."""
    if engine.shape != trainer.shape or trainer.numel() == 0:
        raise RecordError(
            f"probe log-probabilities of shape {tuple(engine.shape)} (engine) and {tuple(trainer.shape)} "
            "(trainer); allowed: the same shape, not empty. Score the same probe tokens on both sides."
        )
    engine, trainer = (x.detach().to("cpu", torch.float64, copy=True) for x in (engine, trainer))
    bad = (~torch.isfinite(trainer)).nonzero()
    if len(bad):
        place = tuple(int(i) for i in bad[0])
        raise NonFiniteLogprobError(
            f"the trainer's log-probability of probe {place} (row, position) is {float(trainer[place])}; "
            "its own forward pass is broken, so the engine's weights cannot be judged."
        )
    return engine, trainer
