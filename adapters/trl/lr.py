"""The `lr` section in TRL: statistics of each batch of rollouts, over all ranks, lead the rate of the step after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.transformers.lr import LENGTH, TRUNCATED, LrCallback
from torch import Tensor

from mismatch_ext.errors import ConfigError
from mismatch_ext.lr import gap_statistics, leading_sums
from mismatch_ext.ranks import Ranks
from mismatch_ext.sums import over_ranks

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Host
else:
    _Host = object


class LrMixin(_Host):
    """Overrides the methods that know gradient norm and rate; `MismatchTrainerMixin` adds the callback."""

    _lr: LrCallback | None = None
    _ranks: Ranks

    def _steer_by_rollouts(self, metrics: Mapping[str, list[float]], gap: tuple[Tensor, Tensor, Tensor] | None) -> None:
        """Let a fresh batch of completions lead the rate of the step that learns from it.

        Args:
            metrics: TRL's own metrics of this batch: lengths as TRL counts them, over all ranks.
            gap: Old log-probabilities, rollout log-probabilities and mask `[B, T]`; None where the engine reports none.

        Raises:
            ConfigError: The trainer keeps no lengths.
        """
        if self._lr is None or self._lr.rate is None or not self._lr.config.watches:
            return
        trigger = self._lr.config.trigger
        if trigger == "response_length":
            if not metrics.get(LENGTH) or not metrics.get(TRUNCATED):
                raise ConfigError(
                    f"mismatch.lr.trigger='response_length': {type(self).__name__} keeps no {LENGTH!r} and {TRUNCATED!r} of its "
                    "rollouts; give mismatch.lr.period, or another trigger."
                )
            # TRL's values are over all ranks, and each batch has the same number of completions.
            lengths = {"response_length": metrics[LENGTH][-1], "truncated_fraction": metrics[TRUNCATED][-1]}
            self._lr.rate.collect(lengths)
        elif trigger in ("mismatch_kl", "f_tau") and gap is not None:
            sums = over_ranks(leading_sums(*gap), self._ranks)
            self._lr.rate.collect(gap_statistics(sums), float(sums["tokens"]))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the gradient norm as the parent does; it may lead the rate of the step that is about to be taken."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self._lr is not None and self._lr.rate is not None and self._lr.config.trigger == "grad_norm":
            self._lr.rate.collect({"grad_norm": float(norm)})
        return norm

    def _get_learning_rate(self) -> float:
        """Return the rate that the last step applied."""
        scheduled = super()._get_learning_rate()
        return scheduled if self._lr is None else scheduled * self._lr.applied
