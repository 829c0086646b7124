"""Numerics told from drift in verl's asynchronous modes: what is asked of the workers, and which rollouts are scored for it.

The versions of a rollout's tokens come with it (`rollout/client.py`). The workers measure where the tokens lie
(`worker/staleness.py`); the driver chooses rows, and merges states of a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.verl.driver.batch_checks import told_of, without_routes
from mismatch_ext.adapters.verl.driver.measuring import flags_of_scoring
from mismatch_ext.adapters.verl.rollout.client import versioned
from mismatch_ext.adapters.verl.settings.modes import SYNC
from mismatch_ext.adapters.verl.worker.forward_hooks import FURTHER, NATIVE
from mismatch_ext.adapters.verl.worker.staleness import STALE
from transfer_queue import KVBatchMeta

from mismatch_ext.config import MismatchConfig, Trigger
from mismatch_ext.lr import numerics_statistics
from mismatch_ext.run.log import RunLog
from mismatch_ext.staleness import StaleGap

if TYPE_CHECKING:
    from mismatch_ext.adapters.verl.driver.measuring import MeasuringMixin as _Host
else:
    _Host = object

Row = tuple[str, dict[str, Any]]
"""Key and tags of a rollout in verl's TransferQueue."""
FINISHED = "success"
"""Status of a rollout that is complete."""


class StalenessMixin(_Host):
    """Follows versions where verl's trainer samples asynchronously; in `sync` it does nothing."""

    _block: MismatchConfig
    _log: RunLog
    _numerics: StaleGap | None = None

    if TYPE_CHECKING:

        def _bypasses(self) -> bool: ...

    def get_llm_client(self) -> Any:
        """Return verl's client, made to note versions where it resumes answers and, under `enforce`, every turn."""
        return versioned(super().get_llm_client(), turns=self._block.level == "enforce")

    def _follow_versions(self) -> None:
        """Measure numerics and drift apart from here on, if rollouts may be of older weights and the trainer scores them."""
        if self.trainer_mode != SYNC and not self._bypasses():
            self._log.recorder.follow_versions(self._block.monitor.numerics_tokens)

    @property
    def _version(self) -> int:
        """Version of the weights that score a batch: the version of the last weight update."""
        return int(self.global_steps) - 1

    @property
    def _replayed(self) -> bool:
        """Whether passes that score rollouts replay their routes."""
        routing = self._block.routing
        return routing is not None and routing.mode == "R3" and self._block.level == "enforce"

    @contextmanager
    def _by_version(self, batch: Any, part: str, version: int) -> Iterator[None]:
        """Let the pass that scores rows measure them by version."""
        if self._log.recorder.stale is None:
            yield
            return
        asked = {"part": part, "version": version, "least": self._block.monitor.numerics_tokens}
        batch.extra_info[STALE] = {**asked, "replayed": self._replayed}
        try:
            yield
        finally:
            batch.extra_info.pop(STALE, None)

    def _measure_parts(self, batch: Any) -> None:
        """Take the workers' measurements of a scored batch by version, and score more rollouts where those are too few."""
        whole = self._log.recorder.stale
        if whole is None:
            return
        # Only this batch's gap leads the rate; the log merges the gaps of all local updates of a step.
        gap = self._numerics = StaleGap(sampling=whole.sampling, least=whole.least)
        try:
            self._add_measured(gap)
            # At later local updates of a step the actor's weights are no version that sampled: nothing more is scored or kept.
            if int(getattr(self, "local_trigger_step", 0)):
                return
            if not gap.enough():
                self._score_buffer(gap, batch)
            if self._block.monitor.keep_weights:
                self._score_kept(gap, batch)
        finally:
            whole.merge(gap)

    def _add_measured(self, gap: StaleGap) -> None:
        for state in self.actor_rollout_wg.mismatch_stale():
            if isinstance(state, Exception):
                raise state
            if state is not None:
                part = StaleGap(sampling=gap.sampling, least=gap.least)
                part.load_state_dict(state)
                gap.merge(part)

    @property
    def _unit(self) -> int:
        """A scoring pass takes a multiple of this many rows, so that every rank has whole micro-batches."""
        rollout = self.config.actor_rollout_ref.rollout
        ranks = int(self.actor_rollout_wg.world_size)
        return (
            ranks if rollout.log_prob_use_dynamic_bsz else ranks * int(rollout.log_prob_micro_batch_size_per_gpu or 1)
        )

    def _score(self, gap: StaleGap, rows: Sequence[Row], partition: str, part: str, version: int) -> None:
        """Score rows with the actor's present weights, which have this version, and add the measurement to the gap."""
        meta = KVBatchMeta(partition_id=partition, keys=[key for key, _ in rows], tags=[tags for _, tags in rows])
        meta.extra_info = flags_of_pass(self._block, self.config.actor_rollout_ref.rollout.temperature)
        with self._by_version(meta, part, version):
            self.actor_rollout_wg.compute_log_prob(meta)
        self._add_measured(gap)

    def _score_buffer(self, gap: StaleGap, batch: Any) -> None:
        """Score finished rollouts of the present version that are not trained on yet; they stay in the buffer."""
        self.replay_buffer._sync_metadata_from_transfer_queue()
        taken, version = set(batch.keys), self._version
        rows = [
            (key, tags)
            for key, tags in self.replay_buffer.partitions[batch.partition_id].items()
            if key not in taken and tags.get("status") == FINISHED and _span(tags) == (version, version)
        ]
        if self._replayed:
            # A rollout that has lost its routes is named when its own batch comes.
            lost = set(without_routes([key for key, _ in rows], batch.partition_id))
            rows = [row for row in rows if row[0] not in lost]
        if self._block.sampling_mask is not None:
            told = told_of([key for key, _ in rows], batch.partition_id)
            rows = [row for row in rows if row[0] not in told]
        rows = enough_rows(rows, gap.least, self._unit)
        if rows:
            self._score(gap, rows, batch.partition_id, "buffer", version)

    def _score_kept(self, gap: StaleGap, batch: Any) -> None:
        """Keep the present weights, and score a share of the stale tokens by the kept weights of their own version."""
        workers, now = self.actor_rollout_wg, self._version
        kept = workers.mismatch_keep_weights(now, self._block.monitor.keep_weights)[0]
        rows = list(zip(batch.keys, batch.tags, strict=True))
        try:
            for version in sorted((v for v in kept if v < now), reverse=True):
                own = [row for row in rows if _spans(row[1], version)]
                if own:
                    others = [row for row in rows if not _spans(row[1], version)]
                    chosen = enough_rows(own, gap.least, self._unit, filling=others)
                    workers.mismatch_use_weights(version)
                    self._score(gap, chosen, batch.partition_id, "kept", version)
        finally:
            workers.mismatch_use_weights(now)

    def _statistics(self, trigger: Trigger) -> dict[str, float | None]:
        """Return the statistics that lead the rate with a trigger; a stale batch's gap is that of numerics only."""
        gap = self._numerics
        if gap is not None and trigger in ("mismatch_kl", "f_tau"):
            return {**numerics_statistics(gap)}
        return super()._statistics(trigger)


def flags_of_pass(block: MismatchConfig, temperature: float) -> dict[str, Any]:
    """Return the flags of a further scoring pass; under R2 it records no routes, because they would replace the update's.

    Args:
        block: The run's block.
        temperature: The rollout's temperature.
    """
    records = block.routing is not None and block.routing.mode == "R2"
    return flags_of_scoring(temperature, FURTHER, *([NATIVE] if records else []))


def enough_rows(rows: Sequence[Row], tokens: int, unit: int, *, filling: Sequence[Row] = ()) -> list[Row]:
    """Return the first rows that together have enough tokens, or all rows, as a multiple of a unit.

    Args:
        rows: Rows to choose from.
        tokens: Tokens of responses that are enough.
        unit: The number of returned rows is a multiple of this; the last unit is dropped where `filling` cannot complete it.
        filling: Other rows that may complete the last unit; they are not measured.
    """
    count = total = 0
    while count < len(rows) and total < tokens:
        total += int(rows[count][1].get("response_len", 0))
        count += 1
    whole = -(-count // unit) * unit
    found = [*rows, *filling][:whole]
    return found[: len(found) // unit * unit]


def _span(tags: dict[str, Any]) -> tuple[int | None, int | None]:
    return tags.get("min_global_steps"), tags.get("max_global_steps")


def _spans(tags: dict[str, Any], version: int) -> bool:
    first, last = _span(tags)
    return not tags.get("is_padding", False) and first is not None and last is not None and first <= version <= last
