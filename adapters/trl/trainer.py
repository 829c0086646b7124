"""GRPOTrainer with the `mismatch:` block.

Order of a rollout through this file: `_generate_and_score_completions` (engine -> records -> gap), `log` (metrics ->
loggers and run directory), `train` (what happens when something fails).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.transformers import read_trainer, score_tokens, vocabulary_surplus
from mismatch_ext.adapters.trl.banner import banner, run_header
from mismatch_ext.adapters.trl.config import MismatchGRPOConfig
from mismatch_ext.adapters.trl.generation import CheckedGeneration, TrainerSide
from mismatch_ext.adapters.trl.host import (
    EngineRefusals,
    plain_vocabulary,
    ratio_bias,
    sampling_settings,
    step_of_checkpoint,
)
from mismatch_ext.adapters.trl.recorder import PREFIX, RunRecorder, ensure_writable
from mismatch_ext.patches.trl.engine_arguments import engine_arguments
from mismatch_ext.patches.vllm.cpu_moe_repack import CPU_MOE_REPACK
from torch import Tensor
from trl import GRPOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import (
    ConfigError,
    MismatchError,
    PrecisionError,
    ReadinessError,
    RecordError,
    RunDirectoryError,
)
from mismatch_ext.patching import applied
from mismatch_ext.precision.audit import AuditReport, SyncReading, audit
from mismatch_ext.precision.policy import PrecisionPolicy
from mismatch_ext.precision.readiness import ReadinessReport, scan_weights
from mismatch_ext.precision.scaler import LossScaler
from mismatch_ext.records import collate
from mismatch_ext.versions import require
from mismatch_ext.weight_sync import SyncVerdict

logger = logging.getLogger(__name__)

STATE_FILE = "mismatch.json"
FORWARD_KEYS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


if TYPE_CHECKING:

    class _Host(GRPOTrainer):
        """What the mixin is mixed into, for type checkers only."""

        vllm_generation: Any

else:
    _Host = object


class MismatchTrainerMixin(_Host):
    """Adds the `mismatch:` block to a GRPOTrainer or to a subclass of one.

    Put it first among the bases: `class MyTrainer(MismatchTrainerMixin, MyGRPOTrainer): ...`. Without a block every
    method passes straight on.
    """

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        config: Any = kwargs.get("args") or next((a for a in args if isinstance(a, MismatchGRPOConfig)), None)
        self._block: MismatchConfig | None = config.mismatch_block() if isinstance(config, MismatchGRPOConfig) else None
        if self._block is None:
            super().__init__(model, *args, **kwargs)
            return
        for peer in ("torch", "transformers", "accelerate", "trl", "vllm"):
            require(peer)
        self._run_dir = Path(self._config.monitor.run_dir or Path(config.output_dir) / "mismatch")
        ensure_writable(self._run_dir)
        self._eval_split = "eval/default"
        self._audit_report: AuditReport | None = None
        self._verdict: SyncVerdict | None = None
        self._sync_audited = False
        self._saved_step = 0
        patched = applied(*self._construction_patches(config))
        with config.claimed(), patched as patches, EngineRefusals(self._config):
            super().__init__(model, *args, **kwargs)
            self._patches, patch_digest = patches.describe(), patches.digest
        self._begin(patch_digest)

    @property
    def _config(self) -> MismatchConfig:
        """The block, for methods that run only with one."""
        assert self._block is not None
        return self._block

    # Construction: what must hold before the first step.

    def _construction_patches(self, config: MismatchGRPOConfig) -> list[Any]:
        """Return the patches that are active while TRL builds its engine."""
        arguments: dict[str, Any] = {}
        patches = []
        if self._config.precision is not None:
            arguments["dtype"] = self._config.precision.dtype
        if config.device.type == "cpu":
            # Compiling costs a CPU engine far more at its start than it saves in a short run.
            arguments["enforce_eager"] = True
            # Active at each weight update; applied here too, so that it is checked before the engine is built.
            patches.append(CPU_MOE_REPACK)
        return [engine_arguments(arguments), *patches] if arguments else patches

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, with a loss scaler that is on wherever float16 was asked for.

        accelerate leaves autocast and scaler off for float16 on a CPU, and elsewhere builds a scaler with torch's
        defaults.
        """
        super().create_accelerator_and_postprocess()
        precision = self._block.precision if self._block is not None else None
        if precision is None or precision.dtype != "float16":
            return
        if self.is_deepspeed_enabled:
            raise PrecisionError(
                "mismatch.precision.dtype='float16' with DeepSpeed: DeepSpeed keeps a loss scaler of its own that "
                "cannot be audited here; use DDP or FSDP2, or set fp16 in the DeepSpeed config without "
                "mismatch.precision."
            )
        self.accelerator.native_amp = True
        self.accelerator.scaler = LossScaler(self.accelerator.device.type, **dataclasses.asdict(precision.loss_scale))

    def _begin(self, patch_digest: str) -> None:
        """Audit both sides, wrap the engine, and say what is active."""
        self._sampling = sampling_settings(self)
        self._recorder = RunRecorder(
            self._run_dir,
            monitor=self._config.monitor,
            sampling=self._sampling,
            header=self._header,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )
        self._audit()
        self._scan_readiness()
        if self._config.monitor.weight_sync != "off" and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ConfigError(
                f"mismatch.monitor.weight_sync={self._config.monitor.weight_sync!r} with sharded parameters (FSDP or "
                "DeepSpeed): this release verifies weights of unsharded models only; set mismatch.monitor.weight_sync='off' "
                "to go on unverified."
            )
        vocabulary = plain_vocabulary(self._tokenizer, self.accelerator.device)
        self.vllm_generation = CheckedGeneration(
            self.vllm_generation,
            trainer=TrainerSide(
                named_parameters=lambda: self.accelerator.unwrap_model(self.model).named_parameters(),
                score=self._score,
                step=lambda: self.state.global_step,
                on_sent=self._on_sent,
                on_verdict=self._on_verdict,
                compute_dtype=self._compute_dtype(),
            ),
            monitor=self._config.monitor,
            sampling=self._sampling,
            vocabulary=vocabulary,
            patch_digest=patch_digest,
        )
        self._check_vocabulary(vocabulary)
        if self.accelerator.is_main_process:
            print(banner(self._config, self._header(), self._run_dir), flush=True)

    def _audit(self, sync: SyncReading | None = None) -> None:
        """Read both sides' dtypes back; refuse what is not as asked."""
        trainer = read_trainer(self.model, self.accelerator.autocast, self.accelerator.scaler, self.accelerator.device)
        reading = engine.read_engine(self.vllm_generation.llm)
        self._readings = {"trainer": trainer, "engine": reading}
        if self._config.precision is None:
            return
        policy = PrecisionPolicy(self._config.precision.dtype)
        self._audit_report = audit(policy, trainer, reading, sync)
        self._audit_report.raise_for_findings()

    def _scan_readiness(self) -> None:
        """Check that the weights fit the dtype that both sides will compute in."""
        precision = self._config.precision
        if precision is None or precision.readiness == "off":
            return
        weights = scan_weights(self.accelerator.unwrap_model(self.model).named_parameters(), precision.dtype)
        report = ReadinessReport.of(weights=weights, activations=[], dtype=precision.dtype)
        if report.verdict == "not ready":
            message = f"the checkpoint is not ready for {precision.dtype}: {'; '.join(report.reasons)}"
            if precision.readiness == "error":
                raise ReadinessError(f"{message}. Use another dtype, or set mismatch.precision.readiness='warn'.")
            self._warn("readiness", message)
        elif report.verdict == "risky":
            self._warn("readiness", f"the checkpoint is risky in {precision.dtype}: {'; '.join(report.reasons)}")

    def _warn(self, name: str, message: str, data: dict[str, Any] | None = None) -> None:
        """Warn, and keep the warning in the run's metrics file."""
        warnings.warn(message, stacklevel=3)
        self._recorder.event(self.state.global_step, "warning", name, message, data)

    def _compute_dtype(self) -> str:
        """Return the dtype that the trainer's matrix products come out in, as read back."""
        reading = self._readings["trainer"]
        return reading.autocast_dtype or max(reading.parameter_dtypes, key=reading.parameter_dtypes.__getitem__)

    def _check_vocabulary(self, vocabulary: Tensor) -> None:
        probes = vocabulary[None, :64]
        model = self.accelerator.unwrap_model(self.model)
        surplus = vocabulary_surplus(model, len(self._tokenizer), probes, self._autocast)
        if surplus is not None:
            self._warn("vocabulary", str(surplus), vars(surplus))

    def _header(self) -> dict[str, Any]:
        return run_header(self, self._readings, self._patches, self._audit_report)

    # One rollout batch.

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate, then measure the gap between the engine's log-probabilities and the trainer's."""
        output = super()._generate_and_score_completions(inputs)
        if self._block is None:
            return output
        self._check_records(output)
        mask = output["completion_mask"]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        split = "train" if self.model.training else self._eval_split
        self._recorder.observe(split, self._old_logprobs(output), output["sampling_per_token_logps"], mask.bool())
        return output

    def _check_records(self, output: dict[str, Any]) -> None:
        """Refuse rollouts that are not of the present weights, or are not the tokens being trained on."""
        records = self.vllm_generation.take_records()
        if len(records) != len(output["completion_ids"]):
            # Tools or a rollout_func stitch several generations into one completion.
            if not getattr(self, "_stitched_told", False):
                self._stitched_told = True
                message = "completions are stitched from several generations; their tokens are not compared with the engine's."
                self._recorder.event(self.state.global_step, "info", "records", message)
            return
        batch = collate(records, pad_token_id=self._tokenizer.pad_token_id)
        if batch.provenance.weight_version != self.vllm_generation.weight_version:
            raise RecordError(
                f"rollouts of weight version {batch.provenance.weight_version}, but the engine is at "
                f"{self.vllm_generation.weight_version}; generate again after the weight update."
            )
        trained = output["completion_ids"][:, : batch.response_ids.shape[1]].cpu()
        mask = batch.response_mask
        if not torch.equal(trained[mask], batch.response_ids[mask]):
            row = int(((trained != batch.response_ids) & mask).any(1).nonzero()[0])
            raise RecordError(f"row {row}: the tokens to be trained on are not those that the engine sampled.")

    def _old_logprobs(self, output: dict[str, Any]) -> Tensor:
        """Return the trainer's log-probabilities at sampling time `[B, T]`, as TRL computed them if it did."""
        if "old_per_token_logps" in output:
            return output["old_per_token_logps"]
        completion_ids = output["completion_ids"]
        # TRL skips this forward when importance sampling is off; measuring must then not move its random numbers.
        with torch.no_grad(), torch.random.fork_rng():
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], completion_ids], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                completion_ids.size(1),
                batch_size=self.args.per_device_train_batch_size,
                **{key: output[key] for key in FORWARD_KEYS if key in output},
            )
        return logps

    def _autocast(self) -> AbstractContextManager[Any]:
        return self.accelerator.autocast() if self.accelerator.native_amp else nullcontext()

    def _score(self, token_ids: Tensor) -> Tensor:
        return score_tokens(self.accelerator.unwrap_model(self.model), token_ids, self._autocast)

    def _on_sent(self, dtypes: frozenset[str]) -> None:
        """Audit both sides once more at the first weight update, with the dtypes that went over."""
        if not self._sync_audited:
            self._sync_audited = True
            received = self.vllm_generation.reading.model_dtype
            for sent in sorted(dtypes):
                self._audit(SyncReading(sent_dtype=sent, received_dtype=received))

    def _on_verdict(self, verdict: SyncVerdict) -> None:
        self._verdict = verdict
        if verdict.status in ("stale", "garbled"):
            self._recorder.event(self.state.global_step, "error", "weight_sync", verdict.message)
            if self._config.monitor.weight_sync == "warn":
                warnings.warn(verdict.message, stacklevel=2)

    # Metrics.

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Evaluate as TRL does; the gap on each evaluation set is kept apart."""
        if self._block is not None:
            self._recorder.start()
        outer = getattr(self, "_eval_split", "")
        self._eval_split = "eval/" + (metric_key_prefix.removeprefix("eval").removeprefix("_") or "default")
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._eval_split = outer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with the mismatch metrics added, and write the same numbers to the run directory."""
        if self._block is None:
            super().log(logs, start_time)
            return
        training = self.model.training
        split, prefix = ("train", "") if training else (self._eval_split, "eval_")
        step = self.state.global_step
        extra = self._recorder.flush(split, step)
        if training and "loss" in logs:
            extra |= self._training_metrics()
        logs.update({prefix + name: value for name, value in extra.items()})
        super().log(logs, start_time)
        names = {name.removeprefix(prefix): value for name, value in logs.items()}
        if training or extra:  # evaluation leaves the model in its mode, and TRL logs the end of training then too
            self._recorder.step(split, step, names)
        bias = ratio_bias(self, self._sampling)
        if extra and bias is not None and not getattr(self, "_bias_told", False):
            self._bias_told = True
            self._warn("ratio_bias", bias)

    def _training_metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if isinstance(self.accelerator.scaler, LossScaler):
            metrics |= {PREFIX + name: value for name, value in self.accelerator.scaler.metrics().items()}
        if self._verdict is not None:
            metrics[PREFIX + "weight_sync_gap"] = self._verdict.gap_mean
        return metrics

    # Failure, checkpoint and resume.

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; when one of our checks or the engine fails, save the training state first."""
        if self._block is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        self._recorder.start(step_of_checkpoint(resume_from_checkpoint, self.args.output_dir))
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            if isinstance(error, MismatchError):
                self._rescue(error)
            with contextlib.suppress(RunDirectoryError):  # a full disk must not take the place of the error in flight
                self._end("failed", f"{type(error).__name__}: {error}")
            raise
        self._end("completed")
        return result

    def _end(self, status: str, message: str = "") -> None:
        """Write what was measured since the last log, and how training ended."""
        step = self.state.global_step
        # With several ranks merging is collective, and after a failure the others may not be here.
        if self.accelerator.num_processes == 1 and (left := self._recorder.flush("train", step)):
            self._recorder.step("train", step, left)
        self._recorder.end(step, status, message)

    def _rescue(self, error: MismatchError) -> None:
        """Save a checkpoint of the last finished step, unless this run has saved that step."""
        step = self.state.global_step
        path = Path(self.args.output_dir) / f"checkpoint-{step}"
        if step == 0 or self.accelerator.num_processes > 1:
            # With several ranks a save is collective, and the others may not have failed.
            return
        if self._saved_step != step:
            try:
                self._save_checkpoint(self.model, trial=None)
            except Exception as failure:  # noqa: BLE001 - whatever it is, the first error is the one to raise
                error.add_note(f"The training state of step {step} could not be saved in {path}: {failure}")
                return
        error.add_note(
            f"The training state of step {step} is in {path}; resume with resume_from_checkpoint={str(path)!r}."
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._block is None or not self.args.should_save:
            return
        path = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}" / STATE_FILE
        path.write_text(json.dumps({"schema": 1, **self.vllm_generation.state_dict()}), encoding="utf-8")
        self._saved_step = self.state.global_step

    def _load_scaler(self, checkpoint: str | None) -> None:
        super()._load_scaler(checkpoint)
        if self._block is None or checkpoint is None:
            return
        state_file = Path(checkpoint) / STATE_FILE
        if state_file.is_file():
            self.vllm_generation.load_state_dict(json.loads(state_file.read_text(encoding="utf-8")))
        # The run starts where this checkpoint stands: a failure before its first step has nothing new to save.
        self._saved_step = step_of_checkpoint(checkpoint, self.args.output_dir) or 0
        precision = self._config.precision
        if precision is not None and precision.dtype == "float16" and not (Path(checkpoint) / "scaler.pt").is_file():
            self._recorder.event(
                self.state.global_step,
                "warning",
                "loss_scale",
                f"{checkpoint} holds no loss-scaler state; the loss scale starts at {precision.loss_scale.init_scale:g}.",
            )


class MismatchGRPOTrainer(MismatchTrainerMixin, GRPOTrainer):
    """Drop-in `GRPOTrainer` that takes a `MismatchGRPOConfig`."""
