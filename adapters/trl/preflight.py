"""What must hold before the first step: dtypes read back on both sides, weights that fit, an engine that can be checked."""

from __future__ import annotations

import dataclasses
from typing import Any

from accelerate.utils import is_peft_model
from mismatch_ext.adapters.accelerate.deepspeed import configured, forget_order, read_deepspeed
from mismatch_ext.adapters.accelerate.sharded import ZERO3, is_sharded, zero_stage
from mismatch_ext.adapters.transformers import vocabulary_surplus
from mismatch_ext.adapters.transformers.scoring import logits_width
from mismatch_ext.adapters.transformers.vocabulary import plain_vocabulary
from mismatch_ext.adapters.trl.arrival import sections_in_loss
from mismatch_ext.adapters.trl.clipping import clips_engine_ratio, coarse_engine
from mismatch_ext.adapters.trl.config import MismatchGRPOConfig
from mismatch_ext.adapters.trl.correction import CorrectionTerm
from mismatch_ext.adapters.trl.engine_masks import EngineMasks
from mismatch_ext.adapters.trl.engines import Colocated, Engine
from mismatch_ext.adapters.trl.examining import check_examinable
from mismatch_ext.adapters.trl.generation import CheckedGeneration
from mismatch_ext.adapters.trl.lora import Base, check_base
from mismatch_ext.adapters.trl.readings import sampling_settings
from mismatch_ext.adapters.trl.refusals import RoutingRefusals, check_reference, check_sharding
from mismatch_ext.adapters.trl.replay import ScoreReplay
from mismatch_ext.adapters.trl.served import Served
from mismatch_ext.adapters.trl.server_client import ClientOf
from mismatch_ext.adapters.trl.sides import SidesMixin
from mismatch_ext.adapters.vllm.engine import asked_of
from mismatch_ext.adapters.vllm.routing import FLAG
from mismatch_ext.adapters.vllm.server_checks import ServerCheck
from mismatch_ext.patches.trl.engine_arguments import engine_arguments
from mismatch_ext.patches.trl.fused_head import FUSED_HEAD
from mismatch_ext.patches.trl.own_loss import OWN_LOSS
from mismatch_ext.patches.trl.server_client import SERVER_CLIENT
from mismatch_ext.patches.vllm.cpu_moe_repack import cpu_moe_repack
from mismatch_ext.patches.vllm.cpu_routes import cpu_routes_patches
from mismatch_ext.patches.vllm.top_logprobs import top_logprobs
from torch import Tensor

from mismatch_ext.config import MonitorConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.kl import ragged_bias
from mismatch_ext.patching import Patch
from mismatch_ext.precision.audit import EngineReading, TrainerReading
from mismatch_ext.precision.readiness import EVENT as READINESS
from mismatch_ext.ranks import together
from mismatch_ext.rollout import SamplingSettings


class PreflightMixin(SidesMixin):
    """Builds and checks both sides; `MismatchTrainerMixin` holds what happens from then on."""

    _routing: ScoreReplay | None
    # Token ids that are still to be held against the model's vocabulary.
    _vocabulary: Tensor | None
    _engine: Engine
    # Says what of a server cannot be checked.
    _unchecked: str | None = None
    _correction: CorrectionTerm | None
    vllm_generation: CheckedGeneration  # type: ignore[assignment]  # around TRL's own

    def _construction_patches(self, config: MismatchGRPOConfig) -> list[Patch]:
        """Return the patches that are active while TRL builds its engine."""
        r3 = self._config.routing is not None and self._config.routing.mode == "R3"
        if config.use_vllm and config.vllm_mode == "server":
            # What a server computes in is in its own command, which is checked.
            return [] if self._verdicts.observes else [SERVER_CLIENT.calling(ClientOf(ServerCheck(self._config)))]
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
            # The sampled token comes in addition.
            arguments["max_logprobs"] = self._config.sampling_mask.asked(sampling_settings(config, given))
        if config.device.type == "cpu":
            # Compiling costs a CPU engine far more at its start than it saves in a short run.
            arguments["enforce_eager"] = True
            patches = cpu_routes_patches() if FLAG in arguments else []
        return [engine_arguments(arguments), *patches] if arguments else []

    def _step_patches(self, config: MismatchGRPOConfig) -> list[Patch]:
        """Return the patches that come and go in each step: around losses, replayed forward passes and weight updates."""
        patches = [OWN_LOSS] if self._config.kl is not None or sections_in_loss(self._config) else []
        patches += [FUSED_HEAD, *top_logprobs()] if self._config.sampling_mask is not None else []
        here = config.use_vllm and config.vllm_mode == "colocate"
        return [*patches, *(cpu_moe_repack() if here and config.device.type == "cpu" else ())]

    def _check_sharding(self) -> None:
        fsdp = getattr(self.accelerator.state, "fsdp_plugin", None)
        check_sharding(
            self._config,
            deepspeed=configured(self.accelerator) if self.is_deepspeed_enabled else None,
            fsdp=None if fsdp is None else fsdp.fsdp_version,
        )

    def _check_model(self) -> None:
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
            with RoutingRefusals(self._config.routing):
                self._routing = ScoreReplay(self._config.routing, self.model, self.args.seed)
        self._check_precision()

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
        with self._verdicts.checking("precision"):
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
        if getattr(self, "loss_type", "") in ("grpo", "sapo"):
            ragged = ragged_bias(self._config.kl, f"loss_type={self.loss_type!r}", "loss_type='dapo' or 'dr_grpo'")
            if ragged is not None:
                self._warn("kl_ragged", ragged)
        if self.use_vllm:
            with self._verdicts.checking("engine"):
                with together(self._ranks):
                    vocabulary = plain_vocabulary(self._tokenizer, self.accelerator.device)
                    wrapped = self._wrapped_engine(patch_digest, vocabulary)
                self.vllm_generation = wrapped  # on all ranks or none
                wrapped.begin()
                self._note_vocabulary(vocabulary)
        with self._verdicts.checking("banner"):
            self._log.announce()

    @property
    def _scored_sampling(self) -> SamplingSettings:
        """The sampling settings that the trainer's log-probabilities do not follow: a sampling mask follows truncation."""
        return self._sampling if self._config.sampling_mask is None else self._sampling.without_truncation()

    def _follow_sampling(self) -> None:
        """Take the settings that TRL's engine wrapper samples with now, which a callback may have changed.

        Raises:
            ConfigError: The engine's temperature is not the one that the trainer scores with.
        """
        args: Any = self.args
        engine: Any = self.vllm_generation
        if engine.temperature != self.temperature:
            raise ConfigError(
                f"the engine samples with temperature={engine.temperature}, and the trainer scores with {self.temperature}: "
                "set trainer.temperature and trainer.vllm_generation.temperature together."
            )
        found = sampling_settings(engine, args.generation_kwargs)
        if found == self._sampling:
            return
        self._sampling = engine.sampling = found
        self._log.sampled_with(self._scored_sampling)

    def _check_reference(self, reference: bool) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        check_reference(plugin, self.accelerator.num_processes, reference)

    def _find_engine(self) -> None:
        """Note what stands behind TRL's wrapper."""
        generation: Any = self.vllm_generation
        if generation.mode == "colocate":
            args: Any = self.args
            self._engine = Colocated(generation.llm, sleeps=args.sleeps)
            return
        self._engine = served = Served(generation, self.accelerator)
        if self._verdicts.observes:
            with self._verdicts.checking("server"):
                served.check(ServerCheck(self._config), self.accelerator.device.type)
        self._unchecked = served.unchecked()

    def _wrapped_engine(self, patch_digest: str, vocabulary: Tensor) -> CheckedGeneration:
        """Return the engine behind checks of its weights and rollouts; it takes part in the run once it begins."""
        routing = self._routing
        return CheckedGeneration(
            self.vllm_generation,
            self._engine,
            trainer=self._trainer_side(),
            monitor=self._verifiable(),
            sampling=self._sampling,
            vocabulary=vocabulary,
            patch_digest=patch_digest,
            layout=routing.layout if routing is not None and routing.config.mode == "R3" else None,
            verdicts=self._verdicts,
            masks=self._engine_masks(),
            base=self._base(),
        )

    def _note_vocabulary(self, vocabulary: Tensor) -> None:
        """Look at the model's vocabulary, now or once it runs."""
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
        if self._config.sampling_mask is None:
            return None
        vocabulary = logits_width(self.accelerator.unwrap_model(self.model))
        if vocabulary is None:
            raise ConfigError(
                "mismatch.sampling_mask: the model's configuration has no vocab_size: it is not known what its logits are "
                "over; remove mismatch.sampling_mask."
            )
        return EngineMasks(min(self._config.sampling_mask.asked(self._sampling), vocabulary), vocabulary)

    def _verifiable(self) -> MonitorConfig:
        """Return the `monitor` section, without the weight check where it is impossible (`enforce` has refused that before)."""
        monitor = self._config.monitor
        fsdp = getattr(self.accelerator.state, "fsdp_plugin", None)
        if fsdp is not None and fsdp.fsdp_version == 1:
            return dataclasses.replace(monitor, weight_sync="off")
        return monitor

    def _read_engine(self) -> EngineReading | None:
        return self._engine.reading() if self.use_vllm else None

    def _read_trainer(self) -> TrainerReading:
        if self.is_deepspeed_enabled:
            return read_deepspeed(self.accelerator, self.model)
        return super()._read_trainer()

    def _check_vocabulary(self, vocabulary: Tensor) -> None:
        probes = vocabulary[None, :64]
        model = self.accelerator.unwrap_model(self.model)
        surplus = vocabulary_surplus(model, len(self._tokenizer), probes, self._autocast)
        forget_order(self.accelerator)
        if surplus is not None:
            self._warn("vocabulary", str(surplus), vars(surplus))

    def _info(self) -> dict[str, Any]:
        found = super()._info()
        wrapped = self.use_vllm and isinstance(self.vllm_generation, CheckedGeneration)
        return found | {"provenance": dataclasses.asdict(self.vllm_generation.provenance())} if wrapped else found

    def _on_sent(self, dtypes: frozenset[str]) -> None:
        """Look at the vocabulary of a model that could not run before, and audit both sides once more."""
        if self._vocabulary is not None:
            vocabulary, self._vocabulary = self._vocabulary, None
            self._check_vocabulary(vocabulary)
        super()._on_sent(dtypes)
