"""Before the first step and after each weight update: what is active in every process, and what the rollout computes with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.transformers.vocabulary import plain_vocabulary
from mismatch_ext.adapters.verl.driver.integration import info_of
from mismatch_ext.adapters.verl.driver.reports import (
    Checked,
    check_reports,
    check_vocabulary,
    engine_answers,
)
from mismatch_ext.adapters.verl.driver.servers import read_rollouts, refused_answers
from mismatch_ext.adapters.verl.driver.weights import ANSWER_TIMEOUT, RolloutWeights, unverified

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError
from mismatch_ext.log import RunLog
from mismatch_ext.names import VERL
from mismatch_ext.patching import active_patches
from mismatch_ext.precision.readiness import EVENT as READINESS
from mismatch_ext.rollout import Origins, SamplingSettings
from mismatch_ext.terminal import say
from mismatch_ext.verdicts import Verdicts
from mismatch_ext.weights import draw_probes

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Host
else:
    _Host = object


class PreflightMixin(_Host):
    """Looks at workers and rollout servers through verl's own worker group and replicas."""

    _block: MismatchConfig
    _verdicts: Verdicts
    _log: RunLog
    _checked: Checked
    _weights: RolloutWeights | None = None
    _resumed: dict[str, Any]
    _origins: Origins
    _surplus: Mapping[str, Any] | None = None

    def _replicas(self) -> list[Any]:
        """Return the rollout servers of all managers; none before they are started."""
        return [replica for manager in self._rollout_server_managers() for replica in manager.get_replicas()]

    def _bypasses(self) -> bool:
        """Whether the engine's log-probabilities are used as the old policy's, so that the trainer computes none."""
        given = self.config.algorithm.get("rollout_correction")
        return bool(given is not None and given.get("bypass_mode"))

    def _check_processes(self) -> None:
        """Check that every worker and every rollout server runs this block, in the dtypes that it asks for.

        Raises:
            MismatchError: One does not; names the process and what it runs with.
        """
        self._probes = self._draw_probes()
        workers = self.actor_rollout_wg.mismatch_report()
        rollouts = read_rollouts(self._replicas(), self._block, ANSWER_TIMEOUT)
        self._checked = check_reports(self._block, workers, rollouts, self._verdicts)
        self._surplus = self.actor_rollout_wg.mismatch_vocabulary(self._probes.tolist(), len(self.tokenizer))[0]
        with self._verdicts.checking("vocabulary"):
            check_vocabulary(self._surplus)

    def _follow_weights(self) -> None:
        """Ask every rollout server which weights it has, after an update.

        Raises:
            EngineError: One does not answer.
            RecordError: One has others than were sent, or runs with something else than the others.
        """
        answers = read_rollouts(self._replicas(), self._block, ANSWER_TIMEOUT)
        self._origins.sent(self.global_steps, engine_answers(answers))

    def _draw_probes(self) -> torch.Tensor:
        """Draw the fixed probe sequences `[N, T]`."""
        rollout = self.config.actor_rollout_ref.rollout
        longest = int(rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length)
        return draw_probes(plain_vocabulary(self.tokenizer), longest - 1)

    def _prepare_weights(self) -> None:
        """Prepare to verify weight updates, going on from the loaded checkpoint; do nothing where they are not verified."""
        if self._block.monitor.weight_sync == "off" or self._unverified is not None or self._unchecked:
            return
        self._weights = RolloutWeights(
            self.actor_rollout_wg,
            self._replicas(),
            self._block.monitor,
            self._probes,
            dtype=self._checked.engine.model_dtype,
            trainer_dtype=self._checked.trainer.compute_dtype,
            event=self._event,
        )
        state = self._resumed.get("weight_sync")
        if state is not None and (said := self._weights.load_state_dict(state)):
            self._event("warning", "settings_changed", said)

    @property
    def _unverified(self) -> str | None:
        return unverified(self.config.actor_rollout_ref.rollout, self._block.monitor)

    def _look_at_weights(self) -> None:
        """Ask the actor what it scores, while the rollout sleeps."""
        if self._weights is not None:
            self._weights.look()

    def _verify_weights(self) -> None:
        """Check that each rollout server computes with the weights that the actor had when it was asked.

        Raises:
            WeightSyncError: One does not, and `monitor.weight_sync` is "error".
        """
        if self._weights is not None:
            self._weights.verify()

    def _raise_refused(self, what: str, timeout: float = ANSWER_TIMEOUT) -> None:
        """Raise if a rollout server refused answers, because verl only drops them.

        Args:
            what: What was sampled.
            timeout: Seconds that the servers may take to say so.

        Raises:
            EngineError: Answers were refused, or a server does not answer.
        """
        if refused := refused_answers(self._replicas(), timeout):
            raise EngineError(f"{what} of step {self.global_steps}: {refused}")

    def _announce(self) -> None:
        """Open the metrics file, and say what is active, in which peer, and how."""
        self._log.sampled_with(self._scored_sampling)
        self._log.begin(self.global_steps or None)
        for message in self._readiness_of_ranks():
            self._event("warning", READINESS, message)
        if self._surplus is not None:
            self._event(
                "info",
                "vocabulary",
                f"{self._surplus['model_size'] - self._surplus['tokenizer_size']} ids of the model are not in its tokenizer.",
                dict(self._surplus),
            )
        if self._bypasses():
            message = "bypass mode takes no pass of the trainer over fresh rollouts, so that the gap is not measured."
            self._event("warning", "bypass", message)
        if self._unverified is not None:
            self._event("warning", "weights_unverified", self._unverified)
        if self._unchecked:
            say(f"mismatch-ext: the processes could not be checked; what is measured is written to {self._log.run_dir}")
            return
        if (bias := self._scored_sampling.ratio_bias(renormalised=self._checked.engine.renormalises)) is not None:
            self._event("warning", "sampling", bias)
        self._log.announce()

    def _readiness_of_ranks(self) -> list[str]:
        """Return the warnings about weights, each once, with the first rank that has it where there are several ranks."""
        found = self.actor_rollout_wg.mismatch_readiness()
        first: dict[str, int] = {}
        for rank, message in enumerate(found):
            if message is not None:
                first.setdefault(message, rank)
        return [f"rank {rank}: {message}" if len(found) > 1 else message for message, rank in first.items()]

    def _sampling(self) -> SamplingSettings:
        rollout = self.config.actor_rollout_ref.rollout
        return SamplingSettings(
            temperature=float(rollout.temperature),
            top_p=float(rollout.top_p),
            top_k=int(rollout.top_k),
            # Whatever rollout.repetition_penalty says: verl's agent loops ask for 1.
            repetition_penalty=1.0,
        )

    @property
    def _scored_sampling(self) -> SamplingSettings:
        """The sampling settings that the trainer's log-probabilities ignore: with sampling masks they follow truncation."""
        found = self._sampling()
        return found if self._block.acting.sampling_mask is None else found.without_truncation()

    @property
    def _unchecked(self) -> bool:
        """Whether the processes could not be checked, a finding under `observe`; all else is still measured and written."""
        return self._verdicts.observes and not hasattr(self, "_checked")

    def _info(self) -> dict[str, Any]:
        if self._unchecked:
            return {"config": self._block.to_dict(), "names": VERL.to_dict(), "patches": active_patches()}
        # verl's own class, with which this mixin is combined.
        host = next(kind.__name__ for kind in type(self).__mro__ if kind.__module__.startswith("verl."))
        found = info_of(self.config, self._block, self._checked, active_patches(), self._sampling(), host)
        present = self._origins.present
        return found if present is None else found | {"provenance": dataclasses.asdict(present)}

    def _event(self, level: str, name: str, message: str, data: dict[str, Any] | None = None) -> None:
        """Print an event's message, and write the event into the run's metrics file."""
        say(f"mismatch-ext: {message}")
        self._log.event(level, name, message, data)
