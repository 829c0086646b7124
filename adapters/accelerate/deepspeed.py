"""The dtypes that DeepSpeed trains in: by its configuration before its engine is there, and then read back from the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from torch import nn

from mismatch_ext.lr import innermost
from mismatch_ext.precision.audit import TrainerReading

HALVES = {"fp16": "float16", "bf16": "bfloat16"}
"""Sections of DeepSpeed's configuration that make it compute in a half dtype."""


def engine_of(accelerator: Accelerator) -> Any | None:
    """Return DeepSpeed's engine; None before training has begun."""
    # Accelerate sets it only where DeepSpeed trains.
    return getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)


def configured(accelerator: Accelerator) -> dict[str, Any]:
    """Return DeepSpeed's configuration, as far as transformers has settled it."""
    config: dict[str, Any] = accelerator.state.deepspeed_plugin.deepspeed_config
    return config


def reduce_in_float32(config: dict[str, Any]) -> None:
    """Let gradients of float16 be summed over ranks in float32, unless the configuration says otherwise."""
    if config.get("communication_data_type") is None:
        config["communication_data_type"] = "fp32"


def read_deepspeed(accelerator: Accelerator, model: nn.Module) -> TrainerReading:
    """Return what DeepSpeed trains in, read from its engine, or from its configuration before there is an engine.

    Args:
        accelerator: The trainer's.
        model: The model being trained.
    """
    engine, config = engine_of(accelerator), configured(accelerator)
    device = accelerator.device.type
    if engine is None:
        half = next((name for key, name in HALVES.items() if _enabled(config, key, accelerator.mixed_precision)), None)
        sizes = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.is_floating_point())
        scaler = _configured_scaler(config.get("fp16", {})) if half == "float16" else None
        reduce = _named(config.get("communication_data_type")) or half or "float32"
        return TrainerReading(
            parameter_dtypes={"float32": sizes},
            autocast_dtype=half,
            scaler=scaler,
            reduce_dtype=reduce if accelerator.num_processes > 1 else None,
            device=device,
        )
    masters: Counter[str] = Counter()
    for parameter in _masters(engine.optimizer):
        masters[_name(parameter.dtype)] += parameter.numel()
    # A matrix product comes out in the dtype of the weights, because DeepSpeed casts the model.
    kinds = Counter(_name(p.dtype) for p in model.parameters() if p.is_floating_point())
    computes = kinds.most_common(1)[0][0]
    return TrainerReading(
        parameter_dtypes=dict(masters),
        autocast_dtype=None if computes == "float32" else computes,
        scaler=_scaler(engine) if engine.fp16_enabled() else None,
        reduce_dtype=_name(engine.communication_data_type) if accelerator.num_processes > 1 else None,
        device=device,
    )


def forget_order(accelerator: Accelerator) -> None:
    """Let ZeRO-3 forget the order in which a pass of ours ran the modules.

    ZeRO-3 fetches weights ahead in the order of the last pass. TRL itself gathers the output projection where it computes
    log-probabilities, and that fails if ZeRO-3 is already fetching it.
    """
    optimizer = getattr(engine_of(accelerator), "optimizer", None)
    find = getattr(optimizer, "_get_param_coordinator", None)
    coordinator = None if find is None else find()
    if coordinator is not None and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def scale_metrics(accelerator: Accelerator) -> dict[str, float]:
    """Return the loss scale and the steps that were skipped for an overflow; empty where DeepSpeed scales no loss."""
    engine = engine_of(accelerator)
    if engine is None or not engine.fp16_enabled():
        return {}
    steps = engine.global_steps
    return {
        "loss_scale": float(engine.optimizer.loss_scaler.cur_scale),
        "overflow_steps": float(engine.skipped_steps),
        "overflow_frac": engine.skipped_steps / steps if steps else 0.0,
    }


def _enabled(config: Mapping[str, Any], section: str, mixed_precision: str) -> bool:
    enabled = config.get(section, {}).get("enabled")
    # When the model is prepared, accelerate settles what a file given to `accelerate launch` leaves open.
    return enabled is True or (enabled in (None, "auto") and mixed_precision == section)


def _configured_scaler(section: dict[str, Any]) -> dict[str, Any]:
    # In DeepSpeed's configuration 0 means a scale that moves, and 16 is the default power of two that it begins with.
    static = float(section.get("loss_scale") or 0)
    return {
        "class": "DeepSpeed's scaler",
        "enabled": static != 1.0,
        "scale": static or 2.0 ** section.get("initial_scale_power", 16),
    }


def _scaler(engine: Any) -> dict[str, Any]:
    scaler = engine.optimizer.loss_scaler
    # A static scale of 1 scales nothing.
    enabled = bool(scaler.dynamic) or float(scaler.cur_scale) != 1.0
    return {"class": type(scaler).__name__, "enabled": enabled, "scale": float(scaler.cur_scale)}


def _masters(optimizer: Any) -> list[Any]:
    """Return this rank's parts of the weights that the optimizer steps."""
    partitions = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    if partitions is not None:
        return list(partitions)
    return [parameter for group in innermost(optimizer).param_groups for parameter in group["params"]]


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _named(setting: str | None) -> str | None:
    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16"}
    return None if setting is None else names.get(setting, setting)
