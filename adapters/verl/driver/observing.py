"""`mismatch.level: observe` in verl's driver: stock verl's batches are measured, and nothing in them is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import transfer_queue as tq
from mismatch_ext.adapters.verl.driver.batch_checks import sampled_rows
from mismatch_ext.adapters.verl.driver.measuring import asking, flags_of_scoring
from mismatch_ext.adapters.verl.driver.reports import merged
from mismatch_ext.adapters.verl.settings.correction import settings_of
from mismatch_ext.adapters.verl.settings.kl import coefficient
from mismatch_ext.adapters.verl.worker.forward_hooks import OBSERVED

from mismatch_ext.config import MismatchConfig, Trigger
from mismatch_ext.correction import correct, of_weights
from mismatch_ext.kl import KlTerm
from mismatch_ext.lr import ShadowRate
from mismatch_ext.recorder import PREFIX
from mismatch_ext.verdicts import ENFORCE, Finding, Verdicts

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Host
else:
    _Host = object


class ObservingMixin(_Host):
    """Measures batches of verl's trainer under `observe`, where no section of the block acts."""

    _block: MismatchConfig
    _verdicts: Verdicts
    _shadow_rate: ShadowRate | None = None
    _shadow_kl: KlTerm | None = None

    if TYPE_CHECKING:

        def _bypasses(self) -> bool: ...
        def _kl_sums(self, batch: Any, term: KlTerm, *, baseline: bool) -> list[float]: ...
        def _statistics(self, trigger: Trigger) -> dict[str, float | None]: ...

    def _watch(self) -> None:
        """Build the objects that compute, beside the run, what the block's sections would have done."""
        if self._block.lr is not None:
            with self._verdicts.checking("lr"):
                optim = self.config.actor_rollout_ref.actor.optim
                steps = int(optim.get("lr_warmup_steps") or -1)
                ratio = float(optim.get("lr_warmup_steps_ratio") or 0.0)
                total = int(self.total_training_steps)
                updates = steps if steps > 0 else int(ratio * total)
                warmup = math.ceil(updates / self.parameter_sync_step)
                self._shadow_rate = ShadowRate(self._block.lr)
                self._shadow_rate.attach(warmup=warmup, step=int(self.global_steps), steps=total)
        if self._block.kl is not None:
            with self._verdicts.checking("kl"):
                self._shadow_kl = KlTerm(self._block.kl, coefficient(self._block.kl, self.config))

    def _would_change_advantages(self, batch: Any) -> dict[str, float]:
        """Return metrics of the correction and of the KL that the block would have applied to a batch."""
        found: dict[str, float] = {}
        if self._block.correction is not None and not self._bypasses():
            with self._verdicts.checking("correction"):
                # This needs the whole batch in the driver, as verl's own correction does, but only while it computes.
                fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
                data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
                padded = data.to_padded_tensor()
                old, rollout, mask = (padded[name][sampled_rows(batch)] for name in fields)
                # The off-policy mask belongs to the update, and stock verl updates without it.
                settings = replace(settings_of(self._block.correction), off_policy_threshold=None)
                metrics = correct(rollout.float(), old.float(), mask.bool(), settings).metrics
                found |= {PREFIX + ENFORCE + name: value for name, value in of_weights(metrics).items()}
        if self._shadow_kl is not None and self.use_reference_policy:
            with self._verdicts.checking("kl"):
                metrics = self._shadow_kl.adapt_to(self._kl_sums(batch, self._shadow_kl, baseline=False))
                found |= {PREFIX + ENFORCE + name: value for name, value in metrics.items()}
        return found

    def _would_set_rate(self) -> dict[str, float]:
        """Return metrics of the rate that the block would have applied to the next update."""
        if self._shadow_rate is None or self._block.lr is None:
            return {}
        found: dict[str, float] = {}
        with self._verdicts.checking("lr"):
            self._shadow_rate.collect(**self._statistics(self._block.lr.trigger))
            if self.local_trigger_step:
                return {}  # the rule counts steps, not local updates
            metrics = self._shadow_rate.lead()
            found = {f"{PREFIX}{ENFORCE}{name}": value for name, value in metrics.items()}
        return found

    def _after_update(self, metrics: Mapping[str, Any]) -> None:
        if self._shadow_rate is not None:
            with self._verdicts.checking("lr"):
                norm = metrics.get("actor/grad_norm")
                self._shadow_rate.step()
                self._shadow_rate.after_step(None if norm is None else float(norm))

    def _compare_routes(self, batch: Any) -> dict[str, float]:
        """Let the workers score a batch once more, comparing the rollout's routes with their own; return the agreement."""
        with asking(batch, flags_of_scoring(self.config.actor_rollout_ref.rollout.temperature, OBSERVED)):
            self.actor_rollout_wg.compute_log_prob(batch)
        return merged(self.actor_rollout_wg.mismatch_metrics())

    def _collect_findings(self) -> None:
        """Take what the workers have found since the last call."""
        if not self._verdicts.observes:
            return
        with self._verdicts.checking("findings"):
            for rank, found in enumerate(self.actor_rollout_wg.mismatch_findings()):
                # The step is added here, because a worker does not know it.
                here = [Finding(**{**entry, "step": self.global_steps}) for entry in found]
                if rank:
                    here = [Finding(**{**vars(f), "message": f"rank {rank}: {f.message}"}) for f in here]
                self._verdicts.add(here)
