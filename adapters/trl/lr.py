"""The `lr` section in TRL: statistics of each batch of rollouts, over all ranks, lead the rate of the step after it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.transformers.lr import LrCallback
from torch import Tensor

from mismatch_ext.errors import ConfigError
from mismatch_ext.host_names import TRL
from mismatch_ext.metrics import mismatch_metrics

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Host
else:
    _Host = object

LENGTH, TRUNCATED = TRL.length, "completions/clipped_ratio"
# The threshold of F that leads the rate with `trigger: f_tau`: the tail is thin at 2.
F_TAU = "f_1.1"


class LrMixin(_Host):
    """Overrides what knows gradient norm and rate; `MismatchTrainerMixin` adds the callback."""

    _lr: LrCallback | None = None

    def _steer_by_rollouts(self, metrics: Mapping[str, list[float]], gap: tuple[Tensor, Tensor, Tensor] | None) -> None:
        """Let a fresh batch of completions lead the rate of the step that learns from it.

        Args:
            metrics: TRL's own of this batch: lengths as it counts them, over all ranks.
            gap: Old log-probabilities, rollout log-probabilities and mask `[B, T]`; None where the engine reports none.

        Raises:
            ConfigError: The trainer keeps no lengths.
        """
        if self._lr is None or self._lr.lr_control is None or not self._lr.config.watches:
            return
        trigger = self._lr.config.trigger
        if trigger == "response_length":
            if not metrics.get(LENGTH) or not metrics.get(TRUNCATED):
                raise ConfigError(
                    f"mismatch.lr.trigger='response_length': {type(self).__name__} keeps no {LENGTH!r} and {TRUNCATED!r} of its "
                    "rollouts; give mismatch.lr.period, or another trigger."
                )
            # Over all ranks, and over completions of equal number in each batch.
            self._lr.collect(1.0, response_length=metrics[LENGTH][-1], truncated_fraction=metrics[TRUNCATED][-1])
        elif trigger in ("mismatch_kl", "f_tau") and gap is not None:
            mismatch_kl, f_tau, tokens = self._gap_over_ranks(*gap)
            self._lr.collect(tokens, mismatch_kl=mismatch_kl, f_tau=f_tau)

    def _gap_over_ranks(
        self, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor
    ) -> tuple[float, float, float]:
        """Return k3, F(1.1) and the number of tokens of a batch over all ranks."""
        found = {"k3_kl": 0.0, F_TAU: 0.0, "tokens": 0.0}
        if bool(mask.any()):  # every rank takes part in the sum, one without tokens too
            found = mismatch_metrics(old_logprobs, rollout_logprobs, mask)
        tokens = found["tokens"]
        mine = torch.tensor([found["k3_kl"] * tokens, found[F_TAU] * tokens, tokens], dtype=torch.float64)
        kl, f_tau, tokens = self.accelerator.reduce(mine.to(old_logprobs.device), reduction="sum").tolist()
        return kl / max(tokens, 1.0), f_tau / max(tokens, 1.0), tokens

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the gradient norm as the parent does; it may lead the rate of the step that is about to be taken."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self._lr is not None and self._lr.lr_control is not None and self._lr.config.trigger == "grad_norm":
            value = float(norm)
            if math.isfinite(value):  # else float16 overflowed, and the step will be skipped
                self._lr.collect(1.0, grad_norm=value)
        return norm

    def _get_learning_rate(self) -> float:
        """Return the rate that is applied; the parent reads the optimizer's own under some schedules."""
        if self._lr is None or self._lr.lr_control is None or not self._lr.acts:
            return super()._get_learning_rate()
        return float(self._lr.lr_control.get_last_lr()[0])
