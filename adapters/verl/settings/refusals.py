"""Refuses, before Ray starts, configurations of verl in which a block or a part of it would do nothing or do harm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from mismatch_ext.adapters.verl.settings.modes import MODES, unsupported
from omegaconf import DictConfig, OmegaConf

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError

FSDP = {"fsdp", "fsdp2"}
"""Strategies of verl's FSDP engine; verl has one class for both."""
EXTENSION = "mismatch_ext.adapters.verl.rollout.vllm_extension.RolloutExtension"
LOOPS = "mismatch_ext.adapters.verl.rollout.loops.MaskedLoopManager"
# Other trainers of verl that check their configuration as main_ppo does. The list names modules one by one, because main_ppo
# uses modules beside them too: its separate_async has a worker from verl.experimental.separation.
ELSEWHERE = (
    "verl.experimental.one_step_off_policy",
    "verl.experimental.fully_async_policy",
    "verl.experimental.separation.ray_trainer",
)
# Setting, allowed values, and why no other value is allowed. A setting that verl's configuration lacks is skipped.
REQUIRED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("trainer.use_v1", (True,), "the deprecated trainer has no registry that ours could enter by"),
    ("trainer.v1.trainer_mode", MODES, "this release has a trainer for each mode of verl's own, and for no other"),
    (
        "actor_rollout_ref.actor.strategy",
        ("fsdp", "fsdp2", "megatron"),
        "this release knows verl's FSDP and Megatron engines",
    ),
    ("actor_rollout_ref.rollout.name", ("vllm", "sglang"), "this release reads back vLLM and SGLang alone"),
    (
        "actor_rollout_ref.rollout.disaggregation.enabled",
        (False,),
        "servers that divide prompts from answers are not read back",
    ),
    (
        "actor_rollout_ref.rollout.calculate_log_probs",
        (True,),
        "without the engine's log-probabilities there is no gap to measure",
    ),
    ("distillation.enabled", (False,), "the loss of distillation is not ours to extend"),
)


def refused(setting: str, value: object, allowed: str, why: str, instead: str = "Change it") -> ConfigError:
    """Return the error that names a setting, its value, why it is refused, what is allowed and what to do."""
    return ConfigError(f"{setting}={value!r} with a mismatch block: {why}; allowed: {allowed}. {instead}.")


def refuse_first(
    error: Callable[[str, object, str, str], ConfigError], *rows: tuple[str, object, bool, str, str]
) -> None:
    """Refuse the first setting that is wrong.

    Args:
        error: Makes the error from a setting, its value, what is allowed, and why.
        *rows: For each setting: its name, its value, whether it is wrong, what is allowed, and why.

    Raises:
        ConfigError: A setting is wrong.
    """
    for setting, value, wrong, allowed, why in rows:
        if wrong:
            raise error(setting, value, allowed, why)


def derives(name: str, own: str) -> bool:
    """Tell whether a setting names a class of this package, or one that is derived from it.

    Args:
        name: Dotted name of the class, as verl and vLLM import it.
        own: Dotted name of this package's class.
    """
    module, _, attribute = name.rpartition(".")
    try:
        found = None if name == own else getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        return False
    bases = getattr(found, "__mro__", ())
    return name == own or any(f"{kind.__module__}.{kind.__qualname__}" == own for kind in bases)


def check_host(config: DictConfig, block: MismatchConfig) -> None:
    """Refuse a configuration of verl with which the block cannot work.

    Args:
        config: All of verl's configuration, as it was given.
        block: The parsed block.

    Raises:
        ConfigError: A setting is refused; the message names it, its value, why, and what is allowed.
    """
    for module in ELSEWHERE:
        if any(name == module or name.startswith(f"{module}.") for name in sys.modules):
            why, instead = "that trainer takes none of its settings", "Start main_ppo, or remove the block"
            raise refused("trainer", module, "verl.trainer.main_ppo", why, instead)
    for setting, allowed, why in REQUIRED:
        value = OmegaConf.select(config, setting)
        if value is not None and value not in allowed:
            raise refused(setting, value, " or ".join(map(repr, allowed)), why)
    if (found := unsupported(config)) is not None:
        raise refused(*found)
    wanted = config.actor_rollout_ref.actor.strategy
    given = config.actor_rollout_ref.ref.strategy
    same = given == wanted or {given, wanted} <= FSDP
    if not same and (block.precision or block.routing or block.sampling_mask):
        why = "the reference would be built by another engine than the actor"
        raise refused("actor_rollout_ref.ref.strategy", given, repr(wanted), why)
    if config.actor_rollout_ref.rollout.name == "sglang":
        _check_sglang(config, block)
    setting = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"
    if (given := OmegaConf.select(config, setting)) is not None and not derives(given, EXTENSION):
        why = "the rollout server proves by that class that it is as asked"
        raise refused(
            setting, given, f"{EXTENSION}, or a class derived from it", why, "Derive your class from ours, or remove it"
        )
    setting = "actor_rollout_ref.actor.checkpoint.async_save"
    stops = [metric for metric, rule in block.monitor.alarms.items() if rule.action == "stop"]
    if OmegaConf.select(config, setting) and stops and block.level == "enforce":  # an observed run is not stopped
        why = (
            f"the alarm {stops[0]!r} stops training with a checkpoint, which resume_mode=auto would not find, because verl then "
            "writes no latest_checkpointed_iteration.txt before the run ends, and which Megatron may not have finished"
        )
        raise refused(setting, True, "False", why, "Change it, or let the alarm warn (action: warn)")
    if block.monitor.doctor is not None:
        why = "no batch is examined in a run of verl"
        instead = "Remove it, and give the checkpoint or a logged rollout to `mismatch-ext doctor --verl`"
        raise refused("mismatch.monitor.doctor", block.monitor.doctor, "none", why, instead)


def _check_sglang(config: DictConfig, block: MismatchConfig) -> None:
    setting = "actor_rollout_ref.rollout.data_parallel_size"
    if (given := OmegaConf.select(config, setting)) not in (None, 1):
        raise refused(setting, given, "1", "an SGLang server answers for its first engine alone")
    _check_one_node(config)
    setting = "actor_rollout_ref.rollout.skip_tokenizer_init"
    if block.routing is not None and block.routing.mode == "R3" and not OmegaConf.select(config, setting):
        why = "verl then reads routes by a module that SGLang no longer has"
        raise refused(setting, False, "True, verl's default", why)


def _check_one_node(config: DictConfig) -> None:
    """Refuse a replica that verl spreads over several nodes: each node has a server, and only the first server answers."""
    rollout = config.actor_rollout_ref.rollout
    sizes = {key: int(rollout.get(key) or 1) for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size")}
    ranks = sizes["tensor_model_parallel_size"] * sizes["pipeline_model_parallel_size"]
    here = int(rollout.get("n_gpus_per_node") or ranks)
    if ranks > here:
        size = " x ".join(map(str, sizes.values()))
        why = (
            f"a replica of {size} ranks ({' x '.join(sizes)}) has several nodes of {here}, with a server on each, of which the "
            "first alone says what it runs with"
        )
        setting = "actor_rollout_ref.rollout.tensor_model_parallel_size"
        raise refused(setting, sizes["tensor_model_parallel_size"], f"at most {here} ranks, one node's", why)


def check_bypass(config: DictConfig, block: MismatchConfig) -> None:
    """Refuse keys that need the trainer's pass over fresh rollouts, if bypass mode leaves that pass out.

    Args:
        config: All of verl's configuration, after the correction was set in it.
        block: The parsed block.

    Raises:
        ConfigError: A key of the block is refused; the message names it, its value, and what to do.
    """
    if not OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"):
        return
    why = "bypass mode takes no pass of the trainer over fresh rollouts"
    if block.routing is not None and block.routing.mode == "R2":
        raise refused(
            "mismatch.routing.mode", "R2", "'R3'", f"{why}, which R2 records", "Use R3, or a decoupled correction"
        )
    if block.lr is not None and block.lr.trigger in ("mismatch_kl", "f_tau"):
        why += ", so that there is no gap to lead the rate"
        raise refused("mismatch.lr.trigger", block.lr.trigger, "'response_length' or 'grad_norm'", why)
