"""The two sides of a TRL trainer, its model and its engine: they are read back, audited and reported."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from mismatch_ext.adapters.accelerate.deepspeed import configured, forget_order, reduce_in_float32
from mismatch_ext.adapters.accelerate.float16 import compute_in_float16
from mismatch_ext.adapters.accelerate.ranks import AcceleratorRanks
from mismatch_ext.adapters.accelerate.sharded import gathered, held, is_sharded, same_everywhere
from mismatch_ext.adapters.torch.shards import reshard
from mismatch_ext.adapters.transformers import read_trainer, score_tokens
from mismatch_ext.adapters.transformers.alarms import AlarmCallback
from mismatch_ext.adapters.trl.generation import TrainerSide
from mismatch_ext.adapters.trl.integration import FIXES, info_of
from mismatch_ext.adapters.trl.refusals import check_device
from torch import Tensor, nn

from mismatch_ext.config import MismatchConfig
from mismatch_ext.log import RunLog, run_folder
from mismatch_ext.names import TRL
from mismatch_ext.precision.audit import AuditReport, EngineReading, SyncReading, TrainerReading, audit
from mismatch_ext.precision.dtypes import PrecisionPolicy
from mismatch_ext.precision.readiness import check_readiness
from mismatch_ext.ranks import Ranks
from mismatch_ext.rollout import SamplingSettings
from mismatch_ext.verdicts import Verdicts

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Host
else:
    _Host = object


class SidesMixin(_Host):
    """What every trainer with a block does to know its two sides; a subclass says what engine it has, and what it refuses."""

    _block: MismatchConfig | None
    _verdicts: Verdicts
    _ranks: Ranks
    _log: RunLog
    _alarms: AlarmCallback
    _sampling: SamplingSettings
    _readings: dict[str, Any]
    _patches: list[dict[str, Any]]
    _audit_report: AuditReport | None = None
    _sync_audited = False
    _unwritten: list[str]
    # Whether TRL's constructor is running.
    _constructing = False
    # A warning about the weights, kept until there is a run to log it in.
    _readiness: str | None = None
    model: nn.Module

    if TYPE_CHECKING:

        def _check_sharding(self) -> None:
            """Refuse sections that do not work with sharded parameters."""

        def _check_model(self) -> None:
            """Refuse a model that the block does not fit, when TRL has loaded it and not yet started its engine."""

        def _read_engine(self) -> EngineReading | None:
            """Return what the engine computes with; None where one model samples and trains."""

    @property
    def _config(self) -> MismatchConfig:
        """The block with the sections that act, for methods that run only with one."""
        assert self._block is not None
        return self._block

    def _open_log(self, output_dir: str) -> None:
        """Prepare the run's log, and the callback that raises its alarms."""
        self._ranks = AcceleratorRanks(PartialState())
        self._log = RunLog(
            self._config,
            run_folder(self._config.monitor, Path(output_dir)),
            info=self._info,
            step=lambda: self.state.global_step,
            names=TRL,
            ranks=self._ranks,
            verdicts=self._verdicts,
        )
        self._alarms = AlarmCallback(lambda: self._log)
        self._unwritten = []

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, with a loss scaler that is on wherever float16 was asked for, and check the model.

        accelerate leaves autocast and scaler off for float16 on a CPU, and elsewhere builds a scaler with torch's
        defaults.
        """
        super().create_accelerator_and_postprocess()
        if self._block is None:
            return
        with self._verdicts.checking("device"):
            check_device(self.accelerator.device.type, self._config, engine=bool(getattr(self, "use_vllm", True)))
        with self._verdicts.checking("sharding"):
            self._check_sharding()
        precision = self._config.precision
        if precision is not None and precision.dtype == "float16":
            if self.is_deepspeed_enabled:
                reduce_in_float32(configured(self.accelerator))  # the rest of float16 is DeepSpeed's own
            else:
                compute_in_float16(self.accelerator, precision)
        if self._constructing:
            self._check_model()

    def _check_precision(self) -> None:
        """Refuse a trainer that does not compute as asked, and scan its weights, before there is an engine."""
        if self._config.precision is None:
            return
        policy = PrecisionPolicy.of(self._config.precision)
        audit(policy, self._read_trainer(), None, None, FIXES).raise_for_findings()
        # On the device that the model is going to: its weights are still in the host's memory, where a scan is slow.
        parameters = gathered(self.accelerator.unwrap_model(self.model), self.accelerator.device)
        self._readiness = check_readiness(parameters, self._config.precision)

    def _audit(self, sync: SyncReading | None = None) -> None:
        """Read both sides' dtypes back, and refuse those that are not as asked."""
        trainer = self._read_trainer()
        self._readings = {"trainer": trainer}
        engine = self._read_engine()
        if engine is None:
            return
        self._readings["engine"] = engine
        if self._config.precision is None:
            return
        policy = PrecisionPolicy.of(self._config.precision)
        self._audit_report = audit(policy, trainer, engine, sync, FIXES)
        self._audit_report.raise_for_findings()

    def _read_trainer(self) -> TrainerReading:
        return read_trainer(self.model, self.accelerator.autocast, self.accelerator.scaler, self.accelerator.device)

    def _compute_dtype(self) -> str:
        """Return the dtype that the trainer's matrix products come out in, as read back."""
        reading: TrainerReading = self._readings["trainer"]
        return reading.compute_dtype

    def _trainer_side(self) -> TrainerSide:
        """Return what the check of weight updates needs to know of this trainer."""
        return TrainerSide(
            named_parameters=lambda: held(self.accelerator.unwrap_model(self.model)),
            everywhere=same_everywhere(self.accelerator),
            # DeepSpeed casts the model when training begins.
            prepared=not is_sharded(self.accelerator) and not self.is_deepspeed_enabled,
            score=self._score,
            step=lambda: self.state.global_step,
            on_sent=self._on_sent,
            event=self._on_event,
            compute_dtype=self._compute_dtype(),
            ranks=self._ranks,
            examines=lambda: self._log.doctor is not None and self._log.doctor.due,
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        return self.accelerator.autocast() if self.accelerator.native_amp else nullcontext()

    def _score(self, token_ids: Tensor) -> Tensor:
        """Return the trainer's log-probabilities of probe tokens, at temperature 1."""
        model = self.accelerator.unwrap_model(self.model)
        scores = score_tokens(model, token_ids, self._autocast)
        reshard(model)  # a weight update sends shards, and FSDP2 keeps whole weights for a backward pass
        forget_order(self.accelerator)
        return scores

    def _on_sent(self, dtypes: frozenset[str]) -> None:
        """Audit both sides once more at the first weight update, with the dtypes that went over."""
        if not self._sync_audited:
            self._sync_audited = True
            received = self._readings["engine"].model_dtype
            for sent in sorted(dtypes):
                self._audit(SyncReading(sent_dtype=sent, received_dtype=received))

    def _on_event(self, level: str, name: str, message: str) -> None:
        """Write what is wrong with a weight update, which every rank with a part in it verifies."""
        if self.accelerator.is_main_process:
            self._log.event(level, name, message)
        else:
            self._unwritten.append(message)  # the main process writes it at the next log
        if self._config.monitor.weight_sync == "warn":
            warnings.warn(message, stacklevel=2)

    def _warn(self, name: str, message: str, data: dict[str, Any] | None = None) -> None:
        """Warn, and keep the warning in the run's metrics file."""
        warnings.warn(message, stacklevel=3)
        self._log.event("warning", name, message, data)

    def _info(self) -> dict[str, Any]:
        return info_of(self, self._readings, self._patches, self._audit_report)
