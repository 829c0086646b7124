"""Numerics told from drift in verl's asynchronous modes, by the tokens of a batch itself.

The versions of a rollout's tokens come with it (`rollout/client.py`). The workers measure where the tokens lie
(`worker/staleness.py`); the driver merges states of a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.verl.rollout.client import versioned
from mismatch_ext.adapters.verl.settings.modes import SYNC
from mismatch_ext.adapters.verl.worker.staleness import STALE

from mismatch_ext.config import MismatchConfig, Trigger
from mismatch_ext.log import RunLog
from mismatch_ext.lr import numerics_statistics
from mismatch_ext.sums import Sums, merged

if TYPE_CHECKING:
    from mismatch_ext.adapters.verl.driver.measuring import MeasuringMixin as _Host
else:
    _Host = object


class StalenessMixin(_Host):
    """Follows versions where verl's trainer samples asynchronously; in `sync` it does nothing."""

    _block: MismatchConfig
    _log: RunLog
    _drift: Sums | None = None

    if TYPE_CHECKING:

        def _bypasses(self) -> bool: ...

    def get_llm_client(self) -> Any:
        """Return verl's client, made to note versions where it resumes answers, and turns that have routes or masks."""
        acting = self._block.acting
        return versioned(super().get_llm_client(), turns=bool(acting.routing or acting.sampling_mask))

    def _follow_versions(self) -> None:
        """Measure numerics and drift apart from here on, if rollouts may be of older weights and the trainer scores them."""
        if self.trainer_mode != SYNC and not self._bypasses():
            self._log.follow_versions()

    @property
    def _version(self) -> int:
        """Version of the weights that score a batch: the version of the last weight update."""
        return int(self.global_steps) - 1

    @property
    def _replayed(self) -> bool:
        """Whether passes that score rollouts replay their routes."""
        routing = self._block.routing
        return routing is not None and routing.mode == "R3"

    @contextmanager
    def _by_version(self, batch: Any) -> Iterator[None]:
        """Let the pass that scores a batch measure it by version."""
        if not self._log.follows_versions:
            yield
            return
        batch.extra_info[STALE] = {"version": self._version, "replayed": self._replayed}
        try:
            yield
        finally:
            batch.extra_info.pop(STALE, None)

    def _measure_parts(self) -> None:
        """Take the workers' measurements of a scored batch by version."""
        if not self._log.follows_versions:
            return
        parts = [part for part in self.actor_rollout_wg.mismatch_stale() if part is not None]
        for part in parts:
            if isinstance(part, Exception):
                raise part
        # Only this batch's gap leads the rate; the log merges the gaps of all local updates of a step.
        self._drift = merged(*parts) if parts else None
        if self._drift is not None:
            self._log.add_drift(self._drift)

    def _statistics(self, trigger: Trigger) -> dict[str, float | None]:
        """Return the statistics that lead the rate with a trigger; a stale batch's gap is that of numerics only."""
        if self._drift is not None and trigger in ("mismatch_kl", "f_tau"):
            return {**numerics_statistics(self._drift)}
        return super()._statistics(trigger)
