"""Sets verl's own settings from the block, in the driver before Ray starts, and refuses configurations that cannot do it."""

from __future__ import annotations

import os
import warnings
from typing import Any

from mismatch_ext.adapters import compat
from mismatch_ext.adapters.verl.block import hand_on, handed_on
from mismatch_ext.adapters.verl.megatron.settings import megatron_settings
from mismatch_ext.adapters.verl.settings.correction import set_correction
from mismatch_ext.adapters.verl.settings.kl import set_kl
from mismatch_ext.adapters.verl.settings.masks import set_masks
from mismatch_ext.adapters.verl.settings.modes import MODES, TRAINER, run_mode, trainer_of
from mismatch_ext.adapters.verl.settings.refusals import EXTENSION, check_bypass, check_host, refused
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.utils import need_reference_policy

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, MismatchError
from mismatch_ext.precision.dtypes import SHORT, spelled
from mismatch_ext.terminal import say
from mismatch_ext.versions import PEERS, installed, on_cpu_build

MODULES_VARIABLE, VENDOR_VARIABLE = "VERL_USE_EXTERNAL_MODULES", "VERL_ENGINE_VENDOR"
"""verl's own variables: modules that it imports in every process, and the vendor by which it chooses an engine."""
TRAINERS = "mismatch_ext.adapters.verl.driver.modes"
QUANTIZATIONS = {"vllm": ("fp8", "torchao", "ascend"), "sglang": ("fp8",)}
"""Values that verl accepts as `rollout.quantization`, by engine."""


def prepare(config: DictConfig) -> dict[str, Any]:
    """Read the block from verl's configuration, and set the settings there that carry it out.

    Args:
        config: All of verl's configuration, with a root block `mismatch`; changed in place.

    Returns:
        New values for the arguments of verl's check that verl computed before the block was read.

    Raises:
        ConfigError: The block is malformed, or this configuration of verl cannot do what the block asks; the message names the
            setting, its value, what is allowed and what to do.
        PeerVersionError: A peer is missing, too old, or known to be wrong for the block.
    """
    if not _is_prepared(config):
        _prepare(config)
    return {"use_reference_policy": need_reference_policy(config)}


def _is_prepared(config: DictConfig) -> bool:
    """Tell whether the block was handed to the other processes; a trainer_mode that was set by hand is not enough."""
    ours = {trainer_of(mode) for mode in MODES}
    return OmegaConf.select(config, "trainer.v1.trainer_mode") in ours and handed_on(config)


def _prepare(config: DictConfig) -> None:
    given: Any = OmegaConf.to_container(config.mismatch, resolve=True)  # whatever the user wrote; `parse` checks it
    block = MismatchConfig.parse(given)
    assert block is not None
    if block.level == "observe":
        _observe(config, block.acting)
        return
    _check_peers(config, block)
    check_host(config, block)
    with open_dict(config):
        _set_trainer(config, block)
        megatron = config.actor_rollout_ref.actor.strategy == "megatron"
        done = megatron_settings(config, block) if megatron else []
        set_precision(config, block)
        _set_routing(config, block)
        set_masks(config, block)
        done += set_correction(config, block.correction)
        check_bypass(config, block)
        done += set_kl(config, block.kl) if block.kl is not None else []
        for line in done:
            say(f"mismatch-ext: {line}")
        _hand_on(config, block)


def _check_peers(config: DictConfig, block: MismatchConfig) -> None:
    engine = OmegaConf.select(config, "actor_rollout_ref.rollout.name")
    megatron = OmegaConf.select(config, "actor_rollout_ref.actor.strategy") == "megatron"
    cpu = {"cpu"} if engine == "vllm" and on_cpu_build() else set()
    peers = ["torch", "verl", "transformers", *([engine] if engine in PEERS else [])]
    if megatron and installed("megatron-core"):  # the workers require it; a head node may have none
        peers.append("megatron-core")
    compat.check(peers, block.features, {"verl", engine, "megatron" if megatron else "fsdp", *cpu})


def _observe(config: DictConfig, block: MismatchConfig) -> None:
    """Let our trainer measure the run, and set nothing else; a run that it cannot measure is stock verl's, with a warning."""
    try:
        _check_peers(config, block)
        check_host(config, block)
        if config.actor_rollout_ref.actor.strategy == "megatron":
            megatron_settings(config, block)
        with open_dict(config):
            _hand_on(config, block)
            _set_trainer(config, block)
    except MismatchError as error:
        warnings.warn(
            f"mismatch.level='observe': this run is not observed, and trains as without the block: {error}",
            stacklevel=2,
        )
        with open_dict(config):
            config.mismatch = None


def _set_trainer(config: DictConfig, block: MismatchConfig) -> None:
    config.trainer.v1.trainer_mode = trainer_of(run_mode(config).name)
    if config.actor_rollout_ref.rollout.name != "vllm":
        return  # SGLang's server is ours by verl's registry
    engine = config.actor_rollout_ref.rollout.engine_kwargs
    given = engine.get("vllm") or {}
    if not given.get("worker_extension_cls"):  # the user's own class derives from ours, or nothing acts
        engine.vllm = OmegaConf.merge(given, {"worker_extension_cls": EXTENSION})


def set_precision(config: DictConfig, block: MismatchConfig) -> None:
    """Set one dtype for actor, reference, weight sync and rollout."""
    if block.precision is None:
        return
    dtype, group = block.precision.dtype, config.actor_rollout_ref
    for setting, value, why in (
        (
            "actor_rollout_ref.model.lora.merge",
            OmegaConf.select(config, "actor_rollout_ref.model.lora.merge"),
            "merged adapters are sent in bfloat16",
        ),
        (
            "actor_rollout_ref.actor.fsdp_config.qat.enable",
            OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.qat.enable"),
            "quantised weights have a dtype of their own",
        ),
    ):
        if value and dtype != "bfloat16":
            raise refused(setting, value, "False", f"{why}, not in {dtype}")
    backend = group.rollout.checkpoint_engine.backend
    if str(backend).startswith("delta") and dtype != "bfloat16":
        raise refused(
            "actor_rollout_ref.rollout.checkpoint_engine.backend",
            backend,
            "'naive'",
            f"it sends weights in bfloat16, not in {dtype}",
        )
    setting, quantization = _quantization(group.rollout)
    if quantization != block.precision.engine_weights:
        raise refused(
            setting,
            quantization,
            repr(block.precision.engine_weights),
            f"the rollout would not compute in {dtype}; what is quantised on purpose is named in "
            "mismatch.precision.engine_weights",
        )
    wanted = {"param_dtype": SHORT[dtype], "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    for role in ("actor", "ref"):
        fsdp = group[role].fsdp_config
        given = fsdp.get("mixed_precision")
        found = None if given is None else given.get("param_dtype")
        if found is not None and spelled(found) != dtype:
            raise ConfigError(
                f"actor_rollout_ref.{role}.fsdp_config.mixed_precision.param_dtype={found!r} with mismatch.precision.dtype="
                f"{dtype!r}: the two contradict each other; remove one of them."
            )
        fsdp.mixed_precision = {**wanted, **(dict(given) if given is not None else {})}
        if spelled(fsdp.dtype) != dtype:
            # verl documents this key as the training dtype, but reads it only for Megatron.
            say(
                f"mismatch-ext: actor_rollout_ref.{role}.fsdp_config.dtype={fsdp.dtype!r} is ignored by verl's FSDP engine; "
                f"mismatch.precision sets mixed_precision.param_dtype={wanted['param_dtype']!r}, which it reads."
            )
            fsdp.dtype = dtype
    found = group.rollout.dtype
    if spelled(found) not in (dtype, "bfloat16"):  # bfloat16 is verl's default, so perhaps nobody asked for it
        raise ConfigError(
            f"actor_rollout_ref.rollout.dtype={found!r} with mismatch.precision.dtype={dtype!r}: the two contradict each "
            "other; remove one of them."
        )
    group.rollout.dtype = dtype


def _quantization(rollout: DictConfig) -> tuple[str, str | None]:
    """Return the setting that says how a rollout is quantised, and its value; the engine's own setting wins over verl's.

    Raises:
        ConfigError: verl's setting has a value that verl refuses when the rollout starts, or the engine's setting has a value
            for which verl cannot send weights.
    """
    path = "actor_rollout_ref.rollout"
    own = (rollout.engine_kwargs.get(rollout.name) or {}).get("quantization")
    value = rollout.get("quantization") or None
    allowed = QUANTIZATIONS.get(rollout.name, (value,))
    if value is not None and value not in allowed:
        raise refused(
            f"{path}.quantization", value, " or ".join(map(repr, allowed)), "verl refuses others when the rollout starts",
            f"Give the engine's own name of a format as {path}.engine_kwargs.vllm.quantization"
            if rollout.name == "vllm" else f"Set {path}.name=vllm and its engine_kwargs.vllm.quantization for vLLM's formats",
        )  # fmt: skip
    if rollout.name == "sglang" and own and own != value:
        raise refused(
            f"{path}.engine_kwargs.sglang.quantization", own, f"{path}.quantization={' or '.join(map(repr, allowed))}",
            f"verl quantises what it sends to SGLang by {path}.quantization alone, and SGLang's quantised layers take no other "
            "tensors: the first update would end the run",
        )  # fmt: skip
    if own and OmegaConf.select(rollout, "mtp.enable_rollout"):
        raise refused(
            f"{path}.mtp.enable_rollout", True, "False",
            "vLLM reloads and quantises each layer of an update once, and the drafter shares layers with it; not run yet",
            f"Leave it out, or {path}.engine_kwargs.{rollout.name}.quantization",
        )  # fmt: skip
    return (f"{path}.engine_kwargs.{rollout.name}.quantization", own) if own else (f"{path}.quantization", value)


def _set_routing(config: DictConfig, block: MismatchConfig) -> None:
    """Under R3, let the rollout record its routes, by verl's own switch."""
    if block.routing is None:
        return
    rollout = config.actor_rollout_ref.rollout
    if block.routing.mode == "R3":
        rollout.enable_rollout_routing_replay = True


def _hand_on(config: DictConfig, block: MismatchConfig) -> None:
    """Give the block to every process that verl starts, and let verl import our trainers there, as its own hook does."""
    hand_on(config, block, run_mode(config))
    init = config.ray_kwargs.ray_init
    runtime = init.get("runtime_env") or {}
    given = dict(runtime.get("env_vars") or {})
    if (vendor := given.get(VENDOR_VARIABLE, os.environ.get(VENDOR_VARIABLE))) not in (None, TRAINER):
        raise refused(VENDOR_VARIABLE, vendor, TRAINER, "this vendor's engine knows nothing of the block", "Remove it")
    modules = str(given.get(MODULES_VARIABLE) or os.environ.get(MODULES_VARIABLE, "")).split(",")
    names = ",".join(dict.fromkeys([*filter(None, modules), TRAINERS]))
    init.runtime_env = OmegaConf.merge(runtime, {"env_vars": {**given, MODULES_VARIABLE: names}})
