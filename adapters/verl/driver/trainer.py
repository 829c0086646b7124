"""verl's PPO trainer with the `mismatch:` block, in each of verl's modes; `modes.py` combines it with verl's class of a mode.

Order of a rollout through this file: `on_init_end` (what is active, everywhere) -> `_compute_old_log_prob` (bad rows) ->
`_compute_advantage` (the gap, KL, correction) -> `_update_actor` (learning rate, loss scaler) -> `on_step_end` (weights) ->
`_compute_metrics` (loggers, run directory, alarms) -> checkpoints, and how a run ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray
from mismatch_ext.adapters import compat
from mismatch_ext.adapters.verl.bad_rows import JUDGED
from mismatch_ext.adapters.verl.block import block_of
from mismatch_ext.adapters.verl.driver.bad_keys import mark, replace_non_finite, take_out
from mismatch_ext.adapters.verl.driver.batch_checks import (
    ExpertLoads,
    check_routes,
    check_settings,
    check_tokens,
    check_versions,
    without_routes,
)
from mismatch_ext.adapters.verl.driver.objective import DriverKl
from mismatch_ext.adapters.verl.driver.processes import Processes, bypasses
from mismatch_ext.adapters.verl.driver.reports import of_ranks, under_our_names
from mismatch_ext.adapters.verl.driver.weights import LAST_TIMEOUT, RolloutWeights
from mismatch_ext.adapters.verl.evidence import StoredBatch
from mismatch_ext.adapters.verl.measure import (
    OLD,
    SCORED,
    BadKeys,
    Measured,
    Scoring,
    left_by_correction,
    measure,
    take_faults,
)
from mismatch_ext.adapters.verl.refusals import SYNC, trainer_of
from mismatch_ext.adapters.verl.replay import NATIVE
from mismatch_ext.adapters.verl.rollout.client import versioned
from mismatch_ext.adapters.verl.rollout.replicas import register_replicas
from mismatch_ext.adapters.verl.worker import MismatchWorker
from omegaconf import DictConfig, OmegaConf, open_dict

from mismatch_ext.checkpoint import STATE_FILE, changed_settings, read_state, write_state
from mismatch_ext.checks import Checks, FailedCheck
from mismatch_ext.config import KlConfig, MismatchConfig, Trigger
from mismatch_ext.correction import masked_sums_of
from mismatch_ext.errors import ConfigError, EngineError, MismatchError, RunDirectoryError, WeightSyncError
from mismatch_ext.gap import gap_metrics
from mismatch_ext.log import RunLog
from mismatch_ext.lr import leading_statistics, numerics_statistics
from mismatch_ext.metrics_file import run_folder
from mismatch_ext.names import PREFIX, VERL
from mismatch_ext.routing.agreement import of_layer
from mismatch_ext.routing.replay import MeasuredPasses
from mismatch_ext.terminal import say_in_run

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Host
else:
    _Host = object


class MismatchTrainer(_Host):
    """The trainer that `settings.prepare` chooses for a configuration with a block; without one, verl's own trainer runs."""

    host_mode: ClassVar[str] = SYNC
    """Mode of the verl trainer that this class is combined with."""
    worker: ClassVar[type[MismatchWorker]] = MismatchWorker
    """Takes the place of verl's; that of `separate_async` can put weights aside, for π_old between two weight updates."""

    def __init__(self, config: DictConfig) -> None:
        block = block_of(config.actor_rollout_ref)
        if block is None:
            raise ConfigError(
                f"trainer.v1.trainer_mode={trainer_of(self.host_mode)!r}, but the configuration has no mismatch block that was "
                "read; give the block (+mismatch...) and leave trainer_mode alone."
            )
        self._block: MismatchConfig = block
        self._checks = Checks(block.acts, lambda: int(getattr(self, "global_steps", 0)))
        with self._checks.checking("versions"):
            # verl's trainers are loaded in this process.
            compat.check(("verl",), block.features, {"verl", self.host_mode})
        with open_dict(config):
            # verl reads its mode in many places, for settings, checkpoints and the replay buffer.
            config.trainer.v1.trainer_mode = self.host_mode
        register_replicas(block)
        # verl's own class, with which this one is combined.
        host = next(kind.__name__ for kind in type(self).__mro__ if kind.__module__.startswith("verl."))
        self._processes = Processes(config, block, self._checks, host)
        self._log = self._processes.log = self._new_log(config)
        self._draws = None if block.routing is None else MeasuredPasses(block.routing, actor_seed(config))
        self._measured: Measured | None = None  # of the batch that the next update learns from
        self._bad: BadKeys | None = None  # the bad rows of that batch
        self._judged_batch: StoredBatch | None = None  # that batch, as evidence
        self._has_reference = False  # whether the reference has scored that batch
        self._led = False  # whether a batch of this step has led the rate
        self._weights: RolloutWeights | None = None
        self._actor_updated = False  # since the last weight update
        self._resumed: dict[str, Any] = {}
        self._updated_step = self._saved_step = 0
        super().__init__(config)
        if self._has_routes:
            self._rollout_moe_lb_metrics_accumulator = ExpertLoads(config.actor_rollout_ref.model)
        self._kl = None if block.kl is None else DriverKl(block.kl, config)
        if self.trainer_mode != SYNC and not bypasses(config):
            self._log.sums.follows_versions = True

    def _new_log(self, config: DictConfig) -> RunLog:
        """Return the run's log, which writes into the folder of verl's checkpoints."""
        return RunLog(
            self._block,
            run_folder(self._block.monitor, Path(config.trainer.default_local_dir)),
            info=self._processes.info,
            step=lambda: self.global_steps,
            names=VERL,
            checks=self._checks,
            tell=lambda message: say_in_run(f"mismatch-ext: {message}"),
        )

    # Before the first step, and around weight updates.

    def _init_resource_pool_mgr(self, *args: Any, **kwargs: Any) -> None:
        """Map verl's roles as it does, with our worker where it has its own."""
        super()._init_resource_pool_mgr(*args, **kwargs)
        for role in self.role_worker_mapping:
            if "actor" in str(role) or str(role) == "ref":
                self.role_worker_mapping[role] = ray.remote(self.worker)

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Initialize as verl does, and write how the run ended if that fails."""
        with self._failing_loudly():
            super().init(*args, **kwargs)

    def get_llm_client(self, *args: Any, **kwargs: Any) -> Any:
        """Return verl's client, made to note versions where it resumes answers, and turns that have routes or masks."""
        client = super().get_llm_client(*args, **kwargs)
        return versioned(client, replayed=self._has_routes)

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Check every process, send the first weights, and check that they arrived; then say what is active."""
        with self._checks.checking("processes"):
            self._processes.check(self.actor_rollout_wg, self._replicas, self.tokenizer)
        with self._checks.checking("weight_sync"):
            self._weights = self._processes.weights(self._resumed.get("weight_sync"))
        self._update_weights(partial(super().on_init_end, *args, **kwargs))
        with self._checks.checking("metrics"):
            self._processes.announce(self.global_steps)
        self._collect_findings()

    def _replicas(self) -> list[Any]:
        """Return the rollout replicas that verl sends weights to now: its managers may get more, or lose some."""
        managers = [self.checkpoint_manager, getattr(self, "standalone_checkpoint_manager", None)]
        return [replica for manager in managers if manager is not None for replica in manager.replicas]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Send the new weights, and check that the rollout server computes with them."""
        self._updated_step = self.global_steps
        self._update_weights(partial(super().on_step_end, *args, **kwargs))

    def _update_weights(self, update: Any) -> None:
        """Ask the actor what it scores while the rollout sleeps, update as verl does, and ask every server what it has."""
        with self._checks.checking("weight_sync"):
            if self._weights is not None:
                self._save_if_wrong(self._weights.settle)
        with self._checks.checking("weight_sync"):
            if self._weights is not None:
                self._weights.look()
        update()
        with self._checks.checking("records"):
            self._processes.follow_weights(self.global_steps)
        with self._checks.checking("weight_sync"):
            if self._weights is not None:
                self._save_if_wrong(partial(self._weights.verify, stepped=self._actor_updated))
        self._actor_updated = False

    def _save_if_wrong(self, judge: Callable[[], None]) -> None:
        """Judge what the rollout servers have; the actor's weights are right all the same, and are saved before an error."""
        try:
            judge()
        except WeightSyncError as error:
            if self._checks.acts and self._saved_step != self.global_steps:
                try:
                    self._save_now()
                except Exception as unsaved:
                    raise error from unsaved
            raise

    def on_validate_end(self, *args: Any, **kwargs: Any) -> None:
        with self._checks.checking("rollouts"):
            self._processes.check_refused("validation", self.global_steps)
        super().on_validate_end(*args, **kwargs)

    # One batch: a step has a batch for each local update.

    @property
    def _first_update(self) -> bool:
        """Whether the actor's weights are still those that the rollout servers have: no local update has changed them."""
        return bool(self.local_trigger_step == 0)

    @property
    def _has_routes(self) -> bool:
        """Whether rollouts come with the routes they were sampled with."""
        return self._block.routing is not None and self._block.routing.mode == "R3"

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Score the batch as verl does; its rows are checked before and after the pass.

        If the config acts, bad rows get no part in any loss.
        """
        held = self._held(batch)
        with self._checks.checking("rollouts"):
            self._processes.check_refused("rollouts", self.global_steps)
        self._bad, self._judged_batch = BadKeys(batch), held
        bad = self._bad
        self._check_rows(batch, held, bad, metrics)
        if bad and self._checks.acts:
            mark(batch, bad)
        judges = self._checks.acts and (self._has_routes or self._block.sampling_mask is not None)
        if judges:
            batch.extra_info[JUDGED] = True
        scored = super()._compute_old_log_prob(batch, metrics, *args, **kwargs)
        for one in (batch, scored):
            one.extra_info.pop(JUDGED, None)
        self._has_reference = False
        if judges:
            take_faults(scored, self.global_steps, bad)
        if bad and self._checks.acts:
            mark(scored, bad)
        # A further pass would score with weights that an update has changed.
        if self._first_update and not bypasses(self.config):
            with self._checks.checking("gap"):
                self._measure_native(scored)
        return scored

    def _check_rows(self, batch: Any, held: StoredBatch, bad: BadKeys, metrics: dict[str, Any]) -> None:
        """Check rows before the trainer scores them; raises what is no single row's fault."""
        if self._block.sampling_mask is not None:
            from mismatch_ext.adapters.verl.sampling_mask import check_masks

            with self._log.refusing("train", held):
                check_masks(batch, self.global_steps, bad)
        with self._checks.checking("versions"), self._log.refusing("train", held):
            check_versions(self._processes.origins, batch, bad, older=self.trainer_mode != SYNC)
        if self._has_routes:
            with self._log.refusing("train", held):
                check_routes(batch, self.global_steps, bad, acts=self._checks.acts)
        # An agent loop that samples in its own way is told of it, and trains on: the settings are its own choice.
        with self._checks.reporting("sampling"), self._log.refusing("train", held):
            settings = self._processes.sampling
            check_settings(batch, self.global_steps, settings, self._processes.implied_penalty)
        if not self._has_routes:  # else the engine compares each token that it replays routes of
            check_tokens(batch, self.global_steps, bad, metrics)

    def _held(self, batch: Any) -> StoredBatch:
        """Return a batch as one that can be kept as evidence, while its fields are in verl's queue."""
        processes = self._processes
        return StoredBatch(
            batch,
            self.global_steps - 1,
            provenance=processes.origins.present,
            experts=processes.experts if self._has_routes else None,
            settings=processes.trainer_settings,
        )

    def _measure_scored(self, batch: Any, bad: BadKeys) -> Measured:
        """Measure a batch that verl's passes have scored; in bypass mode the trainer has none, and there is no gap."""
        scoring = None
        if not bypasses(self.config):
            # The weights that score are those of the last weight update.
            version = self.global_steps - 1 if self._log.sums.follows_versions else None
            scoring = Scoring(field=OLD, version=version, replayed=self._has_routes)
        section = None if self._kl is None else self._kl.term.config
        measured = self._measure(batch, scoring, bad, reference=self._has_reference, kl=section)
        if measured.gap is not None:
            self._log.sums.add("train", "gap", measured.gap)
        if measured.drift is not None:
            self._log.sums.add("train", "drift", measured.drift)
        return measured

    def _measure(
        self,
        batch: Any,
        scoring: Scoring | None,
        bad: BadKeys,
        *,
        reference: bool = False,
        kl: KlConfig | None = None,
    ) -> Measured:
        drawn = self._log.sums.draw()
        return measure(
            batch,
            self.global_steps,
            scoring,
            bad,
            longest=int(self.config.actor_rollout_ref.rollout.response_length),
            reference=reference,
            kl=kl,
            sample=drawn["sample"],
            seed=drawn["seed"],
        )

    def _measure_native(self, batch: Any) -> None:
        """Score a share of the batches once more without replay: the gap there is what replay closes."""
        # verl's Megatron engine has no pass of the actor without replay.
        megatron = self.config.actor_rollout_ref.actor.strategy == "megatron"
        if self._draws is None or megatron or not self._draws.native_gap():
            return
        temperature = self.config.actor_rollout_ref.rollout.temperature
        flags = {"calculate_entropy": False, "compute_loss": False, "temperature": temperature, NATIVE: True}
        given, batch.extra_info = batch.extra_info, flags
        try:
            with without_routes(batch, self._block.routing):
                self.actor_rollout_wg.compute_log_prob(batch)
        finally:
            batch.extra_info = given
        # Rows that this pass finds in addition are left out of its gap, and are not bad otherwise.
        bad = BadKeys(batch)
        bad.rows.faults |= {} if self._bad is None else self._bad.rows.faults
        gap = self._measure(batch, Scoring(field=SCORED), bad).gap
        assert gap is not None
        self._log.sums.add("train", "native", gap)

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._block.routing is not None and self._block.routing.reference:
            batch = super()._compute_ref_log_prob(batch, metrics, *args, **kwargs)
        else:
            with without_routes(batch, self._block.routing):
                batch = super()._compute_ref_log_prob(batch, metrics, *args, **kwargs)
        self._has_reference = True
        return batch

    def _compute_values(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with without_routes(batch, self._block.routing):
            return super()._compute_values(batch, metrics, *args, **kwargs)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Measure the batch, compute advantages as verl does, and count what verl's correction discards.

        Bad rows leave the losses afterwards, so that they stay in the statistics of their groups.
        """
        bad, held = self._bad, self._judged_batch
        assert bad is not None
        assert held is not None
        # All passes are over: nothing but what is measured now can make a row bad.
        self._measured = None
        with self._checks.checking("gap"), self._log.holding("train", held):
            self._measured = self._measure_scored(batch, bad)
        self._log.count_bad_rows("train", bad.rows, held)
        if bad and self._checks.acts:
            mark(batch, bad)
            replace_non_finite(batch, bad)
        if self._kl is not None:
            assert self._measured is not None
            assert self._measured.kl is not None
            metrics.update(self._kl.prepare(self._measured.kl, self.global_steps))
        batch = super()._compute_advantage(batch, metrics, *args, **kwargs)
        if self._kl is not None:
            self._kl.check_penalized()
        correction = self.config.algorithm.get("rollout_correction")
        if self._measured is not None and self._corrects(correction):
            with self._checks.checking("correction"):
                good = ~bad.flags(batch.keys)
                sampled, left = self._measured.tokens, left_by_correction(batch)
                self._log.sums.add("train", "masked", masked_sums_of(sampled[good], left[good]))
        if bad and self._checks.acts:
            take_out(batch, bad)
        return batch

    def _corrects(self, correction: Any) -> bool:
        """Return whether verl's driver rejects tokens of a batch, or weighs them."""
        if correction is None or bypasses(self.config):
            return False
        return bool(correction.get("rollout_rs") or correction.get("rollout_is"))

    @property
    def _trains_on_nothing(self) -> bool:
        """Whether no row of the batch has a part in any loss: an optimizer would still move the weights by its momentum."""
        return self._bad is not None and self._checks.acts and len(self._bad) == self._bad.rows.size

    def _update_critic(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._trains_on_nothing:
            return batch
        with without_routes(batch, self._block.routing):
            return super()._update_critic(batch, metrics, *args, **kwargs)

    def _update_actor(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Update the actor as verl does, at the rate that this batch calls for."""
        if self._first_update:
            self._led = False
        # The rule counts steps: the first batch that a step learns from leads all of its local updates.
        if self._block.lr is not None and not self._trains_on_nothing and not self._led:
            self._led = True
            statistics = self._statistics(self._block.lr.trigger)
            metrics.update(of_ranks(self.actor_rollout_wg.mismatch_update_lr(**statistics)))
        self._measured = None
        if self._kl is not None:
            self._kl.send(batch)
        if not self._trains_on_nothing:
            batch = super()._update_actor(batch, metrics, *args, **kwargs)
            self._actor_updated = True
        under_our_names(metrics)
        if self.local_trigger_step == self.parameter_sync_step - 1:  # a weight update follows
            metrics.update(of_ranks(self.actor_rollout_wg.mismatch_metrics()))
        return batch

    def _statistics(self, trigger: Trigger) -> dict[str, float | None]:
        """Return the statistics of the batch measured last that lead the rate; a stale batch's gap is that of numerics only."""
        measured = self._measured
        if measured is None:
            return {}
        if measured.drift is not None and trigger in ("mismatch_kl", "f_tau"):
            return {**numerics_statistics(measured.drift)}
        gap = {} if measured.gap is None else gap_metrics(measured.gap)
        return {**leading_statistics(trigger, measured.lengths, measured.truncated, gap)}

    # The end of a step, and of the run.

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: Any, global_steps: int, *args: Any, **kwargs: Any
    ) -> None:
        """Compute verl's metrics, add the gap's, write all of them and hold them against the alarms."""
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, *args, **kwargs)
        self._collect_findings()
        with self._checks.checking("metrics"):
            self._record(metrics, global_steps)

    def _collect_findings(self) -> None:
        """Take the checks that failed in the workers since the last call, in a run that goes on."""
        if self._checks.acts:
            return
        with self._checks.checking("findings"):
            for rank, found in enumerate(self.actor_rollout_wg.mismatch_findings()):
                # The step is added here, because a worker does not know it.
                here = [FailedCheck(**{**entry, "step": self.global_steps}) for entry in found]
                if rank:
                    here = [replace(finding, message=f"rank {rank}: {finding.message}") for finding in here]
                self._checks.add(here)

    def _record(self, metrics: dict[str, Any], global_steps: int) -> None:
        if self._weights is not None:
            metrics[PREFIX + "weight_sync_unanswered"] = self._weights.unanswered
            if (gap := self._weights.gap) is not None:
                metrics[PREFIX + "weight_sync_gap"] = gap
        logged = self._log.log(global_steps, metrics)
        metrics.update(logged.metrics)
        shown = self._log.shown(metrics)
        for name in [name for name in metrics if name not in shown or of_layer(name)]:
            del metrics[name]  # verl's loggers get the short list, and of the layers only the worst
        if logged.stop is not None:
            self._stop()
        # verl saves before it logs, and logging changes the state. A `checkpoint_callback_class` may have moved the folder away,
        # and our file alone would look like a checkpoint.
        if self._saved_step == self.global_steps and self._folder(self.global_steps).is_dir():
            self._write_state()

    def _stop(self) -> None:
        """End training after this step, with a checkpoint: verl's loop looks at the total when the step is over."""
        if self._saved_step != self.global_steps:
            self._save_now()
        self._log.saved(self._folder(self.global_steps))
        self.total_training_steps = self.global_steps

    def _save_now(self) -> None:
        """Save a checkpoint while the rollout servers are awake."""
        # Free the memory of servers that share the trainer's devices, as verl does before it saves.
        if self.trainer_mode != SYNC:
            self.checkpoint_manager.abort_replicas()  # answers are in flight; their clients resume them later
        self.checkpoint_manager.sleep_replicas()
        self._save_checkpoint()

    def fit(self, agent_loop_manager: Any, *args: Any, **kwargs: Any) -> None:
        """Train as verl does, and write how the run ended."""
        with self._failing_loudly():
            super().fit(agent_loop_manager, *args, **kwargs)
            with self._checks.checking("weight_sync"):
                if self._weights is not None:
                    self._weights.settle(wait=LAST_TIMEOUT)
        with self._checks.checking("metrics"):
            self._log.end("completed", step=self._updated_step)

    @contextlib.contextmanager
    def _failing_loudly(self) -> Iterator[None]:
        """Write how the run ended; what verl has saved stays."""
        try:
            yield
        except BaseException as error:
            ours = isinstance(error, MismatchError) or not self._checks.acts
            if isinstance(error, Exception) and not ours:
                error = self._refusal(error) or error
            # Neither a full disk nor a finding may take the place of the error in flight.
            with contextlib.suppress(RunDirectoryError), self._checks.checking("metrics"):
                self._log.end("failed", f"{type(error).__name__}: {error}", step=self._updated_step)
            raise error

    def _refusal(self, error: Exception) -> MismatchError | None:
        """Return the refusal of a rollout server if there was one: verl fails for another reason when no rollout is left."""
        try:
            self._processes.check_refused("rollouts", int(getattr(self, "global_steps", 0)), timeout=10.0)
        except EngineError as refused:
            if "were refused" in str(refused):
                refused.__cause__ = error
                return refused
        return None

    # Checkpoints: the driver's state; `engine.py` has the workers'.

    def _folder(self, step: int) -> Path:
        return Path(self.config.trainer.default_local_dir).absolute() / f"global_step_{step}"

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._checks.checking("checkpoint"):
            self._write_state()  # first: a checkpoint that verl has finished must not lack our part of it
        super()._save_checkpoint(*args, **kwargs)
        self._saved_step = self.global_steps

    def _write_state(self) -> None:
        """Write the driver's state into the checkpoint of the present step."""
        state = {
            **self._log.state_dict(),
            "config": self._block.to_dict(),
            "kl": None if self._kl is None else self._kl.term.state_dict(),
            "routing": None if self._draws is None else self._draws.state_dict(),
            "weight_sync": None if self._weights is None else self._weights.state_dict(),
        }
        write_state(self._folder(self.global_steps) / STATE_FILE, state)

    def _load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Resume as verl does, and load the driver's own state too."""
        super()._load_checkpoint(*args, **kwargs)
        with self._checks.checking("checkpoint"):
            self._resume_state()

    def _resume_state(self) -> None:
        """Load the driver's state from the checkpoint that verl has loaded."""
        self._updated_step = self._saved_step = self.global_steps
        if not self.global_steps:
            return
        folder = self._folder(self.global_steps)
        if self.config.trainer.resume_mode == "resume_path":
            folder = Path(self.config.trainer.resume_from_path).absolute()
        saved = read_state(folder / STATE_FILE)
        state = saved or {}
        said = [changed_settings(state.get("config"), self._block.to_dict())]
        if saved is None:
            said.append(
                f"{folder} holds no {STATE_FILE}: alarms, the KL coefficient and the choice of measured passes start again. If "
                "the run that saved it had a mismatch config, copy the file from its checkpoint."
            )
        if self._kl is not None and state.get("kl") is not None:
            said.append(self._kl.term.load_state_dict(state["kl"]))
        if self._draws is not None and state.get("routing") is not None:
            self._draws.load_state_dict(state["routing"])
        self._log.load_state_dict(state, step=self.global_steps)
        self._resumed = state
        for message in filter(None, said):
            self._processes.event("warning", "settings_changed", message)


def actor_seed(config: DictConfig) -> int:
    """Return the seed of the actor's engines."""
    actor = config.actor_rollout_ref.actor
    engine = "megatron" if actor.strategy == "megatron" else "fsdp_config"
    return int(OmegaConf.select(actor, f"{engine}.seed", default=0))
