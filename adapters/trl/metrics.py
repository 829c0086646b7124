"""What is logged beside TRL's own metrics, and written with them to the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from mismatch_ext.adapters.accelerate.deepspeed import scale_metrics
from mismatch_ext.adapters.transformers.lr import LrCallback
from mismatch_ext.adapters.trl.generation import CheckedGeneration
from mismatch_ext.adapters.trl.readings import ratio_bias
from mismatch_ext.adapters.trl.sides import SidesMixin

from mismatch_ext.names import PREFIX
from mismatch_ext.precision.scaler import LossScaler
from mismatch_ext.rollout import SamplingSettings
from mismatch_ext.routing.agreement import of_layer
from mismatch_ext.weights import SyncVerdict


class LoggingMixin(SidesMixin):
    """Overrides `log`; a subclass says what is measured."""

    _lr: LrCallback | None
    # The evaluation that runs, as its metrics are kept apart.
    _eval_split = "eval/default"
    _bias_told = False

    if TYPE_CHECKING:

        @property
        def _verdict(self) -> SyncVerdict | None:
            """The verdict on the last weight update, if any was verified."""

        def _extra_metrics(self, split: str, of_training: bool) -> tuple[dict[str, float], dict[str, float]]:
            """Return what is logged beside TRL's own metrics, and what is written only to the metrics file.

            Args:
                split: "train" or "eval/<name>".
                of_training: Whether it is the log of training steps.
            """

        def _further_metrics(self) -> dict[str, float]:
            """Return metrics of training steps that only this trainer has, such as weight updates', without their prefix."""

        def _ratio_bias(self) -> str | None:
            """Say why the gap is not only numerics."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with the mismatch metrics added, and write the same numbers to the run directory."""
        if self._block is None:
            super().log(logs, start_time)
            return
        training = self.model.training
        split, prefix = ("train", "") if training else (self._eval_split, "eval_")
        step = self.state.global_step
        extra, by_layer = dict[str, float](), dict[str, float]()
        ended = "train_runtime" in logs or (not training and any(name.endswith("_runtime") for name in logs))
        if "loss" in logs or ended:
            # The host's own, of a step, an evaluation or the end: a user's may be on the main process alone.
            extra, by_layer = self._extra_metrics(split, training and "loss" in logs)
        logs.update({prefix + name: value for name, value in extra.items()})
        super().log(logs, start_time)
        names = {name.removeprefix(prefix): value for name, value in logs.items()}
        with self._verdicts.checking("metrics"):
            if training or extra:  # evaluation leaves the model in its mode, and TRL logs the end of training then too
                self._log.write(step, names | by_layer, split)
            bias = self._ratio_bias()
            if extra and bias is not None and not self._bias_told:
                self._bias_told = True
                self._warn("ratio_bias", bias)

    def _training_metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if isinstance(self.accelerator.scaler, LossScaler):
            metrics |= self.accelerator.scaler.metrics()
        metrics |= self._further_metrics()
        if self._lr is not None:
            metrics |= self._lr.metrics()
        return prefixed(metrics)


class MetricsMixin(LoggingMixin):
    """What GRPO's and RLOO's trainers log."""

    vllm_generation: CheckedGeneration  # type: ignore[assignment]  # around TRL's own

    if TYPE_CHECKING:

        @property
        def _scored_sampling(self) -> SamplingSettings: ...
        def _routing_agreement(self, split: str) -> dict[str, float]: ...
        def _other_passes(self, split: str) -> dict[str, float]: ...
        def _examined_metrics(self) -> dict[str, float]: ...

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Evaluate as TRL does; the gap on each evaluation set is kept apart."""
        if self._block is None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        outer = self._eval_split
        self._eval_split = "eval/" + (metric_key_prefix.removeprefix("eval").removeprefix("_") or "default")
        try:
            with self._verdicts.around("metrics", self._log.evaluation(self.state.global_step)):
                return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._eval_split = outer

    def _extra_metrics(self, split: str, of_training: bool) -> tuple[dict[str, float], dict[str, float]]:
        extra: dict[str, float] = {}
        agreement: dict[str, float] = {}
        # Each collective in a check of its own: a rank on which one fails still takes part in the others.
        with self._verdicts.checking("findings"):
            self._verdicts.gather(self._ranks)
        with self._verdicts.checking("metrics"):
            extra = self._log.flush(split, self.state.global_step)
        with self._verdicts.checking("metrics"):
            agreement = self._routing_agreement(split)
        logged, by_layer = of_agreement(agreement)
        extra |= logged
        if extra or of_training:
            with self._verdicts.checking("metrics"):
                extra |= prefixed(self._other_passes(split))
        if of_training:
            with self._verdicts.checking("metrics"):
                extra |= self._examined_metrics()
            with self._verdicts.checking("metrics"):
                extra |= self._training_metrics()
            extra |= prefixed(self._verdicts.metrics())
        return extra, by_layer

    def _ratio_bias(self) -> str | None:
        return ratio_bias(self, self._scored_sampling)

    def _further_metrics(self) -> dict[str, float]:
        metrics = scale_metrics(self.accelerator) if self.is_deepspeed_enabled else {}
        # Where a failed check does not end the run, a rank may have no verdict.
        lone = self._verdicts.observes and self.use_vllm and self._config.monitor.weight_sync != "off"
        if self._verdict is not None or (lone and self.accelerator.num_processes > 1):
            gap = self._sync_gap_over_ranks(None if self._verdict is None else self._verdict.gap_mean)
            metrics |= {} if gap is None else {"weight_sync_gap": gap}
        if self._rounding is not None:
            metrics["lora_rounding"] = self._rounding
        return metrics

    def _sync_gap_over_ranks(self, gap: float | None) -> float | None:
        """Return the largest gap of the ranks' engines, and write what the check has found on the others."""
        if self.accelerator.num_processes == 1:
            return gap
        found = gather_object([(gap, self._unwritten)])
        for rank, (_, messages) in enumerate(found):
            for message in messages:
                self._log.event("error", "weight_sync", f"rank {rank}: {message}")
        self._unwritten = []
        return max((float(value) for value, _ in found if value is not None), default=None)

    @property
    def _verdict(self) -> SyncVerdict | None:
        """The last weight update's, if any was verified."""
        checked = self.vllm_generation if self.use_vllm else None
        return checked.verifier.verdict if isinstance(checked, CheckedGeneration) else None

    @property
    def _rounding(self) -> float | None:
        """What rounding to the engine's grid did to LoRA adapters in the last weight update; None where none were merged."""
        checked = self.vllm_generation if self.use_vllm else None
        base = checked.base if isinstance(checked, CheckedGeneration) else None
        return None if base is None else base.rounding


def prefixed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under the names that they are logged by."""
    return {PREFIX + name: value for name, value in metrics.items()}


def of_agreement(agreement: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return what is logged of the agreement of routes, and what is written only to the metrics file."""
    by_layer = {name: value for name, value in agreement.items() if of_layer(name)}
    return prefixed({name: value for name, value in agreement.items() if name not in by_layer}), prefixed(by_layer)
