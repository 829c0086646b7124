"""One step of a loop's optimizer: unscaled, clipped, at the controlled rate, and then the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mismatch_ext.lr import RateControl, ShadowRate
from mismatch_ext.run.sides import LoopTrainer
from mismatch_ext.verdicts import Verdicts


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """What became of a step.

    Args:
        taken: Whether the optimizer took it; a loss scaler skips one whose gradients overflowed.
        grad_norm: Norm of the gradients before clipping.
        learning_rate: Rate that was applied.
    """

    taken: bool
    grad_norm: float
    learning_rate: float


def step(trainer: LoopTrainer, rate: RateControl | None, max_norm: float | None, verdicts: Verdicts) -> Stepped:
    """Step a trainer's optimizer as scaler and learning-rate control say, then its schedule, and clear the gradients.

    Args:
        trainer: The trainer; its gradients are there.
        rate: Learning-rate control; None without, and `ShadowRate` where it only computes.
        max_norm: Norm that gradients are clipped to; None clips none.
        verdicts: What becomes of statistics that cannot lead the rate.

    Raises:
        LossScaleError: Overflows do not end.
    """
    optimizer, scaler, taken = trainer.optimizer, trainer.scaler, True
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = _grad_norm(optimizer, max_norm)
    if rate is not None:
        with verdicts.checking("lr"):
            if rate.config.trigger == "grad_norm":
                rate.collect(1.0, grad_norm=norm)
            rate.before_step()
    if scaler is None:
        optimizer.step()
    else:
        overflows = scaler.overflow_steps
        scaler.step(optimizer)
        scaler.update()
        taken = scaler.overflow_steps == overflows
    acts = rate is not None and not isinstance(rate, ShadowRate)
    applied = rate.rate if rate is not None and acts else float(optimizer.param_groups[0]["lr"])
    if rate is not None:
        with verdicts.checking("lr"):
            if isinstance(rate, ShadowRate) and taken:
                rate.step()
            rate.after_step()
    if trainer.scheduler is not None and taken:
        trainer.scheduler.step()
    optimizer.zero_grad()
    return Stepped(taken=taken, grad_norm=norm, learning_rate=applied)


def _grad_norm(optimizer: Any, max_norm: float | None) -> float:
    """Return the norm of an optimizer's gradients, and clip them if that is asked for."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if max_norm is not None:
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    return float(
        torch.linalg.vector_norm(torch.stack([p.grad.detach().norm().cpu() for p in parameters] or [torch.zeros(())]))
    )
