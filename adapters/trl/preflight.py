"""What must hold before the first step: dtypes read back on both sides, weights that fit, an engine that can be checked."""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from accelerate.utils import is_peft_model
from mismatch_ext.adapters.accelerate.deepspeed import configured, forget_order, read_deepspeed, reduce_in_float32
from mismatch_ext.adapters.accelerate.float16 import compute_in_float16
from mismatch_ext.adapters.accelerate.sharded import ZERO3, gathered, held, is_sharded, same_everywhere, zero_stage
from mismatch_ext.adapters.transformers import read_trainer, score_tokens, vocabulary_surplus
from mismatch_ext.adapters.transformers.alarms import AlarmCallback
from mismatch_ext.adapters.transformers.scoring import logits_width
from mismatch_ext.adapters.transformers.vocabulary import plain_vocabulary
from mismatch_ext.adapters.trl.arrival import sections_in_loss
from mismatch_ext.adapters.trl.clipping import clips_engine_ratio, coarse_engine
from mismatch_ext.adapters.trl.config import MismatchGRPOConfig
from mismatch_ext.adapters.trl.correction import CorrectionTerm
from mismatch_ext.adapters.trl.engine_masks import EngineMasks
from mismatch_ext.adapters.trl.engines import Colocated, Engine
from mismatch_ext.adapters.trl.examining import check_examinable
from mismatch_ext.adapters.trl.generation import CheckedGeneration, TrainerSide
from mismatch_ext.adapters.trl.integration import FIXES, INTEGRATION, info_of
from mismatch_ext.adapters.trl.lora import Base, check_base
from mismatch_ext.adapters.trl.readings import sampling_settings
from mismatch_ext.adapters.trl.refusals import RoutingRefusals, check_reference, check_sharding
from mismatch_ext.adapters.trl.replay import ScoreReplay
from mismatch_ext.adapters.trl.served import Served
from mismatch_ext.adapters.trl.server_checks import ServerCheck
from mismatch_ext.adapters.trl.server_client import ClientOf
from mismatch_ext.adapters.vllm.engine import asked_of
from mismatch_ext.adapters.vllm.routing import FLAG
from mismatch_ext.patches.torch.checkpoint import CHECKPOINTS
from mismatch_ext.patches.trl.engine_arguments import engine_arguments
from mismatch_ext.patches.trl.fused_head import FUSED_HEAD
from mismatch_ext.patches.trl.own_loss import OWN_LOSS
from mismatch_ext.patches.trl.server_client import SERVER_CLIENT
from mismatch_ext.patches.vllm.cpu_moe_repack import cpu_moe_repack
from mismatch_ext.patches.vllm.cpu_routes import cpu_routes_patches
from mismatch_ext.patches.vllm.top_logprobs import top_logprobs
from torch import Tensor, nn

from mismatch_ext.config import MismatchConfig, MonitorConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.patching import Patch
from mismatch_ext.precision.audit import AuditReport, EngineReading, SyncReading, TrainerReading, audit
from mismatch_ext.precision.policy import PrecisionPolicy
from mismatch_ext.precision.readiness import EVENT as READINESS
from mismatch_ext.precision.readiness import check_readiness
from mismatch_ext.records import SamplingSettings
from mismatch_ext.run.log import RunLog
from mismatch_ext.verdicts import Verdicts
from mismatch_ext.weight_sync import SyncVerdict

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Host
else:
    _Host = object


class PreflightMixin(_Host):
    """Builds and checks both sides; `MismatchTrainerMixin` holds what happens from then on."""

    _block: MismatchConfig | None
    # The sections that may change something: under `observe` none.
    _acting: MismatchConfig
    _sampling: SamplingSettings
    _verdicts: Verdicts
    _watched_routing: ScoreReplay | None
    _log: RunLog
    _readings: dict[str, Any]
    _patches: list[dict[str, Any]]
    _audit_report: AuditReport | None
    _sync_audited: bool
    _unwritten: list[str]
    _routing: ScoreReplay | None
    # Token ids that are still to be held against the model's vocabulary.
    _vocabulary: Tensor | None
    # Whether TRL's constructor runs; what is to be warned of the weights, once there is a run to warn in.
    _constructing = False
    _readiness: str | None = None
    _engine: Engine
    # What of a server cannot be checked.
    _unchecked: str | None = None
    _alarms: AlarmCallback
    _correction: CorrectionTerm | None
    vllm_generation: CheckedGeneration  # type: ignore[assignment]  # around TRL's own
    model: nn.Module

    @property
    def _config(self) -> MismatchConfig:
        """The block, for methods that run only with one."""
        assert self._block is not None
        return self._block

    def _construction_patches(self, config: MismatchGRPOConfig) -> list[Patch]:
        """Return the patches that are active while TRL builds its engine."""
        r3 = self._config.routing is not None and self._config.routing.mode == "R3"
        if config.use_vllm and config.vllm_mode == "server":
            # What a server computes in is in its own command, which is checked.
            return [] if self._verdicts.observes else [SERVER_CLIENT.calling(ClientOf(ServerCheck(self._config)))]
        if self._verdicts.observes:
            # Recording copies the ids beside the computation, and changes no number of it.
            records = r3 and config.use_vllm and config.vllm_tensor_parallel_size == 1
            return [engine_arguments({FLAG: True}, optional=True)] if records else []
        if not config.use_vllm:
            return []
        arguments: dict[str, Any] = {}
        given: Any = config.generation_kwargs  # a mapping, since the configuration has settled
        patches: list[Patch] = []
        if self._config.precision is not None:
            arguments |= asked_of(self._config.precision)
        if r3:
            arguments[FLAG] = True
        if self._config.sampling_mask is not None:
            # The sampled token comes besides.
            arguments["max_logprobs"] = self._config.sampling_mask.asked(sampling_settings(config, given))
        if config.device.type == "cpu":
            # Compiling costs a CPU engine far more at its start than it saves in a short run.
            arguments["enforce_eager"] = True
            patches = cpu_routes_patches() if FLAG in arguments else []
        return [engine_arguments(arguments), *patches] if arguments else []

    def _step_patches(self, config: MismatchGRPOConfig) -> list[Patch]:
        """Return the patches that come and go in each step: around losses, replayed forward passes and weight updates."""
        if self._verdicts.observes:
            return []
        patches = [OWN_LOSS] if self._config.kl is not None or sections_in_loss(self._config) else []
        patches += CHECKPOINTS if self._config.routing is not None else ()
        patches += [FUSED_HEAD, *top_logprobs()] if self._config.sampling_mask is not None else []
        here = config.use_vllm and config.vllm_mode == "colocate"
        return [*patches, *(cpu_moe_repack() if here and config.device.type == "cpu" else ())]

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, with a loss scaler that is on wherever float16 was asked for.

        accelerate leaves autocast and scaler off for float16 on a CPU, and elsewhere builds a scaler with torch's
        defaults.
        """
        super().create_accelerator_and_postprocess()
        if self._block is None:
            return
        with self._verdicts.checking("sharding"):
            fsdp = getattr(self.accelerator.state, "fsdp_plugin", None)
            check_sharding(
                self._block,
                deepspeed=configured(self.accelerator) if self.is_deepspeed_enabled else None,
                fsdp=None if fsdp is None else fsdp.fsdp_version,
            )
        precision = self._acting.precision
        if precision is not None and precision.dtype == "float16":
            if self.is_deepspeed_enabled:
                reduce_in_float32(configured(self.accelerator))  # the rest of float16 is DeepSpeed's own
            else:
                compute_in_float16(self.accelerator, precision.loss_scale)
        if self._constructing:
            self._check_model()

    def _check_model(self) -> None:
        """Refuse a model that the block does not fit: TRL has loaded it, and has not started its engine."""
        args: Any = self.args  # TRL's, which transformers takes for its own
        with self._verdicts.checking("doctor"):
            check_examinable(self._config, self.model)
        with self._verdicts.checking("reference"):
            # As TRL decides whether it builds one.
            self._check_reference(args.beta != 0.0 and not is_peft_model(self.model))
        if self.use_vllm and is_peft_model(self.model):
            with self._verdicts.checking("lora"):
                check_base(self.model)
        if self._config.routing is not None:
            with self._verdicts.checking("routing"), RoutingRefusals(self._config.routing):
                found = ScoreReplay(self._config.routing, self.model, self.args.seed)
                if self._verdicts.observes:
                    self._watched_routing = found
                else:
                    self._routing = found
        if self._config.precision is not None:
            with self._verdicts.checking("precision", applied=True):
                policy = PrecisionPolicy.of(self._config.precision)
                audit(policy, self._read_trainer(), None, None, FIXES).raise_for_findings()
            with self._verdicts.checking("readiness"):
                self._readiness = self._scan_readiness()

    def _begin(self, patch_digest: str) -> None:
        """Audit both sides, wrap the engine, and say what is active."""
        args: Any = self.args
        self._sampling = SamplingSettings()
        with self._verdicts.checking("sampling"):
            self._sampling = sampling_settings(self, args.generation_kwargs)
        self._log.sampled_with(self._scored_sampling)
        self._verdicts.at(lambda: self.state.global_step)
        self.add_callback(self._alarms)
        with self._verdicts.checking("reference"):
            self._check_reference(self.ref_model is not None)
        if self.use_vllm:
            with self._verdicts.checking("engine"):
                self._find_engine()
        with self._verdicts.checking("precision", applied=True):
            self._audit()
        if self._readiness is not None:
            self._warn(READINESS, self._readiness)
        if self._unchecked is not None:
            self._warn("server", self._unchecked)
        settings = None if self._correction is None else self._correction.settings
        if self.use_vllm and clips_engine_ratio(settings, getattr(self, "loss_type", "")):
            engine: EngineReading = self._readings["engine"]
            coarse = coarse_engine(self._compute_dtype(), engine.model_dtype, engine.quantization)
            if coarse is not None:
                self._warn("phantom_clip", coarse)
        if self.use_vllm:
            with self._verdicts.checking("engine"):
                self._wrap_engine(patch_digest)
        with self._verdicts.checking("banner"):
            self._log.announce(INTEGRATION, measured="at every generation")

    @property
    def _scored_sampling(self) -> SamplingSettings:
        """The sampling settings as far as the trainer's log-probabilities do not follow them."""
        return self._sampling if self._acting.sampling_mask is None else self._sampling.without_truncation()

    def _check_reference(self, reference: bool) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        check_reference(plugin, self.accelerator.num_processes, reference)

    def _find_engine(self) -> None:
        """Note what stands behind TRL's wrapper."""
        generation: Any = self.vllm_generation
        if generation.mode == "colocate":
            self._engine = Colocated(generation.llm, repairs=not self._verdicts.observes)
            return
        self._engine = served = Served(generation, self.accelerator)
        if self._verdicts.observes:
            with self._verdicts.checking("server"):
                served.check(ServerCheck(self._config), self.accelerator.device.type)
        self._unchecked = served.unchecked()

    def _wrap_engine(self, patch_digest: str) -> None:
        """Put the engine behind checks of its weights and rollouts."""
        vocabulary = plain_vocabulary(self._tokenizer, self.accelerator.device)
        routing = self._watched_routing if self._routing is None else self._routing
        self.vllm_generation = CheckedGeneration(
            self.vllm_generation,
            self._engine,
            trainer=TrainerSide(
                named_parameters=lambda: held(self.accelerator.unwrap_model(self.model)),
                everywhere=same_everywhere(self.accelerator),
                # DeepSpeed casts the model when training begins.
                prepared=not is_sharded(self.accelerator) and not self.is_deepspeed_enabled,
                score=self._score,
                step=lambda: self.state.global_step,
                on_sent=self._on_sent,
                event=self._on_event,
                compute_dtype=self._compute_dtype(),
                examines=lambda: self._log.doctor is not None and self._log.doctor.due,
            ),
            monitor=self._verifiable(),
            sampling=self._sampling,
            vocabulary=vocabulary,
            patch_digest=patch_digest,
            layout=routing.layout if routing is not None and routing.config.mode == "R3" else None,
            verdicts=self._verdicts,
            masks=self._engine_masks(),
            base=self._base(),
        )
        # A model of ZeRO-3 runs when training has begun.
        self._vocabulary = vocabulary if zero_stage(self.accelerator) == ZERO3 else None
        if self._vocabulary is None:
            self._check_vocabulary(vocabulary)

    def _base(self) -> Base | None:
        """Return what keeps a base model that TRL merges adapters into; None where it merges none, or into a copy.

        DeepSpeed's stage 3 drops what is merged with the gathered copy, and shards of FSDP's are not looked into.
        """
        model: Any = self.vllm_generation.model
        if is_sharded(self.accelerator) or self._verdicts.observes or not is_peft_model(model):
            return None
        return Base(model, self._engine.reading().model_dtype)

    def _engine_masks(self) -> EngineMasks | None:
        """Return what makes sampling masks of the engine's answers; None where none are asked for."""
        if self._acting.sampling_mask is None:
            return None
        vocabulary = logits_width(self.accelerator.unwrap_model(self.model))
        if vocabulary is None:
            raise ConfigError(
                "mismatch.sampling_mask: the model's configuration has no vocab_size: it is not known what its logits are "
                "over; remove mismatch.sampling_mask."
            )
        return EngineMasks(min(self._acting.sampling_mask.asked(self._sampling), vocabulary), vocabulary)

    def _verifiable(self) -> MonitorConfig:
        """Return the `monitor` section; without the weight check where it cannot be done, which enforce has refused."""
        args: Any = self.args
        monitor = self._config.monitor
        fsdp = getattr(self.accelerator.state, "fsdp_plugin", None)
        if args.sleeps or (fsdp is not None and fsdp.fsdp_version == 1):
            return dataclasses.replace(monitor, weight_sync="off")
        return monitor

    def _audit(self, sync: SyncReading | None = None) -> None:
        """Read both sides' dtypes back; refuse what is not as asked."""
        trainer = self._read_trainer()
        self._readings = {"trainer": trainer}
        if not self.use_vllm:
            return  # one model samples and trains
        self._readings["engine"] = reading = self._engine.reading()
        if self._config.precision is None:
            return
        policy = PrecisionPolicy.of(self._config.precision)
        self._audit_report = audit(policy, trainer, reading, sync, FIXES)
        self._audit_report.raise_for_findings()

    def _read_trainer(self) -> TrainerReading:
        if self.is_deepspeed_enabled:
            return read_deepspeed(self.accelerator, self.model)
        return read_trainer(self.model, self.accelerator.autocast, self.accelerator.scaler, self.accelerator.device)

    def _scan_readiness(self) -> str | None:
        """Check that the weights fit the dtype that both sides will compute in; return what is to be warned of."""
        # On the device that the model is going to: its weights are still in the host's memory, where a scan is slow.
        parameters = gathered(self.accelerator.unwrap_model(self.model), self.accelerator.device)
        return check_readiness(parameters, self._config.precision)

    def _warn(self, name: str, message: str, data: dict[str, Any] | None = None) -> None:
        """Warn, and keep the warning in the run's metrics file."""
        warnings.warn(message, stacklevel=3)
        self._log.event("warning", name, message, data)

    def _compute_dtype(self) -> str:
        """Return the dtype that the trainer's matrix products come out in, as read back."""
        reading: TrainerReading = self._readings["trainer"]
        return reading.compute_dtype

    def _check_vocabulary(self, vocabulary: Tensor) -> None:
        probes = vocabulary[None, :64]
        model = self.accelerator.unwrap_model(self.model)
        surplus = vocabulary_surplus(model, len(self._tokenizer), probes, self._autocast)
        forget_order(self.accelerator)
        if surplus is not None:
            self._warn("vocabulary", str(surplus), vars(surplus))

    def _info(self) -> dict[str, Any]:
        found = info_of(self, self._readings, self._patches, self._audit_report)
        wrapped = self.use_vllm and isinstance(self.vllm_generation, CheckedGeneration)
        return found | {"provenance": dataclasses.asdict(self.vllm_generation.provenance())} if wrapped else found

    def _autocast(self) -> AbstractContextManager[Any]:
        return self.accelerator.autocast() if self.accelerator.native_amp else nullcontext()

    def _score(self, token_ids: Tensor) -> Tensor:
        scores = score_tokens(self.accelerator.unwrap_model(self.model), token_ids, self._autocast)
        forget_order(self.accelerator)
        return scores

    def _on_sent(self, dtypes: frozenset[str]) -> None:
        """Audit both sides once more at the first weight update, with the dtypes that went over."""
        if self._vocabulary is not None:
            vocabulary, self._vocabulary = self._vocabulary, None
            self._check_vocabulary(vocabulary)
        if not self._sync_audited:
            self._sync_audited = True
            received = self.vllm_generation.reading.model_dtype
            for sent in sorted(dtypes):
                self._audit(SyncReading(sent_dtype=sent, received_dtype=received))

    def _on_event(self, level: str, name: str, message: str) -> None:
        """Write what is wrong with a weight update, which every rank verifies."""
        if self.accelerator.is_main_process:
            self._log.event(level, name, message)
        else:
            self._unwritten.append(message)  # the main process writes it at the next log
        if self._config.monitor.weight_sync == "warn":
            warnings.warn(message, stacklevel=2)

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
