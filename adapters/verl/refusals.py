"""What verl's configuration may not say beside a block: one table, read before Ray starts and by `mismatch-ext compat`.

This module imports no verl, so that `compat` can read it where none is installed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any

from mismatch_ext.config import ESTIMATORS, MismatchConfig, RoutingConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.dtypes import TrainerFixes, spelled
from mismatch_ext.presets import DPPO, PRESETS, ResolvedCorrection, resolve

SYNC, COLOCATE, SEPARATE = "sync", "colocate_async", "separate_async"
MODES = (SYNC, COLOCATE, SEPARATE)
"""Modes of verl 0.9.1's V1 trainer, all of them."""
TRAINER = "mismatch"
"""Name of our synchronous trainer in verl's registry, prefix of the other modes' names, and the vendor's name of our engine."""
MODULES_VARIABLE, VENDOR_VARIABLE = "VERL_USE_EXTERNAL_MODULES", "VERL_ENGINE_VENDOR"
"""verl's own variables: modules that it imports in every process, and the vendor by which it chooses an engine."""
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's own: the configuration of the job that the driver was submitted as."""
TRAINERS = "mismatch_ext.adapters.verl.driver.modes"
EXTENSION = "mismatch_ext.adapters.verl.rollout.vllm_extension.RolloutExtension"
LOOPS = "mismatch_ext.adapters.verl.sampling_mask.MaskedLoopManager"
FSDP = ("fsdp", "fsdp2")
"""Strategies of verl's FSDP engine; verl has one class for both."""
PROCESSED = "processed_logprobs"
"""Mode in which vLLM returns log-probabilities after truncation."""
VERL_PRESETS = frozenset(name for name in PRESETS if name == "disabled" or name.startswith(("decoupled_", "bypass_")))
"""The names of the factory methods of verl's RolloutCorrectionConfig."""
QUIRKS = frozenset({"verl_inverse_k1", "verl_empty_rows"})
"""Where verl, and so its presets, compute differently from this package."""
# Values that verl's loss takes where a key is missing.
DEFAULTS = {
    "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False, "rollout_rs": None,
    "rollout_rs_threshold": None, "loss_type": "ppo_clip",
}  # fmt: skip
# In these losses a token of advantage 0 still has a gradient, or affects which other tokens have one.
NOT_BY_ADVANTAGE = ("clip_cov", "kl_cov", "dro")
# Other trainers of verl that check their configuration as main_ppo does. The list names modules one by one, because main_ppo
# uses modules beside them too: its separate_async has a worker from verl.experimental.separation.
ELSEWHERE = (
    "verl.experimental.one_step_off_policy",
    "verl.experimental.fully_async_policy",
    "verl.experimental.separation.ray_trainer",
)

SAME = ({"fsdp"}, {"fsdp2"}, {"megatron"}, {*FSDP})
"""Strategies that actor and reference may have together."""
HYBRID = "actor_rollout_ref.hybrid_engine"
ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))
CORRECTION, POLICY_LOSS = "algorithm.rollout_correction", f"{ACTOR}.policy_loss"
DTYPE, ENGINE_WEIGHTS, KV_CACHE = (
    f"mismatch.precision.{key}" for key in ("dtype", "engine_weights", "engine_kv_cache")
)
_MIXED = f"{ACTOR}.fsdp_config.mixed_precision"
FIXES = TrainerFixes(
    masters=f"Set {ACTOR}.fsdp_config.model_dtype=fp32, and let mixed_precision compute in the half dtype",
    autocast_off=f"Set {_MIXED}.param_dtype=fp32, or leave it out",
    autocast=f"Set {_MIXED}.param_dtype={{flag}}, or leave it out: mismatch.precision sets it.",
    flags=(("float16", "fp16"), ("bfloat16", "bf16")),
    reduction=f"Set {_MIXED}.reduce_dtype=fp32",
)
"""What to change where the trainer does not compute as asked for."""


def trainer_of(mode: str) -> str:
    """Return the name in verl's registry of our trainer for a mode."""
    return TRAINER if mode == SYNC else f"{TRAINER}_{mode}"


class Asked:
    """A configuration of verl as its user gave it, or the part that is known, with the block."""

    def __init__(self, config: Mapping[str, Any], block: MismatchConfig) -> None:
        self._config, self.block = config, block

    def at(self, path: str, default: Any = None) -> Any:
        """Return a value of the configuration, or of the block below `mismatch.`; the default where it is absent or null."""
        first, *rest = path.split(".")
        found: Any = self.block if first == "mismatch" else self._config
        for name in rest if first == "mismatch" else path.split("."):
            if found is None or isinstance(found, (str, int, float)):
                return default
            found = found.get(name) if hasattr(found, "get") else getattr(found, name)
        return default if found is None else found

    @cached_property
    def mode(self) -> str:
        """Mode of verl's trainer, also if our trainer has replaced verl's."""
        given = str(self.at("trainer.v1.trainer_mode", SYNC))
        return next((mode for mode in MODES if given in (mode, trainer_of(mode))), given)

    @cached_property
    def correction(self) -> ResolvedCorrection | None:
        """Settings of the `correction` section."""
        return None if self.block.correction is None else settings_of(self.block.correction)

    @property
    def strategy(self) -> str:
        """Strategy of the actor's engine."""
        return str(self.at(f"{ACTOR}.strategy", "fsdp"))

    @property
    def megatron(self) -> bool:
        """Whether the actor's engine is Megatron's."""
        return self.strategy == "megatron"

    @property
    def engine(self) -> str:
        """Name of the rollout's engine."""
        return str(self.at(f"{ROLLOUT}.name", "vllm"))

    @property
    def bypass(self) -> bool:
        """Whether the engine's log-probabilities are the old policy's, so that no pass scores fresh rollouts."""
        if self.correction is not None:
            return self.correction.mode == "bypass"
        return bool(self.at(f"{CORRECTION}.bypass_mode"))

    @property
    def inert(self) -> bool:
        """Whether the user's own correction has settings that verl applies, in bypass mode, in one of its losses alone."""
        own = any(self.at(f"{CORRECTION}.{key}") for key in ("rollout_is", "rollout_rs"))
        return own or self.at(f"{CORRECTION}.loss_type", "ppo_clip") != "ppo_clip"

    @property
    def clips(self) -> bool:
        """Whether the `correction` section has weights, and bounds them instead of masking tokens."""
        section = self.correction
        return section is not None and section.level != "none" and section.bound in ("truncate", "clip")

    @property
    def drops(self) -> bool:
        """Whether the loss drops sequences."""
        return self.correction is not None and self.correction.off_policy_threshold is not None

    @property
    def stops(self) -> bool:
        """Whether an alarm stops the run with a checkpoint."""
        return any(rule.action == "stop" for rule in self.block.monitor.alarms.values())

    @property
    def routing(self) -> str | None:
        """Mode of `mismatch.routing`."""
        return None if self.block.routing is None else self.block.routing.mode

    @cached_property
    def variables(self) -> dict[str, str]:
        """Variables that Ray's processes are to have by the configuration."""
        return dict(self.at("ray_kwargs.ray_init.runtime_env.env_vars") or {})

    @cached_property
    def job_variables(self) -> dict[str, str]:
        """Variables of the Ray job that this driver was submitted as, which `ray.init` may not change."""
        job = json.loads(os.environ.get(JOB_VARIABLE) or "{}")
        return dict((job.get("runtime_env") or {}).get("env_vars") or {})


def settings_of(section: Any) -> ResolvedCorrection:
    """Return the settings of a `correction` section; a preset with one of verl's names does what verl's method of it does."""
    settings = resolve(section)
    own_rules = isinstance(section.reject, Mapping)
    if section.preset in VERL_PRESETS and not own_rules:
        settings = replace(settings, compat=QUIRKS)
    return settings


Bad = Callable[[Any, Asked], bool]
"""Tells by a setting's value, and all of the configuration, whether it is refused."""


@dataclass(frozen=True)
class Row:
    """A setting that is refused for some of its values."""

    path: str  # its name in verl's configuration, or in the block below `mismatch.`
    bad: Bad
    sentence: str  # why, and what to do; it follows "path=value: "
    when: Callable[[Asked], bool] = lambda _: True  # in which configurations it is looked at
    read: Callable[[Asked], Any] | None = None  # the value, where it is not the one of that name
    measurable: bool = False  # whether a run with this setting can be measured all the same


def under(when: Callable[[Asked], bool], *rows: Row, measurable: bool = False) -> tuple[Row, ...]:
    """Return rows that are looked at in some configurations only."""
    return tuple(replace(row, when=when, measurable=measurable) for row in rows)


def given(value: Any, _: Asked) -> bool:
    """Tell whether a setting has a value other than False, 0 and nothing."""
    return bool(value)


def off(value: Any, _: Asked) -> bool:
    """Tell whether a setting is given, and is False or 0."""
    return value is not None and not value


def other_than(*allowed: object) -> Bad:
    """Return a predicate: the setting is given, and none of these."""
    return lambda value, _: value is not None and value not in allowed


def one_of(*refused: object) -> Bad:
    """Return a predicate: the setting is one of these."""
    return lambda value, _: value in refused


def _ranks(asked: Asked) -> int:
    tensor_parallel = int(asked.at(f"{ROLLOUT}.tensor_model_parallel_size", 1))
    pipeline_parallel = int(asked.at(f"{ROLLOUT}.pipeline_model_parallel_size", 1))
    return tensor_parallel * pipeline_parallel


def _spans_nodes(_: Any, asked: Asked) -> bool:
    ranks = _ranks(asked)
    return ranks > int(asked.at(f"{ROLLOUT}.n_gpus_per_node", ranks))


def _foreign_extension(value: Any, _: Asked) -> bool:
    return bool(value) and not derives(value, EXTENSION)


def _foreign_loops(value: Any, _: Asked) -> bool:
    return bool(value) and not derives(value, LOOPS)


def _lacks_our_module(value: Any, _: Asked) -> bool:
    return value is not None and TRAINERS not in value.split(",")


def _other_kind_of_engine(value: Any, asked: Asked) -> bool:
    return value is not None and {value, asked.strategy} not in SAME


def _other_than_verls(value: Any, asked: Asked) -> bool:
    """Tell whether SGLang is given a quantization of its own."""
    return asked.engine == "sglang" and bool(value) and value != asked.at(f"{ROLLOUT}.quantization")


def _other_weights(value: Any, asked: Asked) -> bool:
    return bool((value or None) != asked.at(ENGINE_WEIGHTS))


def _other_dtype(value: Any, asked: Asked) -> bool:
    assert asked.block.precision is not None
    return value is not None and spelled(value) != asked.block.precision.dtype


def _other_dtype_than_verls_default(value: Any, asked: Asked) -> bool:
    # bfloat16 is what verl's own file says, so perhaps nobody asked for it.
    return _other_dtype(value, asked) and spelled(value) != "bfloat16"


def _other_cache(value: Any, asked: Asked) -> bool:
    assert asked.block.precision is not None
    if asked.engine != "vllm" or value is None:
        return False
    return value not in asked.block.precision.kv_cache_dtypes


def _other_replay(value: Any, asked: Asked) -> bool:
    return value not in (None, "disabled", asked.routing)


def _in_no_loss(value: Any, asked: Asked) -> bool:
    return asked.inert and value not in (None, "vanilla", "bypass_mode")


def _names_the_head(value: Any, _: Asked) -> bool:
    return "lm_head" in value if isinstance(value, str) else any("lm_head" in name for name in value or ())


def _probes_adapters(asked: Asked) -> bool:
    """Tell whether vLLM holds adapters apart from the base, and scores the probes of weight updates with them."""
    adapts = asked.at(f"{MODEL}.lora_rank", 0) and not asked.at(f"{MODEL}.lora.merge")
    return bool(adapts) and asked.engine == "vllm" and asked.block.monitor.weight_sync != "off"


def _differs(copy: Any, asked: Asked) -> bool:
    """Tell whether verl's loss reads another copy of the correction than the driver."""
    if not copy or asked.at(f"{POLICY_LOSS}.loss_mode") != "bypass_mode":
        return False
    return any(copy.get(key, default) != asked.at(f"{CORRECTION}.{key}", default) for key, default in DEFAULTS.items())


def _of_correction(name: str) -> Callable[[Asked], Any]:
    return lambda asked: getattr(asked.correction, name)


def _vendor(asked: Asked) -> Any:
    return asked.variables.get(VENDOR_VARIABLE, os.environ.get(VENDOR_VARIABLE))


KWARGS = f"{ROLLOUT}.engine_kwargs"
NO_PROBES = "weight updates are verified in FSDP models only"
"""Why they are not under Megatron."""
_NOT_IN_VERL = (
    "verl's rollout_correction cannot do this. Remove the key, or name one of verl's presets (decoupled_*, bypass_*)."
)
_ALWAYS = (
    Row("trainer.use_v1", off, "verl's deprecated trainer would train without the mismatch block. Set it to True."),
    Row("trainer.v1.trainer_mode", other_than(*MODES),
        f"this release has a trainer for {', '.join(map(repr, MODES))} and for no other mode. Choose one of them."),
    Row(f"{ACTOR}.strategy", other_than(*FSDP, "megatron"),
        "this release knows verl's FSDP and Megatron engines only. Choose 'fsdp', 'fsdp2' or 'megatron', or remove the "
        "mismatch block. (VeOmni replays routes by itself: actor.veomni.router_replay.)"),
    Row(f"{ROLLOUT}.name", other_than("vllm", "sglang"),
        "this release can read back vLLM and SGLang only. Choose 'vllm' or 'sglang'."),
    Row(f"{ROLLOUT}.disaggregation.enabled", given,
        "servers that divide prompts from answers are not read back. Set it to False."),
    Row(f"{ROLLOUT}.calculate_log_probs", off,
        "without the engine's log-probabilities there is no gap to measure. Set it to True."),
    Row("distillation.enabled", given,
        "verl's distillation has a loss of its own, which this package does not know. Set it to False."),
    Row(f"{KWARGS}.vllm.worker_extension_cls", _foreign_extension,
        f"the server shows by this package's class that it runs as asked. Derive your class from {EXTENSION}, or remove it."),
    Row(f"{KWARGS}.vllm.quantization", lambda value, asked: asked.engine == "vllm" and bool(value),
        f"verl would load each weight update as if vLLM's layers were not quantized. Set {ROLLOUT}.quantization instead."),
    Row(VENDOR_VARIABLE, other_than("", TRAINER),
        "that vendor's engine would train without the mismatch block. Remove the variable.", read=_vendor),
    Row(MODULES_VARIABLE, _lacks_our_module,
        f"the Ray job's own runtime_env has this variable, and Ray lets nobody change it. Add {TRAINERS} to it there, or submit "
        "the job without it.", read=lambda asked: asked.job_variables.get(MODULES_VARIABLE)),
    Row("model_engine", lambda value, asked: value == "megatron" and asked.strategy in FSDP,
        f"the actor has Megatron's settings, and another strategy. Set {ACTOR}.strategy=megatron and {REF}.strategy=megatron, "
        "or model_engine=dp."),
)  # fmt: skip
_MODE = (
    *under(
        lambda asked: asked.mode == SEPARATE,
        Row(HYBRID, given,
            f"under trainer.v1.trainer_mode={SEPARATE}, verl would add servers that only validate, and that keep older weights "
            "between validations. Set it to False."),
    ),
    *under(
        lambda asked: asked.mode != SEPARATE,
        Row(HYBRID, off,
            f"the server is checked through the actor's workers. Set it to True, or trainer.v1.trainer_mode={SEPARATE}."),
    ),
    *under(
        lambda asked: asked.mode != SYNC,
        Row(f"{ACTOR}.strategy", other_than(*FSDP), "asynchronous modes were run with FSDP only. Choose 'fsdp' or 'fsdp2'."),
        Row(f"{ROLLOUT}.name", other_than("vllm"), "asynchronous modes were run with vLLM only. Choose 'vllm'."),
    ),
    Row(f"{REF}.strategy", _other_kind_of_engine,
        "a worker has one kind of engine for actor and reference. Set it to the actor's strategy."),
)  # fmt: skip
_MONITOR = under(
    lambda asked: asked.stops,
    Row(f"{ACTOR}.checkpoint.async_save", given,
        "an alarm of mismatch.monitor stops training here (action: stop), and resume_mode=auto would not find the checkpoint: "
        "verl writes latest_checkpointed_iteration.txt after the run has ended. Set it to False, or let the alarm warn "
        "(action: warn)."),
)  # fmt: skip
_HEAD = under(
    _probes_adapters,
    Row(f"{MODEL}.target_modules", _names_the_head,
        "vLLM scores prompts without an adapter on the output head, so that the probes of weight updates would call its weights "
        "wrong. Remove 'lm_head' from it, or set mismatch.monitor.weight_sync='off'."),
    measurable=True,
)  # fmt: skip
_SGLANG = under(
    lambda asked: asked.engine == "sglang",
    Row(f"{ROLLOUT}.data_parallel_size", other_than(1),
        "an SGLang server answers for the first of its engines only. Set it to 1."),
    Row(f"{ROLLOUT}.tensor_model_parallel_size", _spans_nodes,
        "an SGLang replica over several nodes has a server on each, and only the first says what it runs with. Take at "
        "most as many ranks (tensor times pipeline parallel) as a node has."),
    Row(f"{ROLLOUT}.skip_tokenizer_init", lambda value, asked: asked.routing == "R3" and off(value, asked),
        "verl would read the routes of R3 through a module that SGLang has no longer. Leave it at True, verl's default."),
)  # fmt: skip
_MEGATRON = (
    *under(
        lambda asked: asked.megatron,
        Row("mismatch.precision", given,
            "verl's Megatron engine takes dtypes and loss scale from other settings. Leave the section out, or set "
            f"{ACTOR}.strategy=fsdp2."),
        Row("mismatch.monitor.weight_sync", other_than("off"), f"{NO_PROBES}. Leave it out under Megatron."),
        Row("mismatch.routing.reference", given, "verl never replays routes in Megatron's reference. Set it to False."),
        Row(f"{MODEL}.use_fused_kernels", given,
            "Megatron's fused head was not run with this package's loss. Set it to False."),
    ),
    *under(
        lambda asked: asked.megatron and asked.routing is not None,
        Row("mismatch.routing.measured", other_than(0, RoutingConfig(mode="R3").measured),
            f"under Megatron, routes are not compared with the routers' own choice. Remove it, or set {ACTOR}.strategy=fsdp2."),
        Row(f"{MODEL}.use_remove_padding", off,
            "verl packs routes without padding, so that a padded batch would get those of other tokens. Set it to True."),
        Row(f"{MODEL}.mtp.enable", given,
            "routers that predict further tokens have no routes, and would choose for themselves. Set it to False."),
        Row(f"{ACTOR}.megatron.router_replay.mode", _other_replay,
            "this is verl's own replay, and mismatch.routing sets it. Set it to the mode of mismatch.routing, or remove one of "
            "the two."),
        Row(f"{ROLLOUT}.enable_rollout_routing_replay", lambda value, asked: bool(value) and asked.routing == "R2",
            "verl would replay the rollout's routes, and mismatch.routing.mode=R2 asks for the actor's own. Set it to False, "
            "or use mode R3."),
    ),
)  # fmt: skip
PRECISION = (
    *under(
        lambda asked: asked.at(DTYPE, "bfloat16") != "bfloat16",
        Row(f"{MODEL}.lora.merge", given,
            "verl sends merged adapters in bfloat16, not in mismatch.precision.dtype. Set it to False."),
        Row(f"{ACTOR}.fsdp_config.qat.enable", given,
            "quantization-aware training has a dtype of its own, not mismatch.precision.dtype. Set it to False."),
        Row(f"{ROLLOUT}.checkpoint_engine.backend", lambda value, _: str(value).startswith("delta"),
            "it sends weights in bfloat16, not in mismatch.precision.dtype. Set it to 'naive'."),
    ),
    *under(
        lambda asked: asked.block.precision is not None,
        Row("mismatch.precision.head", given,
            "no engine of verl 0.9.1 lets the actor's output head multiply in float32 apart from the rest. Remove it."),
        Row(f"{KWARGS}.sglang.quantization", _other_than_verls,
            f"verl quantizes what it sends to SGLang by {ROLLOUT}.quantization only, so that the first update would end the "
            f"run. Remove it, set {ROLLOUT}.quantization='fp8', and name that in {ENGINE_WEIGHTS}."),
        Row(f"{ROLLOUT}.quantization", _other_weights,
            f"mismatch.precision expects the rollout's weights in another format. Set {ENGINE_WEIGHTS} to the same value."),
        Row(f"{KWARGS}.vllm.kv_cache_dtype", _other_cache,
            f"mismatch.precision expects keys and values in another format. Remove it, or name the format in {KV_CACHE}."),
        *(
            Row(f"{role}.fsdp_config.mixed_precision.param_dtype", _other_dtype,
                "it contradicts mismatch.precision.dtype, which sets it. Remove one of them.")
            for role in (ACTOR, REF)
        ),
        Row(f"{ROLLOUT}.dtype", _other_dtype_than_verls_default,
            "it contradicts mismatch.precision.dtype, which sets it. Remove one of them."),
    ),
)  # fmt: skip
_ROUTING = under(
    lambda asked: asked.routing is not None and not asked.megatron,
    *(
        Row(f"{role}.fsdp_config.router_replay.mode", other_than("disabled"),
            "verl's FSDP engine ignores its own router_replay, and mismatch.routing replays routes there. Remove it.")
        for role in (ACTOR, REF)
    ),
)  # fmt: skip
_MASKS = under(
    lambda asked: asked.block.sampling_mask is not None,
    Row(f"{ROLLOUT}.name", other_than("vllm"), "mismatch.sampling_mask reads masks off vLLM's answers only. Choose 'vllm'."),
    Row(f"{ACTOR}.strategy", other_than(*FSDP),
        "mismatch.sampling_mask applies masks in verl's FSDP engine only, not under strategy='megatron'. Choose 'fsdp' or "
        "'fsdp2'."),
    Row(f"{MODEL}.use_fused_kernels", given,
        "a fused head returns no logits, which mismatch.sampling_mask masks. Set it to False."),
    *(
        Row(path, other_than(PROCESSED),
            f"mismatch.sampling_mask reads off what truncation has left. Set it to '{PROCESSED}'.")
        for path in (f"{ROLLOUT}.logprobs_mode", f"{KWARGS}.vllm.logprobs_mode")
    ),
    Row(f"{ROLLOUT}.agent.agent_loop_manager_class", _foreign_loops,
        f"this package's class joins masks to rollouts. Derive your class from {LOOPS}, or remove it."),
    Row(f"{ROLLOUT}.mtp.enable_rollout", given, "mismatch.sampling_mask was not run with drafted tokens. Set it to False."),
    Row(f"{ACTOR}.entropy_coeff", given,
        "mismatch.sampling_mask takes log-probabilities over the masks, and verl's entropy is over the whole vocabulary. Set "
        "it to 0."),
)  # fmt: skip
_CORRECTION = (
    *under(
        lambda asked: asked.correction is not None,
        *(
            Row(f"{CORRECTION}.{key}", given,
                "verl's correction and mismatch.correction would both weigh the same tokens. Remove one of the two.")
            for key in ("rollout_is", "rollout_rs", "bypass_mode")
        ),
        Row("mismatch.correction.level", one_of("geometric"), f"{_NOT_IN_VERL} Levels of verl are 'token' and 'sequence'.",
            read=_of_correction("level")),
        *(
            Row("mismatch.correction.loss", one_of(loss),
                f"verl has this loss itself. Set {POLICY_LOSS}.loss_mode={loss}, {ACTOR}.clip_ratio_low and clip_ratio_high to "
                f"its bounds, and {CORRECTION}.bypass_mode=True; and leave out mismatch.correction.",
                read=_of_correction("loss"))
            for loss in DPPO
        ),
        Row("mismatch.correction.centering", other_than(),
            "verl 0.9.1 has no score centering (its main branch has). Leave it out.", read=_of_correction("centering")),
        Row("mismatch.correction.veto", other_than(), _NOT_IN_VERL, read=_of_correction("veto")),
        Row("mismatch.correction.confidence", other_than(), _NOT_IN_VERL, read=_of_correction("confidence")),
        Row("mismatch.correction.lower", lambda value, asked: value is not None and asked.clips,
            f"{_NOT_IN_VERL} With bound=mask it has a lower bound.", read=_of_correction("lower")),
    ),
    *under(
        lambda asked: asked.correction is not None and asked.bypass,
        Row("mismatch.correction.normalize", given,
            "in bypass mode the weights are computed in each micro-batch, and would be divided by its mean, not by the "
            "batch's. Remove it, or set mode='decoupled'.", read=_of_correction("normalize")),
        Row(f"{POLICY_LOSS}.loss_mode", other_than("vanilla"),
            "mismatch.correction in bypass mode has a policy loss of its own. Remove one of the two."),
    ),
    *under(
        lambda asked: asked.correction is not None and not asked.bypass,
        Row(f"{POLICY_LOSS}.loss_mode", one_of("bypass_mode"),
            "this loss weighs and rejects by policy_loss.rollout_correction, not by mismatch.correction. Choose another, or "
            "set mismatch.correction.mode='bypass' with 'vanilla'."),
    ),
    *under(
        lambda asked: asked.drops,
        Row(f"{POLICY_LOSS}.loss_mode", one_of(*NOT_BY_ADVANTAGE),
            "this loss has terms that no advantage multiplies, so that mismatch.correction.off_policy_threshold could not take "
            "a sequence out of it. Leave out one of the two."),
        Row(f"{ACTOR}.entropy_coeff", given,
            "the entropy of sequences that mismatch.correction.off_policy_threshold drops would still be trained on. Set it to "
            "0, or leave out off_policy_threshold."),
    ),
)  # fmt: skip
# verl's own correction. What it computes with these settings can be measured all the same.
_VERLS_CORRECTION = (
    *under(
        lambda asked: asked.correction is None and not asked.bypass,
        Row(f"{POLICY_LOSS}.loss_mode", one_of("bypass_mode"),
            f"without {CORRECTION}.bypass_mode=True, this loss takes its ratio to the trainer's own old policy, not to the "
            "rollout's. Set both, or neither."),
        Row(f"{CORRECTION}.loss_type", other_than("ppo_clip"),
            f"it has no effect in verl without {CORRECTION}.bypass_mode=True. Remove it, or set bypass_mode=True."),
        measurable=True,
    ),
    *under(
        lambda asked: asked.correction is None and asked.bypass,
        Row(f"{POLICY_LOSS}.loss_mode", _in_no_loss,
            f"with {CORRECTION}.bypass_mode=True, verl applies weights, rejection and loss_type in its loss 'bypass_mode' only. "
            "Set it to 'bypass_mode' or 'vanilla', or remove the correction."),
        Row(f"{POLICY_LOSS}.rollout_correction", _differs,
            f"verl's loss reads this copy, its driver reads {CORRECTION}, and the two differ. Remove it: it is set to the "
            "other."),
        measurable=True,
    ),
)  # fmt: skip
_BYPASS = under(
    lambda asked: asked.bypass,
    Row("mismatch.routing.mode", one_of("R2"),
        "R2 records the routes of the trainer's pass over fresh rollouts, and bypass mode has no such pass. Use R3, or a "
        "decoupled correction."),
    Row("mismatch.lr.trigger", one_of("mismatch_kl", "f_tau"),
        "bypass mode has no pass of the trainer over fresh rollouts, so that there is no gap to follow. Choose "
        "'response_length' or 'grad_norm'."),
)  # fmt: skip
_KL = (
    *under(
        lambda asked: asked.block.kl is not None,
        Row("mismatch.kl.estimator", one_of("full"),
            "it needs the logits of policy and reference together, and verl's reference keeps the sampled tokens' "
            f"log-probabilities only. Choose one of {', '.join(name for name in ESTIMATORS if name != 'full')}."),
    ),
    *under(
        lambda asked: asked.block.kl is not None and asked.block.kl.in_rewards,
        Row("algorithm.adv_estimator", one_of("gdpo"),
            "it reads the components of the reward function and no token-level rewards, in which "
            "mismatch.kl.reward_path='rewards' puts the KL. Choose another, or set reward_path='surrogate'."),
        Row(f"{ACTOR}.use_kl_loss", given,
            "mismatch.kl.reward_path='rewards' has a KL term in the rewards, and this asks for a second one in the loss. "
            "Remove one of the two (placement='both' has a part in either)."),
    ),
    *under(
        lambda asked: asked.block.kl is not None and not asked.block.kl.in_rewards,
        Row("algorithm.use_kl_in_reward", given,
            "verl's KL in the rewards and mismatch.kl in the loss would both regularize. Remove one of the two, or set "
            "reward_path='rewards'."),
    ),
)  # fmt: skip
TABLE = (
    *_ALWAYS, *_MODE, *_MONITOR, *_HEAD, *_SGLANG, *_MEGATRON, *PRECISION, *_ROUTING, *_MASKS, *_CORRECTION, *_VERLS_CORRECTION,
    *_BYPASS, *_KL,
)  # fmt: skip


def refused(config: Mapping[str, Any], block: MismatchConfig, rows: Iterable[Row] = TABLE) -> Iterator[tuple[Row, Any]]:
    """Yield the rows that refuse something of a configuration, each with the value that it refuses."""
    asked = Asked(config, block)
    for row in rows:
        if row.when(asked):
            value = asked.at(row.path) if row.read is None else row.read(asked)
            if row.bad(value, asked):
                yield row, value


def reasons(config: Mapping[str, Any], block: MismatchConfig, rows: Iterable[Row] = TABLE) -> Iterator[ConfigError]:
    """Yield an error for each setting of verl with which the block cannot work."""
    for module in ELSEWHERE:
        if any(name == module or name.startswith(f"{module}.") for name in sys.modules):
            yield ConfigError(
                f"trainer={module!r}: that trainer takes none of the mismatch block's settings. Start verl.trainer.main_ppo, or "
                "remove the block."
            )
    for row, value in refused(config, block, rows):
        if block.acts or not row.measurable:
            yield _error(row, value)


def doubts(config: Mapping[str, Any], block: MismatchConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with verl's own settings in a run that is only measured, and can be measured as it is."""
    if not block.acts:
        for row, value in refused(config, block):
            if row.measurable:
                yield _error(row, value)


def _error(row: Row, value: Any) -> ConfigError:
    shown = f"={value!r}" if value is None or isinstance(value, (str, int, float)) else ""
    return ConfigError(f"{row.path}{shown}: {row.sentence}")


def refuse(config: Mapping[str, Any], block: MismatchConfig, rows: Iterable[Row] = TABLE) -> None:
    """Raise the first of `reasons`."""
    for error in reasons(config, block, rows):
        raise error


def derives(name: str, own: str) -> bool:
    """Tell whether a setting names a class of this package, or one that is derived from it, by their dotted names."""
    module, _, attribute = name.rpartition(".")
    try:
        found = None if name == own else getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        return False
    bases = getattr(found, "__mro__", ())
    return name == own or any(f"{kind.__module__}.{kind.__qualname__}" == own for kind in bases)
