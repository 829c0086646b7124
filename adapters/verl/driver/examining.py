"""`monitor.doctor` in verl's driver: it chooses rows of a batch that was scored, and lets the workers examine them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.verl.driver.batch_checks import sampled_rows
from mismatch_ext.adapters.verl.driver.measuring import Measured
from mismatch_ext.adapters.verl.driver.reports import Checked

from mismatch_ext.config import MismatchConfig
from mismatch_ext.doctor import Diagnosis
from mismatch_ext.errors import RecordError
from mismatch_ext.recorder import PREFIX
from mismatch_ext.run.doctor import EXAMINED_TOKENS, rows_within
from mismatch_ext.run.log import RunLog

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Host
else:
    _Host = object


class ExaminingMixin(_Host):
    """Examines batches of verl's trainer, whose weights are those that the rollout servers have."""

    _block: MismatchConfig
    _log: RunLog
    _checked: Checked
    _measured: Measured | None

    if TYPE_CHECKING:

        @property
        def _first_update(self) -> bool: ...

    def _examine(self, batch: Any) -> dict[str, float]:
        """Examine a batch if one is due, and return the metrics of that; a failure becomes an event."""
        doctor = self._log.doctor
        if doctor is None or not doctor.due or self._measured is None or not self._first_update:
            return {}
        found = doctor.examine(self.global_steps, lambda: self._found(batch))
        return {PREFIX + name: value for name, value in found.items()}

    def _found(self, batch: Any) -> Diagnosis:
        assert self._measured is not None
        sampled = sampled_rows(batch)
        rows = rows_within(self._measured.lengths.tolist(), EXAMINED_TOKENS)
        answers = self.actor_rollout_wg.mismatch_doctor(
            [batch.keys[sampled[row]] for row in rows],
            batch.partition_id,
            engine_dtype=self._checked.engine.model_dtype,
            temperature=float(self.config.actor_rollout_ref.rollout.temperature),
        )
        found: Diagnosis | str = next(answer for answer in answers if answer is not None)
        if isinstance(found, str):
            raise RecordError(found)
        return found
