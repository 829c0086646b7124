"""What verl's driver knows about a batch's tokens: its workers measure their parts, and the driver adds these up.

Nothing here grows with tokens. The driver asks for a measurement in the pass that scores a batch, and collects a state of a few
kilobytes from each data shard, and two numbers for each response.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transfer_queue as tq
from mismatch_ext.adapters.verl.driver.batch_checks import sampled_rows
from mismatch_ext.adapters.verl.replay import FIELD, TOKENS
from mismatch_ext.adapters.verl.worker.measuring import ASKED, Broken, PartMeasured
from mismatch_ext.adapters.verl.worker.spread import TOGETHER
from torch import Tensor

from mismatch_ext.config import MismatchConfig, Trigger
from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.log import RunLog
from mismatch_ext.lr import leading_statistics
from mismatch_ext.rollout import non_finite
from mismatch_ext.sums import Sums, merged
from mismatch_ext.verdicts import Verdicts

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Host
else:
    _Host = object


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of the responses of a batch.

    Args:
        gap: Measures of the batch by name, as `gap_metrics` returns them; empty where the trainer has scored nothing.
        lengths: How many tokens of each response the policy itself sampled `[B]`.
        truncated: Whether each response, tools' tokens included, has reached the length limit `[B]`.
    """

    gap: dict[str, float]
    lengths: Tensor
    truncated: Tensor


def flags_of_scoring(temperature: float, *marks: str) -> dict[str, Any]:
    """Return the flags with which a batch asks for a pass that only scores it.

    Args:
        temperature: The rollout's temperature.
        *marks: Names of further flags to set.
    """
    return {"calculate_entropy": False, "compute_loss": False, "temperature": temperature, **dict.fromkeys(marks, True)}


@contextmanager
def asking(batch: Any, flags: dict[str, Any]) -> Iterator[None]:
    """Give a batch these flags, and no others, within a `with` block."""
    given, batch.extra_info = batch.extra_info, flags
    try:
        yield
    finally:
        batch.extra_info = given


class MeasuringMixin(_Host):
    """Asks verl's workers for what they measure of a batch."""

    _block: MismatchConfig
    _verdicts: Verdicts
    _log: RunLog
    _measured: Measured | None = None

    @contextmanager
    def _measuring(self, batch: Any) -> Iterator[None]:
        """Let the pass that scores a batch measure its gap."""
        batch.extra_info[ASKED] = self._log.part()
        try:
            yield
        finally:
            batch.extra_info.pop(ASKED, None)

    @contextmanager
    def _without_routes(self, batch: Any) -> Iterator[None]:
        """Keep the routes of a batch from a pass that does not replay them: they are most of its bytes."""
        if self._block.routing is None:
            yield
            return
        given = batch.fields
        known = given or tq.get_client().kv_retrieve_meta(list(batch.keys), batch.partition_id).field_names
        batch.fields = [name for name in known if name not in (FIELD, TOKENS)]
        try:
            yield
        finally:
            batch.fields = given

    def _collected(self, batch: Any) -> tuple[Sums, list[PartMeasured]]:
        """Return what the workers have measured of a batch in its last pass.

        Raises:
            NonFiniteLogprobError: A log-probability is not a number; names the rollout and the token.
            RecordError: A part is malformed, or some of the batch was not measured.
        """
        answers = self.actor_rollout_wg.mismatch_measured()
        parts = self._added_up(batch, [answer for answer in answers if answer is not None])
        return merged(*(part.gap for part in parts if part.gap is not None)), parts

    def _looked_at(self, batch: Any) -> list[PartMeasured]:
        """Let the workers look at a batch that none of their passes scores before its update.

        Raises:
            As `_collected`.
        """
        keys, ranks = list(batch.keys), self.actor_rollout_wg.world_size
        size = TOGETHER * max(1, -(-len(keys) // (TOGETHER * ranks)))
        parts = [keys[at : at + size] for at in range(0, ranks * size, size)]
        firsts = [at // TOGETHER for at in range(0, ranks * size, size)]
        answers = self.actor_rollout_wg.mismatch_look_at(parts, [batch.partition_id] * ranks, firsts)
        return self._added_up(batch, [part for answer in answers for part in answer])

    def _added_up(self, batch: Any, answers: Sequence[PartMeasured]) -> list[PartMeasured]:
        parts = sorted(answers, key=lambda part: part.part)
        first = 0
        for part in parts:
            if part.error is not None:
                raise part.error
            if part.broken is not None:
                raise _not_a_number(part.broken, batch.keys[first + part.broken.row], self.global_steps)
            first += len(part.tokens)
        if first != len(batch.keys):
            raise RecordError(
                f"the workers measured {first} of the {len(batch.keys)} responses of step {self.global_steps}; a worker's class "
                "other than this package's scores this batch."
            )
        return parts

    def _known(self, batch: Any, parts: Sequence[PartMeasured], gap: dict[str, float]) -> Measured:
        """Return what is known of the sampled responses of a batch; rows that verl added to fill it up are left out."""
        rows = sampled_rows(batch)
        tokens, lengths = (
            torch.tensor([n for part in parts for n in getattr(part, of)]) for of in ("tokens", "lengths")
        )
        limit = int(self.config.actor_rollout_ref.rollout.response_length)
        return Measured(gap=gap, lengths=tokens[rows], truncated=lengths[rows] >= limit)

    def _statistics(self, trigger: Trigger) -> dict[str, float | None]:
        """Return the statistics of the batch measured last that lead the rate with a trigger."""
        found = self._measured
        return {} if found is None else {**leading_statistics(trigger, found.lengths, found.truncated, found.gap)}


def _not_a_number(broken: Broken, key: str, step: int) -> NonFiniteLogprobError:
    name = f"{key} of step {step}"
    if broken.side == "rollout":
        return non_finite(name, broken.token, broken.value)
    return NonFiniteLogprobError(
        f"rollout {name}, token {broken.token}: the trainer gives log-probability {broken.value}. An overflow in float16 or "
        "broken weights cause this; check the checkpoint with `mismatch-ext readiness`."
    )
