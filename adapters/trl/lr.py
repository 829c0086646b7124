"""The `lr` section in TRL: statistics of each batch of rollouts, over all ranks, lead the rate of the step after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.transformers.lr import LENGTH, TRUNCATED, LrCallback
from torch import Tensor

from mismatch_ext.errors import ConfigError
from mismatch_ext.lr import gap_statistics

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Host
else:
    _Host = object


class LrMixin(_Host):
    """Overrides the methods that know gradient norm and rate; `MismatchTrainerMixin` adds the callback."""

    _lr: LrCallback | None = None

    def _steer_by_rollouts(self, metrics: Mapping[str, list[float]], gap: tuple[Tensor, Tensor, Tensor] | None) -> None:
        """Let a fresh batch of completions lead the rate of the step that learns from it.

        Args:
            metrics: TRL's own metrics of this batch: lengths as TRL counts them, over all ranks.
            gap: Old log-probabilities, rollout log-probabilities and mask `[B, T]`; None where the engine reports none.

        Raises:
            ConfigError: The trainer keeps no lengths.
        """
        if self._lr is None or not self._lr.rate.attached or not self._lr.config.watches:
            return
        trigger = self._lr.config.trigger
        if trigger == "response_length":
            if not metrics.get(LENGTH) or not metrics.get(TRUNCATED):
                raise ConfigError(
                    f"mismatch.lr.trigger='response_length': {type(self).__name__} keeps no {LENGTH!r} and {TRUNCATED!r} of its "
                    "rollouts; give mismatch.lr.period, or another trigger."
                )
            # TRL's values are over all ranks, and each batch has the same number of completions.
            self._lr.rate.collect(response_length=metrics[LENGTH][-1], truncated_fraction=metrics[TRUNCATED][-1])
        elif trigger in ("mismatch_kl", "f_tau") and gap is not None:
            tokens, statistics = gap_statistics(*gap, reduce=self.accelerator.reduce)
            self._lr.rate.collect(tokens, **statistics)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the gradient norm as the parent does; it may lead the rate of the step that is about to be taken."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self._lr is not None and self._lr.rate.attached and self._lr.config.trigger == "grad_norm":
            self._lr.rate.collect(grad_norm=float(norm))
        return norm

    def _get_learning_rate(self) -> float:
        """Return the rate that is applied; the parent reads the optimizer's own under some schedules."""
        if self._lr is None or not self._lr.rate.attached:
            return super()._get_learning_rate()
        return self._lr.rate.rate
