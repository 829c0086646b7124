"""One optimizer step of a loop: unscale and clip the gradients, step at the controlled rate, then step the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.lr import RateControl, gap_statistics, length_statistics
from mismatch_ext.recorder import PREFIX
from mismatch_ext.run.batch import Batch
from mismatch_ext.run.loop import Loop


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """The result of a step.

    Args:
        taken: Whether the optimizer took the step; a loss scaler skips a step whose gradients overflowed.
        grad_norm: Norm of the gradients before clipping.
        learning_rate: Rate that was applied.
    """

    taken: bool
    grad_norm: float
    learning_rate: float


class Stepper:
    """Steps a trainer's optimizer, and controls its learning rate.

    Args:
        loop: The loop.

    Attributes:
        rate: Learning-rate control; None without an `lr` section.
    """

    def __init__(self, loop: Loop) -> None:
        section = loop.block.lr
        self._loop, self._trainer, self._verdicts, self._pending = loop, loop.trainer, loop.verdicts, loop.pending
        self.rate = None if section is None else RateControl(section)
        self._last_rate: dict[str, Any] | None = None  # of a control that was taken off
        self._parts: list[float] = []  # of the loss of this step

    def attach(self, step: int) -> None:
        """Begin to control the rate; the schedule may have moved already before the run's first step."""
        if self.rate is not None:
            joining = step or int(getattr(self._trainer.scheduler, "last_epoch", 0) or 0)
            self.rate.attach(self._trainer.optimizer, self._trainer.scheduler, warmup=0, step=joining)

    def detach(self) -> None:
        """End the control of the rate, and keep its state."""
        if self.rate is not None and self.rate.attached:
            self._last_rate = self.rate.state_dict()
            self.rate.detach()

    # The signals that set the rate are computed over all ranks, so that all ranks have one multiplier.

    def lead_by_lengths(self, batch: Batch) -> None:
        """Note the lengths of a batch, and pass them to the rate if they are its trigger; all ranks must call this."""
        with self._verdicts.checking("lengths"):
            known = all(record.finish_reason is not None for record in batch.records)
            if self._loop.ranks.size > 1:
                known = all(self._loop.ranks.gather(known))
            cut = torch.tensor([record.finish_reason == "length" for record in batch.records]) if known else None
            found = length_statistics(batch.lengths, cut, reduce=lambda values, reduction: self._loop.ranks.sum(values))
            if self.rate is not None and self.rate.config.trigger == "response_length":
                self.rate.collect(1.0, **found.to_dict())
            named = {self._loop.names.length: found.response_length, "truncated_fraction": found.truncated_fraction}
            for name, value in named.items():
                if value is not None:
                    self._pending.note(name, value, found.responses)

    def lead_by_gap(self, old: Tensor, rollout: Tensor, mask: Tensor) -> None:
        """Pass the gap of a batch to the rate if it is its trigger; all ranks must call this.

        Args:
            old, rollout: Log-probabilities of this rank's part `[B, T]`, nats.
            mask: The tokens that count `[B, T]`.
        """
        if self.rate is None or self.rate.config.trigger not in ("mismatch_kl", "f_tau"):
            return
        reduce = None if self._loop.ranks.size == 1 else lambda values, reduction: self._loop.ranks.sum(values)
        tokens, statistics = gap_statistics(old, rollout, mask, reduce=reduce)
        self.rate.collect(tokens, **statistics)

    # A step.

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a part of the step's loss, which is scaled in float16."""
        scaler = self._trainer.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
        self._parts.append(float(loss.detach()))

    def step(self, max_norm: float | None) -> Stepped:
        """Step the optimizer as the loss scaler and the learning-rate control say, step the schedule, and clear the gradients.

        Args:
            max_norm: Norm that gradients are clipped to; None does not clip.

        Raises:
            LossScaleError: More steps in a row overflow than the loss scaler tolerates.
        """
        if self._parts:
            self._pending.note(self._loop.names.loss, sum(self._parts))
            self._parts = []
        done = self._step(max_norm)
        self._pending.note(self._loop.names.grad_norm, done.grad_norm)  # one that is not finite raises its alarm
        self._pending.note(self._loop.names.learning_rate, done.learning_rate)
        return done

    def _step(self, max_norm: float | None) -> Stepped:
        optimizer, scaler, rate, taken = self._trainer.optimizer, self._trainer.scaler, self.rate, True
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = _grad_norm(optimizer, max_norm)
        if rate is not None:
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
        applied = float(optimizer.param_groups[0]["lr"]) if rate is None else rate.rate
        if rate is not None:
            rate.after_step()
        if self._trainer.scheduler is not None and taken:
            self._trainer.scheduler.step()
        optimizer.zero_grad()
        return Stepped(taken=taken, grad_norm=norm, learning_rate=applied)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the loss scaler and the learning-rate control."""
        scaler, rate = self._trainer.scaler, self.rate
        found = {} if scaler is None else dict(scaler.metrics())
        found |= {} if rate is None else rate.metrics()
        return {PREFIX + name: value for name, value in found.items()}

    # What a checkpoint holds.

    def state_dict(self) -> dict[str, Any]:
        """Return the states of control and scaler as JSON-able data, under the keys that a checkpoint uses."""
        state: dict[str, Any] = {}
        if self.rate is not None:
            state["lr"] = self.rate.state_dict() if self.rate.attached else self._last_rate
        if self._trainer.scaler is not None:
            state["scaler"] = self._trainer.scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; other keys are ignored, and a part that is missing begins anew.

        Raises:
            RecordError: The state is damaged, or was saved with other settings.
        """
        self._parts = []
        if self.rate is not None:
            if state.get("lr") is None:
                self.attach(self._loop.steps)
            self.rate.load_state_dict(state.get("lr"))
        if self._trainer.scaler is not None and state.get("scaler") is not None:
            self._trainer.scaler.load_state_dict(state["scaler"])


def _grad_norm(optimizer: Any, max_norm: float | None) -> float:
    """Return the norm of an optimizer's gradients, and clip them if that is asked for."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if max_norm is not None:
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    return float(
        torch.linalg.vector_norm(torch.stack([p.grad.detach().norm().cpu() for p in parameters] or [torch.zeros(())]))
    )
