"""An output head that computes in float32 on one side alone: named before training, with what it costs on probe tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from mismatch_ext.precision.audit import HEAD_ARGUMENTS, EngineReading, TrainerReading
from mismatch_ext.precision.dtypes import spelled
from mismatch_ext.weights import ProbedEngine

EVENT = "one_sided_head"
"""Name of the warning of a one-sided head."""


@runtime_checkable
class ChoosesHead(Protocol):
    """A trainer's side whose output head can compute in another dtype than the rest of the model."""

    def keep_head_in_float32(self) -> None:
        """Let the output heads of policy and reference multiply in float32 from now on."""

    def score_by_head(self, tokens: Tensor, *, exact: bool) -> Tensor:
        """Return log-probabilities as `score` does, with a head in float32 if `exact`, else with a plain one."""


@dataclass(frozen=True, kw_only=True)
class HeadScores:
    """Log-probabilities `[N, T]`, in nats, of the same probe tokens: the trainer's by either head, and the engine's."""

    plain: Tensor
    exact: Tensor
    engine: Tensor

    @classmethod
    def of(cls, trainer: ChoosesHead, engine: ProbedEngine, tokens: Tensor) -> HeadScores:
        """Let both sides score tokens `[N, T + 1]`."""
        return cls(
            plain=trainer.score_by_head(tokens, exact=False),
            exact=trainer.score_by_head(tokens, exact=True),
            engine=engine.score(tokens),
        )

    def gaps(self) -> tuple[float, float]:
        """Return the mean gap of the trainer with a plain head and with one in float32, in nats per token."""
        plain, exact = ((side - self.engine).abs().mean() for side in (self.plain, self.exact))
        return float(plain), float(exact)


def is_one_sided(trainer: TrainerReading, engine: EngineReading) -> bool:
    """Tell whether the output head of one side computes in float32, and that of the other as coarsely as the rest."""
    if trainer.head_dtype is None or engine.head_dtype is None:
        return False
    if "float32" in (spelled(trainer.compute_dtype), spelled(engine.model_dtype)):
        return False  # a whole side is finer, and not its head alone
    return (spelled(trainer.head_dtype) == "float32") != (spelled(engine.head_dtype) == "float32")


def name_one_sided(trainer: TrainerReading, engine: EngineReading, scores: HeadScores | None) -> str:
    """Return a warning of a one-sided head; `scores` is None if its cost cannot be measured."""
    is_trainers = spelled(trainer.head_dtype) == "float32"
    if is_trainers:
        where = f"the trainer's output head computes in float32, and the engine's in {engine.head_dtype}"
        fix = "take float32 off the trainer's head"
    else:
        where = f"the engine's output head computes in float32, and the trainer's in {trainer.head_dtype}"
        fix = f"start the engine without {HEAD_ARGUMENTS.get(engine.engine, 'a head in float32')}"
    if scores is None:
        cost = "What it costs was not measured, because the trainer's weights are sharded, or the engine sleeps."
    else:
        plain, exact = scores.gaps()
        now, alike = (exact, plain) if is_trainers else (plain, exact)
        cost = (
            f"The gap is {now:.3g} nats per token over {scores.engine.numel()} probe tokens, and {alike:.3g} with the trainer's "
            f"head in {engine.head_dtype} too."
        )
    return f"{where}. {cost} Set mismatch.precision.head: float32, which sets both, or {fix}."
