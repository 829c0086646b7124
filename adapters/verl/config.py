"""Sets verl's own settings from the block, in the driver before Ray starts; `refusals.py` says what cannot be set."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mismatch_ext.adapters import compat
from mismatch_ext.adapters.verl import refusals
from mismatch_ext.adapters.verl.block import RunMode, check_unedited, given_in, hand_on, handed_on
from mismatch_ext.adapters.verl.refusals import (
    ACTOR,
    CORRECTION,
    EXTENSION,
    LOOPS,
    MODULES_VARIABLE,
    ROLLOUT,
    TRAINERS,
    Asked,
    settings_of,
    trainer_of,
)
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.utils import need_reference_policy

from mismatch_ext.config import CorrectionConfig, KlConfig, MismatchConfig
from mismatch_ext.errors import ConfigError, MismatchError
from mismatch_ext.kl import ragged_bias
from mismatch_ext.precision.dtypes import SHORT, spelled
from mismatch_ext.presets import Interval, ResolvedCorrection
from mismatch_ext.rollout import SamplingSettings
from mismatch_ext.terminal import say_in_run
from mismatch_ext.versions import PEERS, installed, on_cpu_build

UNBOUNDED = (1e-9, 1e9)
"""Bounds of a mask that has none: verl wants both, and its ratios are from exp(-20) to exp(20)."""


def prepare(config: DictConfig) -> dict[str, Any]:
    """Set verl's settings from the block `mismatch` of its configuration, and return new values for arguments of verl's check.

    A configuration that was prepared before is left as it is. Raises ConfigError if the block is malformed, if this configuration
    cannot do what it asks, or if it was prepared for another block; PeerVersionError if a peer is missing, too old, or known to
    be wrong for the block.
    """
    if handed_on(config):
        check_unedited(config)
    else:
        block = given_in(config)
        assert block is not None
        _prepare(config, block)
    return {"use_reference_policy": need_reference_policy(config)}


def _prepare(config: DictConfig, block: MismatchConfig) -> None:
    handed = handed_block(config, block)
    error = next(reasons(config, handed), None)
    if error is not None:
        if block.acts:
            raise error
        warnings.warn(f"mismatch: nothing is measured, and verl trains without the config. {error}", stacklevel=2)
        with open_dict(config):
            config.mismatch = None
        return
    for doubt in refusals.doubts(config, handed):
        warnings.warn(f"mismatch: the run is measured as it is, but look at this setting. {doubt}", stacklevel=2)
    with open_dict(config):
        if block.acts:
            for line in _set_sections(config, handed):
                say_in_run(f"mismatch-ext: {line}")
        _enter(config, handed, block)


def reasons(config: DictConfig, block: MismatchConfig) -> Iterator[MismatchError]:
    """Yield each reason for which the driver refuses a block, before it sets anything."""
    try:
        _check_peers(config, block)
    except MismatchError as error:
        yield error
    yield from refusals.reasons(config, block)


def handed_block(config: DictConfig, block: MismatchConfig) -> MismatchConfig:
    """Return the block that verl's processes get: without what cannot be done here, and was not asked for or only measures.

    Under Megatron, weight updates are not verified: a default that the user has not set is switched off with a note, and a check
    that the user has asked for, in a block that only measures, with a warning.
    """
    asked = block.monitor.weight_sync
    if asked == "off" or Asked(config, block).strategy != "megatron":
        return block
    if asked is None:
        say_in_run(f"mismatch-ext: mismatch.monitor.weight_sync='off': {refusals.NO_PROBES}.")
    elif not block.acts:
        warnings.warn(f"mismatch.monitor.weight_sync={asked!r} is left out: {refusals.NO_PROBES}.", stacklevel=4)
    else:
        return block  # the table refuses it
    return replace(block, monitor=replace(block.monitor, weight_sync="off"))


def _check_peers(config: DictConfig, block: MismatchConfig) -> None:
    engine = OmegaConf.select(config, f"{ROLLOUT}.name")
    megatron = OmegaConf.select(config, f"{ACTOR}.strategy") == "megatron"
    cpu = {"cpu"} if engine == "vllm" and on_cpu_build() else set()
    peers = ["torch", "verl", "transformers", *([engine] if engine in PEERS else [])]
    if megatron and installed("megatron-core"):  # the workers require it; a head node may have none
        peers.append("megatron-core")
    compat.check(peers, block.features, {"verl", engine, "megatron" if megatron else "fsdp", *cpu})


def _enter(config: DictConfig, block: MismatchConfig, given_block: MismatchConfig) -> None:
    """Let verl take our trainer and servers, and give the block to every process that verl starts."""
    asked = Asked(config, block)
    updates = OmegaConf.select(config, f"trainer.v1.{asked.mode}.parameter_sync_step") or 1
    hand_on(config, block, RunMode(name=asked.mode, updates=int(updates)), given_block)
    config.trainer.v1.trainer_mode = trainer_of(asked.mode)
    if asked.engine == "vllm":  # SGLang's server is ours by verl's registry
        kwargs = config.actor_rollout_ref.rollout.engine_kwargs
        given = kwargs.get("vllm") or {}
        if not given.get("worker_extension_cls"):
            kwargs.vllm = OmegaConf.merge(given, {"worker_extension_cls": EXTENSION})
    job = json.loads(
        os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}"
    )  # of the Ray job that this driver was submitted as
    given_to_job = (job.get("runtime_env") or {}).get("env_vars") or {}
    if TRAINERS in given_to_job.get(MODULES_VARIABLE, "").split(","):
        return  # Ray itself refuses a driver that gives one of the job's variables another value
    init = config.ray_kwargs.ray_init
    own = str(asked.variables.get(MODULES_VARIABLE) or os.environ.get(MODULES_VARIABLE, "")).split(",")
    modules = ",".join(dict.fromkeys([*filter(None, own), TRAINERS]))
    init.runtime_env = OmegaConf.merge(
        init.get("runtime_env") or {}, {"env_vars": {**asked.variables, MODULES_VARIABLE: modules}}
    )


def _set_sections(config: DictConfig, block: MismatchConfig) -> list[str]:
    """Set what the sections ask for, and return lines for the log."""
    done = []
    if OmegaConf.select(config, f"{ACTOR}.strategy") == "megatron":
        done += _set_megatron(config, block)
    elif block.precision is not None:
        set_precision(config, block)
    if block.routing is not None and block.routing.mode == "R3":
        config.actor_rollout_ref.rollout.enable_rollout_routing_replay = True
    if block.sampling_mask is not None:
        _set_masks(config, block)
    if block.correction is not None:
        done += set_correction(config, block.correction)
    return done + ([] if block.kl is None else set_kl(config, block.kl))


def set_precision(config: DictConfig, block: MismatchConfig) -> None:
    """Set one dtype for actor, reference, weight sync and rollout."""
    assert block.precision is not None
    dtype, group = block.precision.dtype, config.actor_rollout_ref
    wanted = {"param_dtype": SHORT[dtype], "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    ignored = False
    for role in ("actor", "ref"):
        fsdp = group[role].fsdp_config
        fsdp.mixed_precision = {**wanted, **dict(fsdp.get("mixed_precision") or {})}
        ignored |= spelled(fsdp.dtype) != dtype
        fsdp.dtype = dtype
    if ignored:  # verl documents it as the training dtype, but reads it only for Megatron
        say_in_run(
            f"mismatch-ext: mismatch.precision sets fsdp_config.mixed_precision.param_dtype={wanted['param_dtype']} for actor "
            "and reference (verl's FSDP engine ignores fsdp_config.dtype)."
        )
    group.rollout.dtype = dtype


def _set_masks(config: DictConfig, block: MismatchConfig) -> None:
    """Let vLLM report as many of its most likely tokens as the masks need, and our agent loops join them to rollouts."""
    assert block.sampling_mask is not None
    rollout = config.actor_rollout_ref.rollout
    if OmegaConf.select(rollout, "agent.agent_loop_manager_class") is None:
        OmegaConf.update(rollout, "agent.agent_loop_manager_class", LOOPS, force_add=True)
    asked = block.sampling_mask.asked(
        SamplingSettings(
            temperature=float(rollout.temperature), top_p=float(rollout.top_p), top_k=max(int(rollout.top_k), 0)
        )
    )
    given = dict(rollout.engine_kwargs.get("vllm") or {})
    limit = given.get("max_logprobs")
    if limit is None or -1 < limit < asked:  # -1 stands for the whole vocabulary
        rollout.engine_kwargs.vllm = OmegaConf.merge(given, {"max_logprobs": asked})


def _set_megatron(config: DictConfig, block: MismatchConfig) -> list[str]:
    done, group = [], config.actor_rollout_ref
    if block.lr is not None:
        # The control counts the updates of its checkpoint's schedule.
        group.actor.optim.use_checkpoint_opt_param_scheduler = True
        done.append(
            f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler=True: with mismatch.lr a resumed run takes its schedule from the "
            "checkpoint, where verl's default begins warm-up and decay again; the rates and steps of actor.optim are then the "
            "checkpoint's, too."
        )
    if block.routing is not None:
        OmegaConf.update(config, f"{ACTOR}.megatron.router_replay.mode", block.routing.mode)
        done.append(
            f"{ACTOR}.megatron.router_replay.mode={block.routing.mode!r}: routing is replayed by verl's own Megatron engine, and "
            "each sample's routes are checked before its batch runs."
        )
    return done


# KL


def coefficient(section: KlConfig, config: DictConfig) -> float:
    """Return the first coefficient: the section's, or verl's `actor.kl_loss_coef` or, for rewards, `kl_ctrl.kl_coef`."""
    if section.coef is not None:
        return section.coef
    name = "algorithm.kl_ctrl.kl_coef" if section.in_rewards else f"{ACTOR}.kl_loss_coef"
    value = float(OmegaConf.select(config, name))
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}={value!r} with mismatch.kl: allowed: a number > 0; set it, or set mismatch.kl.coef.")
    return value


def set_kl(config: DictConfig, section: KlConfig) -> list[str]:
    """Let verl build its reference policy and carry what the section needs, and say what was set.

    verl's own KL term stays out of the loss: see `loss.py`.
    """
    actor, algorithm, coef = config.actor_rollout_ref.actor, config.algorithm, coefficient(section, config)
    done = []
    if section.in_rewards:
        algorithm.use_kl_in_reward = True
        algorithm.kl_ctrl.kl_coef = coef
        done.append(f"algorithm.use_kl_in_reward=True, kl_ctrl.kl_coef={coef:g}: mismatch.kl takes the place of verl's")
    else:
        actor.use_kl_loss = True
    if section.in_loss:
        actor.kl_loss_coef = coef
        done.append(f"actor.kl_loss_coef={coef:g}: the term of mismatch.kl takes the place of verl's kl_loss_type")
    if actor.loss_agg_mode == "seq-mean-token-mean":
        said = ragged_bias(section, "actor.loss_agg_mode='seq-mean-token-mean'", "token-mean or seq-mean-token-sum")
        done += [] if said is None else [said]
    return done


# Correction. In verl 0.9.1 a policy loss reads `actor.policy_loss`, and `algorithm.rollout_correction.bypass_mode` reaches the
# driver alone: the weights, rejection and `loss_type` beside it have no effect. So both places are set.


def set_correction(config: DictConfig, section: CorrectionConfig) -> list[str]:
    """Set in verl's configuration what the section asks for, and say what was set."""
    native = native_rollout_correction(settings_of(section))
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    with open_dict(config):
        given = config.algorithm.get("rollout_correction") or DictConfig({})
        config.algorithm.rollout_correction = OmegaConf.merge(given, native)
        if native["bypass_mode"]:
            policy_loss.loss_mode, policy_loss.rollout_correction = "bypass_mode", native
    done = [f"{CORRECTION}: {', '.join(f'{key}={value!r}' for key, value in native.items())}"]
    if native["bypass_mode"]:
        done.append(
            f"{ACTOR}.policy_loss.loss_mode='bypass_mode', with the settings of the correction: verl 0.9.1 itself does not hand "
            "them to its loss"
        )
    return done


def native_rollout_correction(settings: ResolvedCorrection) -> dict[str, Any]:
    """Return verl's `rollout_correction` for resolved settings, without `off_policy_threshold`, which the loss applies."""
    inverse = "verl_inverse_k1" in settings.compat
    return {
        "rollout_is": None if settings.level == "none" else settings.level,
        "rollout_is_threshold": 2.0 if settings.level == "none" else _native_threshold(settings),
        "rollout_is_batch_normalize": settings.normalize,
        "rollout_rs": ",".join(settings.rules) or None,
        "rollout_rs_threshold": ",".join(_native_bounds(bounds, inverse) for bounds in settings.rules.values()) or None,
        "bypass_mode": settings.mode == "bypass",
        "loss_type": settings.loss,
    }


def _native_threshold(settings: ResolvedCorrection) -> float | str | None:
    if settings.bound in ("truncate", "clip"):
        return settings.upper
    given = zip((settings.lower, settings.upper), UNBOUNDED, strict=True)
    return "_".join(repr(unbounded if bound is None else bound) for bound, unbounded in given)


def _native_bounds(bounds: Interval, inverse: bool) -> str:
    """Return a rule's threshold as verl reads it: its k1 rules compare 1/rho with their bounds."""
    lower, upper = bounds
    if lower is None:
        return repr(upper)
    return f"{lower!r}_{upper!r}" if inverse else f"{1 / upper!r}_{1 / lower!r}"
