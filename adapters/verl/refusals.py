"""What verl's configuration may not say beside a block: one table, read before Ray starts and by `mismatch-ext compat`.

This module imports no verl, so that `compat` can read it where none is installed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from mismatch_ext.config import ESTIMATORS, MismatchConfig, RoutingConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.dtypes import PrecisionPolicy, TrainerFixes, spelled
from mismatch_ext.presets import PRESETS, ResolvedCorrection, resolve

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
QUANTIZATIONS = {"vllm": ("fp8", "torchao", "ascend"), "sglang": ("fp8",)}
"""Values that verl accepts as `rollout.quantization`, by engine."""
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


@dataclass(frozen=True)
class Setting:
    """A setting that is refused for some of its values."""

    path: str  # its name in verl's configuration, or in the block below `mismatch.`
    bad: Bad  # tells by its value, and all of the configuration, whether it is refused
    allowed: str
    why: str  # no other value is
    instead: str = "Change it"
    value: Callable[[Asked], Any] | None = None  # reads it where it is not the one of that name


@dataclass(frozen=True)
class Case:
    """What is refused in one case."""

    words: str  # as they follow "with" in a message
    holds: Callable[[Asked], bool]
    settings: tuple[Setting, ...]  # refused then
    measurable: bool = False  # whether a run with these settings can be measured all the same


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
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return int(asked.at(f"{ROLLOUT}.{sizes[0]}", 1)) * int(asked.at(f"{ROLLOUT}.{sizes[1]}", 1))


def _other_dtype(value: Any, asked: Asked) -> bool:
    assert asked.block.precision is not None
    return value is not None and spelled(value) != asked.block.precision.dtype


def _other_cache(value: Any, asked: Asked) -> bool:
    assert asked.block.precision is not None
    return (
        asked.engine == "vllm"
        and value is not None
        and value not in PrecisionPolicy.of(asked.block.precision).kv_cache_dtypes
    )


def _differs(copy: Any, asked: Asked) -> bool:
    """Tell whether verl's loss reads another copy of the correction than the driver."""
    read = copy and asked.at(f"{POLICY_LOSS}.loss_mode") == "bypass_mode"
    values = {key: copy.get(key, default) for key, default in DEFAULTS.items()} if read else {}
    return any(value != asked.at(f"{CORRECTION}.{key}", DEFAULTS[key]) for key, value in values.items())


def _of_correction(name: str) -> Callable[[Asked], Any]:
    return lambda asked: getattr(asked.correction, name)


KWARGS = f"{ROLLOUT}.engine_kwargs"
NO_PROBES = "the actor's weights are probed in FSDP models alone"
"""Why weight updates are not verified under Megatron."""
LEFT_OUT = "leaving it out"
REMOVE_ONE, NAME_A_PRESET = "Remove one of the two", "Change it, or name one of verl's presets (decoupled_*, bypass_*)"
CONTRADICTS = ("that of mismatch.precision.dtype", "the two contradict each other", "Remove one of them")
TABLE = (
    Case("a mismatch block", lambda _: True, (
        Setting("trainer.use_v1", off, "True", "the deprecated trainer has no registry that ours could enter by"),
        Setting(
            "trainer.v1.trainer_mode", other_than(*MODES), ", ".join(map(repr, MODES)),
            "this release has a trainer for each mode of verl's own, and for no other",
        ),
        Setting(
            f"{ACTOR}.strategy", other_than(*FSDP, "megatron"), "'fsdp', 'fsdp2' or 'megatron'",
            "this release knows verl's FSDP and Megatron engines",
        ),
        Setting(
            f"{ROLLOUT}.name", other_than("vllm", "sglang"), "'vllm' or 'sglang'",
            "this release reads back vLLM and SGLang alone",
        ),
        Setting(
            f"{ROLLOUT}.disaggregation.enabled", given, "False", "servers that divide prompts from answers are not read back",
        ),
        Setting(
            f"{ROLLOUT}.calculate_log_probs", off, "True",
            "without the engine's log-probabilities there is no gap to measure",
        ),
        Setting("distillation.enabled", given, "False", "the loss of distillation is not ours to extend"),
        Setting(
            f"{KWARGS}.vllm.worker_extension_cls", lambda value, _: bool(value) and not derives(value, EXTENSION),
            f"{EXTENSION}, or a class derived from it", "the rollout server proves by that class that it is as asked",
            "Derive your class from ours, or remove it",
        ),
        Setting(
            f"{KWARGS}.vllm.quantization", lambda value, asked: asked.engine == "vllm" and bool(value), f"{ROLLOUT}.quantization",
            "verl would load each weight update as if the engine's layers were not quantized",
        ),
        Setting(
            VENDOR_VARIABLE, other_than("", TRAINER), TRAINER, "this vendor's engine knows nothing of the block", "Remove it",
            lambda asked: asked.variables.get(VENDOR_VARIABLE, os.environ.get(VENDOR_VARIABLE)),
        ),
        Setting(
            MODULES_VARIABLE, lambda value, _: value is not None and TRAINERS not in value.split(","),
            f"a list with {TRAINERS}", "the Ray job's own runtime_env has it, and Ray lets nobody change it",
            "Add that module to it there, or submit the job without it", lambda asked: asked.job_variables.get(MODULES_VARIABLE),
        ),
        Setting(
            "model_engine", lambda value, asked: value == "megatron" and asked.strategy in FSDP,
            f"'dp', or {ACTOR}.strategy='megatron'", "the actor has Megatron's settings and not its strategy",
            f"Set {ACTOR}.strategy=megatron and {REF}.strategy=megatron, or model_engine=dp",
        ),
    )),
    Case(f"trainer_mode={SEPARATE!r} and a mismatch block", lambda asked: asked.mode == SEPARATE, (
        Setting(
            HYBRID, given, "False",
            "verl would add servers that only validate, and sleep between validations with older weights",
            f"Set {HYBRID}=False",
        ),
    )),
    Case("a mismatch block", lambda asked: asked.mode != SEPARATE, (
        Setting(
            HYBRID, off, f"True, or trainer_mode={SEPARATE!r}", "the rollout server is checked through the actor's workers",
        ),
    )),
    Case("an asynchronous trainer_mode and a mismatch block", lambda asked: asked.mode != SYNC, (
        Setting(f"{ACTOR}.strategy", other_than(*FSDP), "'fsdp' or 'fsdp2'", "those modes were run with FSDP only"),
        Setting(f"{ROLLOUT}.name", other_than("vllm"), "'vllm'", "those modes were run with vLLM only"),
    )),
    Case("a mismatch block", lambda _: True, (
        Setting(
            f"{REF}.strategy", lambda value, asked: value is not None and {value, asked.strategy} not in SAME, "the actor's",
            "the worker has one kind of engine for both",
        ),
    )),
    Case("an alarm of mismatch.monitor that stops training (action: stop)", lambda asked: asked.stops, (
        Setting(
            f"{ACTOR}.checkpoint.async_save", given, "False",
            "the checkpoint with which it stops would not be found by resume_mode=auto, because verl then writes no "
            "latest_checkpointed_iteration.txt before the run ends, and may be unfinished",
            "Change it, or let the alarm warn (action: warn)",
        ),
    )),
    Case("SGLang and a mismatch block", lambda asked: asked.engine == "sglang", (
        Setting(f"{ROLLOUT}.data_parallel_size", other_than(1), "1", "a server answers for its first engine alone"),
        Setting(
            f"{ROLLOUT}.tensor_model_parallel_size",
            lambda _, asked: _ranks(asked) > int(asked.at(f"{ROLLOUT}.n_gpus_per_node", _ranks(asked))),
            "as many ranks (tensor times pipeline parallel) as a node has",
            "a server on each of the replica's nodes, of which the first alone says what it runs with",
        ),
    )),
    Case("SGLang and mismatch.routing.mode='R3'", lambda asked: asked.engine == "sglang" and asked.routing == "R3", (
        Setting(
            f"{ROLLOUT}.skip_tokenizer_init", off, "True, verl's default",
            "verl then reads routes by a module that SGLang no longer has",
        ),
    )),
    Case(f"{ACTOR}.strategy='megatron'", lambda asked: asked.megatron, (
        Setting(
            "mismatch.precision", given, f"{LEFT_OUT}, or strategy='fsdp2'",
            "dtypes and loss scale of verl's Megatron engine are set elsewhere",
        ),
        Setting(
            "mismatch.monitor.weight_sync", other_than("off"), f"'off', or {LEFT_OUT}", NO_PROBES,
        ),
        Setting("mismatch.routing.reference", given, "False", "verl never replays its reference engine"),
        Setting(
            f"{MODEL}.use_fused_kernels", given, "False", "its fused head was not run with this package's loss",
        ),
    )),
    Case("mismatch.routing and strategy='megatron'", lambda asked: asked.megatron and asked.routing is not None, (
        Setting(
            "mismatch.routing.measured", other_than(0, RoutingConfig(mode="R3").measured), LEFT_OUT,
            "routes are not compared with the routers' own choice there", f"Remove it, or set {ACTOR}.strategy=fsdp2",
        ),
        Setting(
            f"{MODEL}.use_remove_padding", off, "True",
            "verl packs routes without padding, so that those of a padded batch are other tokens'",
        ),
        Setting(
            f"{MODEL}.mtp.enable", given, "False",
            "routers that predict further tokens have no routes, and would choose for themselves",
        ),
        Setting(
            f"{ACTOR}.megatron.router_replay.mode", lambda value, asked: value not in (None, "disabled", asked.routing),
            "that of mismatch.routing.mode", "the two contradict each other",
        ),
        Setting(
            f"{ROLLOUT}.enable_rollout_routing_replay", lambda value, asked: bool(value) and asked.routing == "R2",
            "False with R2", "verl would replay the rollout's routes instead of the actor's own",
        ),
    )),
    Case("mismatch.precision of another dtype than bfloat16", lambda asked: asked.at(DTYPE, "bfloat16") != "bfloat16", (
        Setting(f"{MODEL}.lora.merge", given, "False", "merged adapters are sent in bfloat16"),
        Setting(f"{ACTOR}.fsdp_config.qat.enable", given, "False", "quantized weights have a dtype of their own"),
        Setting(
            f"{ROLLOUT}.checkpoint_engine.backend", lambda value, _: str(value).startswith("delta"), "'naive'",
            "it sends weights in bfloat16",
        ),
    )),
    Case("mismatch.precision", lambda asked: asked.block.precision is not None, (
        Setting(
            f"{ROLLOUT}.quantization",
            lambda value, asked: bool(value) and value not in QUANTIZATIONS.get(asked.engine, (value,)),
            "'fp8', and with vLLM 'torchao' or 'ascend'", "verl refuses others when the rollout starts",
        ),
        Setting(
            f"{KWARGS}.sglang.quantization",
            lambda value, asked: asked.engine == "sglang" and bool(value) and value != asked.at(f"{ROLLOUT}.quantization"),
            f"{ROLLOUT}.quantization='fp8'",
            f"verl quantizes what it sends to SGLang by {ROLLOUT}.quantization alone, and SGLang's quantized layers take no "
            "other tensors: the first update would end the run",
        ),
        Setting(
            f"{ROLLOUT}.quantization", lambda value, asked: (value or None) != asked.at(ENGINE_WEIGHTS),
            "that of mismatch.precision.engine_weights", "the rollout would not compute in mismatch.precision.dtype",
            "Name in engine_weights what the rollout is quantized to",
        ),
        Setting(
            f"{KWARGS}.vllm.kv_cache_dtype", _other_cache, "that of mismatch.precision",
            "keys and values would have another format",
            f"Name it in {KV_CACHE}, or remove it",
        ),
        *(
            Setting(f"{role}.fsdp_config.mixed_precision.param_dtype", _other_dtype, *CONTRADICTS)
            for role in (ACTOR, REF)
        ),
        Setting(  # bfloat16 is verl's default, so perhaps nobody asked for it
            f"{ROLLOUT}.dtype", lambda value, asked: _other_dtype(value, asked) and spelled(value) != "bfloat16", *CONTRADICTS,
        ),
    )),
    Case("mismatch.routing", lambda asked: asked.routing is not None, (
        Setting(
            f"{MODEL}.path", lambda value, _: value is not None and dense(str(value)), "a mixture of experts",
            "its configuration names no experts, so there is nothing to replay", "Remove mismatch.routing",
            value=lambda asked: asked.at(f"{MODEL}.hf_config_path") or asked.at(f"{MODEL}.path"),
        ),
    )),
    Case("mismatch.sampling_mask", lambda asked: asked.block.sampling_mask is not None, (
        Setting(f"{ROLLOUT}.name", other_than("vllm"), "'vllm'", "masks are read off vLLM's answers alone"),
        Setting(
            f"{ACTOR}.strategy", other_than(*FSDP), "'fsdp' or 'fsdp2'", "masks are applied in verl's FSDP engine alone",
        ),
        Setting(
            f"{MODEL}.use_fused_kernels", given, "False",
            "a fused head returns log-probabilities over the whole vocabulary, and no logits",
        ),
        *(
            Setting(path, other_than(PROCESSED), repr(PROCESSED), "masks are read off what truncation has left")
            for path in (f"{ROLLOUT}.logprobs_mode", f"{KWARGS}.vllm.logprobs_mode")
        ),
        Setting(
            f"{ROLLOUT}.agent.agent_loop_manager_class", lambda value, _: bool(value) and not derives(value, LOOPS),
            f"{LOOPS!r}, or a class derived from it", "masks are joined to rollouts in this package's",
        ),
        Setting(f"{ROLLOUT}.mtp.enable_rollout", given, "False", "masks of drafted tokens were not run"),
        Setting(
            f"{ACTOR}.entropy_coeff", given, "0",
            "log-probabilities are over the masks, and verl's entropy is over the whole vocabulary",
        ),
    )),
    Case("mismatch.correction", lambda asked: asked.correction is not None, (
        *(
            Setting(f"{CORRECTION}.{key}", given, LEFT_OUT, "both would weigh the same tokens", REMOVE_ONE)
            for key in ("rollout_is", "rollout_rs", "bypass_mode")
        ),
        Setting(
            "mismatch.correction.level", one_of("geometric"), "'token' or 'sequence'",
            "verl's rollout_correction has no setting for it", NAME_A_PRESET, _of_correction("level"),
        ),
        Setting(
            "mismatch.correction.veto", other_than(), LEFT_OUT, "verl's rollout_correction has no setting for it",
            NAME_A_PRESET, _of_correction("veto"),
        ),
        Setting(
            "mismatch.correction.confidence", other_than(), LEFT_OUT, "verl's rollout_correction has no setting for it",
            NAME_A_PRESET, _of_correction("confidence"),
        ),
        Setting(
            "mismatch.correction.lower",
            lambda value, asked: value is not None and asked.clips,
            f"{LEFT_OUT}, or bound='mask'", "verl's rollout_correction has no setting for it", NAME_A_PRESET,
            _of_correction("lower"),
        ),
    )),
    Case("mismatch.correction.mode='bypass'", lambda asked: asked.correction is not None and asked.bypass, (
        Setting(
            "mismatch.correction.normalize", given, "False",
            "the weights are those of the current policy, a micro-batch at a time, and would be divided by its mean and not the "
            "batch's", "Remove it, or set mode='decoupled'", _of_correction("normalize"),
        ),
        Setting(
            f"{POLICY_LOSS}.loss_mode", other_than("vanilla"), "'vanilla'", "that has a policy loss of its own", REMOVE_ONE,
        ),
    )),
    Case("mismatch.correction.mode='decoupled'", lambda asked: asked.correction is not None and not asked.bypass, (
        Setting(
            f"{POLICY_LOSS}.loss_mode", one_of("bypass_mode"), "another, or mismatch.correction.mode='bypass' with 'vanilla'",
            "that loss rejects and weights by policy_loss.rollout_correction, not by this section",
        ),
    )),
    Case("mismatch.correction.off_policy_threshold", lambda asked: asked.drops, (
        Setting(
            f"{POLICY_LOSS}.loss_mode", one_of(*NOT_BY_ADVANTAGE), f"none of {', '.join(NOT_BY_ADVANTAGE)}",
            "that loss has terms that no advantage multiplies, so that a sequence cannot be taken out",
            "Leave out one of the two",
        ),
        Setting(
            f"{ACTOR}.entropy_coeff", given, "0", "the entropy of dropped sequences would still be trained on",
            "Set it to 0, or leave out off_policy_threshold",
        ),
    )),
    Case(f"{CORRECTION}.bypass_mode=False", lambda asked: asked.correction is None and not asked.bypass, (
        Setting(
            f"{POLICY_LOSS}.loss_mode", one_of("bypass_mode"), f"{CORRECTION}.bypass_mode=True with it",
            "its ratio would be that to the trainer's own old policy, not to the rollout's", "Set both, or neither",
        ),
        Setting(
            f"{CORRECTION}.loss_type", other_than("ppo_clip"), "'ppo_clip'", "it has no effect in verl",
            "Remove it, or set bypass_mode=True",
        ),
    ), measurable=True),
    Case(f"{CORRECTION}.bypass_mode=True", lambda asked: asked.correction is None and asked.bypass, (
        Setting(
            f"{POLICY_LOSS}.loss_mode",
            lambda value, asked: asked.inert and value not in (None, "vanilla", "bypass_mode"), "'vanilla'",
            "verl applies weights, rejection and loss_type of bypass mode in its loss 'bypass_mode' alone", REMOVE_ONE,
        ),
        Setting(
            f"{POLICY_LOSS}.rollout_correction", _differs, f"that of {CORRECTION}",
            "the driver reads one of them, the loss the other, and they differ", "Remove it: it is set to the other",
        ),
    ), measurable=True),
    Case("bypass mode, which takes no pass of the trainer over fresh rollouts", lambda asked: asked.bypass, (
        Setting(
            "mismatch.routing.mode", one_of("R2"), "'R3'", "R2 records that pass", "Use R3, or a decoupled correction",
        ),
        Setting(
            "mismatch.lr.trigger", one_of("mismatch_kl", "f_tau"), "'response_length' or 'grad_norm'",
            "there is no gap to lead the rate",
        ),
    )),
    Case("verl", lambda asked: asked.block.kl is not None, (
        Setting(
            "mismatch.kl.estimator", one_of("full"), f"one of {', '.join(ESTIMATORS)}",
            "it needs the logits of policy and reference for the same tokens in one process, and verl's reference is scored in a "
            "pass of its own that keeps the sampled tokens' alone",
        ),
    )),
    Case("mismatch.kl.reward_path='rewards'", lambda asked: asked.block.kl is not None and asked.block.kl.in_rewards, (
        Setting(
            "algorithm.adv_estimator", one_of("gdpo"), "another",
            "it normalizes the components of the reward function and reads no token-level rewards",
            "Change it, or set reward_path='surrogate'",
        ),
        Setting(
            f"{ACTOR}.use_kl_loss", given, "False", "it asks for a second KL term in the loss",
            "Remove one of the two (placement='both' has a part on either side)",
        ),
    )),
    Case("mismatch.kl outside of the rewards", lambda asked: asked.block.kl is not None and not asked.block.kl.in_rewards, (
        Setting(
            "algorithm.use_kl_in_reward", given, "False", "both would regularize",
            "Remove one of the two, or set reward_path='rewards'",
        ),
    )),
)  # fmt: skip


def refused(config: Mapping[str, Any], block: MismatchConfig, case: str = "") -> Iterator[tuple[Case, Setting, Any]]:
    """Yield the case, setting and value of what is refused of a configuration, in cases whose words begin with `case`."""
    asked = Asked(config, block)
    for one in TABLE:
        for setting in one.settings if one.words.startswith(case) and one.holds(asked) else ():
            value = asked.at(setting.path) if setting.value is None else setting.value(asked)
            if setting.bad(value, asked):
                yield one, setting, value


def reasons(config: Mapping[str, Any], block: MismatchConfig, case: str = "") -> Iterator[ConfigError]:
    """Yield an error for each setting of verl with which the block cannot work; arguments are those of `refused`."""
    for module in ELSEWHERE:
        if any(name == module or name.startswith(f"{module}.") for name in sys.modules):
            yield ConfigError(
                f"trainer={module!r} with a mismatch block: that trainer takes none of its settings; allowed: "
                "verl.trainer.main_ppo. Start main_ppo, or remove the block."
            )
    for one, setting, value in refused(config, block, case):
        if block.acts or not one.measurable:
            yield _error(one, setting, value)


def doubts(config: Mapping[str, Any], block: MismatchConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with verl's own settings in a run that is only measured, and can be measured as it is."""
    for one, setting, value in refused(config, block):
        if one.measurable and not block.acts:
            yield _error(one, setting, value)


def _error(one: Case, setting: Setting, value: Any) -> ConfigError:
    shown = f"={value!r}" if value is None or isinstance(value, (str, int, float)) else ""
    return ConfigError(
        f"{setting.path}{shown} with {one.words}: {setting.why}; allowed: {setting.allowed}. {setting.instead}."
    )


def refuse(config: Mapping[str, Any], block: MismatchConfig, case: str = "") -> None:
    """Raise the first of `reasons`."""
    for error in reasons(config, block, case):
        raise error


def dense(path: str) -> bool:
    """Tell whether a model is here, is one of transformers' own, and has a configuration without experts."""
    from transformers import AutoConfig

    try:
        # Without code of the model's own, which transformers would ask about in the terminal.
        config = AutoConfig.from_pretrained(
            Path(path).expanduser(), local_files_only=True, trust_remote_code=False
        ).to_dict()
    except Exception:  # noqa: BLE001 - whatever is wrong with it, a worker says so, and if it has no router
        return False
    return not _names_experts(config)


def _names_experts(config: Mapping[str, Any]) -> bool:
    return any(
        _names_experts(value) if isinstance(value, Mapping) else bool(value) and bool(re.search("expert|moe", str(key)))
        for key, value in config.items()
    )


def derives(name: str, own: str) -> bool:
    """Tell whether a setting names a class of this package, or one that is derived from it, by their dotted names."""
    module, _, attribute = name.rpartition(".")
    try:
        found = None if name == own else getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        return False
    bases = getattr(found, "__mro__", ())
    return name == own or any(f"{kind.__module__}.{kind.__qualname__}" == own for kind in bases)
