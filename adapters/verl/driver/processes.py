"""The processes of a run as the driver sees them: what workers and rollout servers run with, before the first step and after.

How the run describes itself, in its banner and in the header of its metrics file, follows from that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from mismatch_ext.adapters.transformers.vocabulary import plain_vocabulary
from mismatch_ext.adapters.verl.driver.reports import (
    Checked,
    check_reports,
    engine_answers,
)
from mismatch_ext.adapters.verl.driver.servers import read_rollouts, refused_answers
from mismatch_ext.adapters.verl.driver.weights import ANSWER_TIMEOUT, RolloutWeights, unverified
from mismatch_ext.adapters.verl.refusals import SYNC
from omegaconf import DictConfig

from mismatch_ext.banner import run_info
from mismatch_ext.checks import Checks
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError
from mismatch_ext.events import WEIGHTS_UNVERIFIED
from mismatch_ext.evidence import trainer_settings
from mismatch_ext.log import RunLog
from mismatch_ext.names import VERL
from mismatch_ext.patching import active_patches
from mismatch_ext.precision.readiness import EVENT as READINESS
from mismatch_ext.rollout import Origins, SamplingSettings
from mismatch_ext.terminal import say_in_run
from mismatch_ext.versions import installed
from mismatch_ext.weights import draw_probes

PACKAGES = ("transformers", "verl", "ray")


class Processes:
    """The actor's workers and the rollout servers of a run; `host` is the name of verl's trainer."""

    log: RunLog

    def __init__(self, config: DictConfig, block: MismatchConfig, checks: Checks, host: str) -> None:
        self._config, self._block, self._checks, self._host = config, block, checks, host
        self._rollout = config.actor_rollout_ref.rollout
        self.origins = Origins(self.sampling)
        self._workers: Any = None
        self._find_replicas: Callable[[], Sequence[Any]] = tuple
        self._probes: torch.Tensor | None = None
        self._checked: Checked | None = None

    @property
    def replicas(self) -> Sequence[Any]:
        """The rollout replicas of the moment: verl may add and remove some between two updates."""
        return self._find_replicas()

    def check(self, workers: Any, find_replicas: Callable[[], Sequence[Any]], tokenizer: Any) -> None:
        """Check that every worker of verl's group and every rollout replica runs the block, in the dtypes that it asks for.

        `find_replicas` is called again whenever the servers are asked something.
        """
        self._workers, self._find_replicas = workers, find_replicas
        longest = int(self._rollout.get("max_model_len") or self._rollout.prompt_length + self._rollout.response_length)
        self._probes = draw_probes(plain_vocabulary(tokenizer), longest - 1)
        self._checked = check_reports(self._block, workers.mismatch_report(), self._read(), self._checks)

    def _read(self) -> Any:
        return read_rollouts(self.replicas, self._block, ANSWER_TIMEOUT)

    def follow_weights(self, step: int) -> None:
        """Note which weights the rollout servers were sent; after the first update, ask each of them.

        Later each rollout says itself which weights sampled it, and probes show whether they arrived.
        """
        present = self.origins.present
        if present is None:
            self.origins.sent(step, engine_answers(enumerate(self._read())))
        else:
            self.origins.present = replace(present, weight_version=step)

    def weights(self, resumed: Mapping[str, Any] | None) -> RolloutWeights | None:
        """Return the check of weight updates, which goes on from a checkpoint's state; None where they are not verified."""
        if self._block.monitor.weight_sync == "off" or self._unverified is not None or self._checked is None:
            return None
        assert self._probes is not None
        checks = RolloutWeights(
            self._workers,
            self._find_replicas,
            self._block.monitor_of_updates,
            self._probes,
            dtype=self._checked.engine.model_dtype,
            trainer_dtype=self._checked.trainer.compute_dtype,
            event=self.event,
            in_flight=str(self._config.trainer.v1.trainer_mode) != SYNC,
        )
        if resumed is not None and (said := checks.load_state_dict(resumed)):
            self.event("warning", "settings_changed", said)
        return checks

    def trainer_settings(self) -> dict[str, Any]:
        """Return how the trainer computes, as the doctor needs it to examine what was kept."""
        if self._checked is None:
            return {"host": "verl"}
        routing = self._block.routing
        return trainer_settings(
            self._checked.trainer,
            host="verl",
            temperature=float(self._rollout.temperature),
            replays=routing is not None and routing.mode == "R3",
        )

    @property
    def experts(self) -> Mapping[str, Any] | None:
        """The MoE layers of the model, by the first worker's report; None without experts."""
        return None if self._checked is None else self._checked.worker.get("moe")

    @property
    def _unverified(self) -> str | None:
        return unverified(self._rollout, self._block.monitor)

    def check_refused(self, what: str, step: int, timeout: float = ANSWER_TIMEOUT) -> None:
        """Raise EngineError if a rollout server refused answers, because verl only drops them; `what` was sampled for a step."""
        try:
            refused = refused_answers(self.replicas, timeout)
        except EngineError as error:  # a server that is busy keeps what it refused until the next question
            self.event("warning", "refusals", f"{what} of step {step}: {error}")
            return
        if refused:
            raise EngineError(f"{what} of step {step}: {refused}")

    def announce(self, step: int) -> None:
        """Open the metrics file, and say what is active, in which peer, and how; step 0 begins a run."""
        self.log.sampled_with(self._scored_sampling)
        self.log.begin(step or None)
        checked = self._checked
        for message in [] if checked is None else checked.readiness:
            self.event("warning", READINESS, message)
        if bypasses(self._config):
            message = "bypass mode takes no pass of the trainer over fresh rollouts, so that the gap is not measured."
            self.event("warning", "bypass", message)
        if self._unverified is not None:
            self.event("warning", WEIGHTS_UNVERIFIED, self._unverified)
        if checked is None:
            say_in_run(
                f"mismatch-ext: the processes could not be checked; what is measured is written to {self.log.run_dir}"
            )
            return
        if (bias := self._scored_sampling.ratio_bias(renormalized=checked.engine.renormalizes)) is not None:
            self.event("warning", "sampling", bias)
        self.log.announce()

    @property
    def sampling(self) -> SamplingSettings:
        """What the rollouts of training batches are to be sampled with."""
        return SamplingSettings(
            temperature=float(self._rollout.temperature),
            top_p=float(self._rollout.top_p),
            top_k=int(self._rollout.top_k),
            # Whatever rollout.repetition_penalty says: verl's agent loops ask for 1.
            repetition_penalty=1.0,
        )

    @property
    def implied_penalty(self) -> float:
        """The repetition penalty of a request that names none: verl's vLLM server then takes the rollout's."""
        penalty = self._rollout.get("repetition_penalty", None)
        return 1.0 if penalty is None or self._rollout.name != "vllm" else float(penalty)

    @property
    def _scored_sampling(self) -> SamplingSettings:
        """The sampling settings that the trainer's log-probabilities ignore: with sampling masks they follow truncation."""
        masked = self._block.sampling_mask is not None
        return self.sampling.without_truncation() if masked else self.sampling

    def info(self) -> dict[str, Any]:
        """Return the header of the run's metrics file."""
        checked = self._checked
        if checked is None:
            return {"config": self._block.to_dict(), "names": VERL.to_dict(), "patches": active_patches()}
        worker, engine, trainer = checked.worker, checked.engine, self._config.trainer
        header = run_info(
            self._block,
            dataclasses.replace(VERL, next_rate=not self._block.acts or not logs_applied_rate(worker)),
            name=f"{trainer.project_name}/{trainer.experiment_name}",
            host=f"verl {installed('verl')} {self._host}",
            model=str(self._config.actor_rollout_ref.model.path),
            model_type=str(worker.get("model_type", "")),
            parameters=sum(checked.trainer.parameter_dtypes.values()),
            device=str(checked.trainer.device),
            seed=int(self._rollout.seed),
            trainer=checked.trainer,
            engine=engine,
            sampling=self.sampling,
            more={
                "worker": {
                    key: worker[key] for key in ("engine", "strategy", "loss", "versions", "moe") if key in worker
                }
            },
            patches=[*active_patches(), *worker.get("patches", []), *checked.patches],
            audit=checked.audit,
            packages=(*PACKAGES, engine.engine),
        )
        present = self.origins.present
        return header if present is None else header | {"provenance": dataclasses.asdict(present)}

    def event(self, level: str, name: str, message: str, data: dict[str, Any] | None = None) -> None:
        """Print an event's message, and write the event into the run's metrics file."""
        say_in_run(f"mismatch-ext: {message}")
        self.log.event(level, name, message, data)


def bypasses(config: DictConfig) -> bool:
    """Tell whether the engine's log-probabilities are used as the old policy's, so that the trainer computes none."""
    correction = config.algorithm.get("rollout_correction")
    return bool(correction is not None and correction.get("bypass_mode"))


def logs_applied_rate(report: Mapping[str, Any]) -> bool:
    """Return whether `actor/lr` is the rate that an update applied, by a worker's report; stock engines log the next update's."""
    steered = report["lr"] is not None
    return steered or (report["strategy"] != "megatron" and report["trainer"]["scaler"] is not None)
