"""Refusals before TRL builds the model or before it builds the engine, because an engine takes minutes to start on a GPU."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from mismatch_ext.adapters import compat
from mismatch_ext.adapters.trl.readings import sampling_settings

from mismatch_ext.config import MismatchConfig, PrecisionConfig, RoutingConfig
from mismatch_ext.errors import ConfigError, MismatchError, PrecisionError, ReplayError, RoutingError
from mismatch_ext.versions import on_cpu_build

# Arguments of TRL's trainers that let a completion be stitched together from several generations.
STITCHING = ("tools", "rollout_func", "environment_factory")
# Columns in which TRL looks for images.
IMAGE_COLUMNS = {"image", "images"}


def check_objective(trainer: type[Any], block: MismatchConfig) -> None:
    """Refuse sections that change the objective if the trainer's own loss would ignore them.

    Raises:
        ConfigError: `kl` or `correction` with GMPOTrainer, which multiplies its loss by no importance ratio.
    """
    for name in ("kl", "correction"):
        # By name: importing TRL's experimental trainers warns.
        if getattr(block, name) is not None and "GMPOTrainer" in (kind.__name__ for kind in trainer.__mro__):
            raise ConfigError(
                f"mismatch.{name} with {trainer.__name__}: GMPOTrainer's loss has no seam for it; allowed: precision, routing, "
                "lr and monitor. Remove it, or use MismatchGRPOTrainer."
            )


def check_peers(
    trainer: type[Any], block: MismatchConfig, *, use_vllm: bool, server: bool, stitches: bool = False
) -> None:
    """Refuse features that the block asks for and the installed peers lack; warn once of versions that were not tested.

    Args:
        trainer: The class of the trainer.
        block: The block.
        use_vllm: Whether vLLM generates.
        server: Whether vLLM is a server instead of an engine in TRL's process.
        stitches: Whether a completion may consist of several generations.

    Raises:
        PeerVersionError: A peer is missing, too old, or known to be wrong for what the block asks.
        SeamError: A peer no longer has something that a section needs, or has changed it.
    """
    peers = ["torch", "transformers", "accelerate", "trl", *(["vllm"] if use_vllm else [])]
    using = {"trl", *(kind.__name__ for kind in trainer.__mro__)}
    using |= ({"vllm"} | ({"cpu"} if on_cpu_build() else set())) if use_vllm else set()
    using |= {"server"} if use_vllm and server else set()
    using |= {"tools"} if use_vllm and stitches else set()
    compat.check(peers, block.features, using)


def check_images(block: MismatchConfig, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Refuse routing for datasets that show images; images that a dataset does not show are refused in the first pass.

    Args:
        block: The block.
        args: Positional arguments of the trainer.
        given: Its keyword arguments.

    Raises:
        ConfigError: A dataset has images, whose content no token id tells.
    """
    if block.routing is None:
        return
    for name, value in (*given.items(), *((f"argument {number}", value) for number, value in enumerate(args, 1))):
        for dataset in value.values() if isinstance(value, dict) else [value]:
            if hasattr(dataset, "column_names") and (found := _images_of(dataset)) is not None:
                raise ConfigError(
                    f"mismatch.routing.mode={block.routing.mode!r} with images ({name}: {found}): no token id tells what an "
                    "image shows, so that a pass of the trainer cannot be shown to be the one that its routes are of; allowed: "
                    "text alone. Remove mismatch.routing for this data."
                )


def _images_of(dataset: Any) -> str | None:
    """Return where a dataset has images: by its first row, as TRL does; for a stream by its column names, if it knows them."""
    columns = dataset.column_names
    if not hasattr(dataset, "__len__"):
        named = sorted(IMAGE_COLUMNS & set(columns or ()))
        return f"column {named[0]!r}" if named else None
    row = dataset[0] if len(dataset) else {}
    for name in sorted(IMAGE_COLUMNS & set(row)):
        if row[name]:
            return f"column {name!r}"
    prompt = row.get("prompt")
    contents = [message.get("content") for message in prompt] if isinstance(prompt, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return "a part of a prompt" if any(part.get("type") == "image" for part in parts) else None


def check_sampling_mask(args: Any, block: MismatchConfig, given: Mapping[str, Any]) -> None:
    """Refuse ways of sampling and scoring whose masks are not known, or would not be replayed.

    Args:
        args: TRL's configuration, with all settings final.
        block: The block.
        given: `generation_kwargs`.

    Raises:
        ConfigError: A setting is refused; the message names it, and what is allowed.
    """
    masking = block.sampling_mask
    if masking is None:
        return
    for name, value, wrong, why, instead in (
        ("use_vllm", args.use_vllm, not args.use_vllm, "the engine's masks are replayed", "use_vllm=True"),
        (
            "vllm_mode", args.vllm_mode, args.vllm_mode != "colocate",
            "a server's answers have no number for what was cut off", "vllm_mode='colocate'",
        ),
        (
            "generation_kwargs['logprobs']", given.get("logprobs"), "logprobs" in given,
            "masks are read off as many log-probabilities as the section asks for", "none",
        ),
        ("temperature", args.temperature, not args.temperature > 0, "greedy decoding samples nothing", "a value > 0"),
        (
            "mismatch.kl.estimator", "full", block.kl is not None and block.kl.estimator == "full",
            "the exact KL is over the whole vocabulary", "k1, k2 or k3",
        ),
        (
            "mismatch.monitor.doctor", block.monitor.doctor, block.monitor.doctor is not None,
            "it examines log-probabilities over the whole vocabulary", "none",
        ),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(f"mismatch.sampling_mask with {name}={value!r}: {why}; allowed: {instead}.")
    masking.asked(sampling_settings(args, given))


def check_deepspeed(block: MismatchConfig, config: Mapping[str, Any]) -> None:
    """Refuse settings of DeepSpeed under which a section would not do what it says.

    Args:
        block: The block.
        config: DeepSpeed's configuration.

    Raises:
        PrecisionError: DeepSpeed does not read the loss-scale settings, or its autocast covers only updates.
        ConfigError: The weights are offloaded to a disk, or DeepSpeed steps the schedule by itself.
    """
    zero = config.get("zero_optimization", {})
    precision = block.precision
    default = PrecisionConfig(dtype="float16")
    for name in ("init_scale", "growth_interval"):
        if (
            precision is not None
            and precision.dtype == "float16"
            and getattr(precision, name) != getattr(default, name)
        ):
            raise PrecisionError(
                f"mismatch.precision.{name}={getattr(precision, name)!r} with DeepSpeed: its own loss scaler reads its own "
                "settings. Leave it out, and set fp16.initial_scale_power, loss_scale_window, hysteresis and min_loss_scale in "
                "DeepSpeed's configuration."
            )
    if precision is not None and config.get("torch_autocast", {}).get("enabled"):
        raise PrecisionError(
            "mismatch.precision with torch_autocast in DeepSpeed's configuration: TRL scores completions with the model itself, "
            "outside of DeepSpeed's autocast, and would update in another dtype than it scores in. Remove torch_autocast; "
            "fp16 or bf16 follow from mismatch.precision."
        )
    if block.monitor.weight_sync != "off" and zero.get("offload_param", {}).get("device") == "nvme":
        raise ConfigError(
            f"mismatch.monitor.weight_sync={block.monitor.weight_sync!r} with zero_optimization.offload_param.device='nvme': "
            "weights on a disk are not read to see whether they moved; allowed: 'cpu', 'none'. Change it, or set "
            "mismatch.monitor.weight_sync='off' to go on unverified."
        )
    if block.lr is not None and "scheduler" in config:
        raise ConfigError(
            "mismatch.lr with a scheduler in DeepSpeed's configuration: DeepSpeed steps that inside of its own step, and what "
            "TRL logs would not be the rate that was applied. Remove the scheduler there, and set lr_scheduler_type."
        )


def check_device(device: str, block: MismatchConfig, *, engine: bool) -> None:
    """Refuse a device without float64, in which log-probabilities are compared.

    Args:
        device: Type of the trainer's.
        block: The block with the sections that act.
        engine: Whether an engine samples, so that its log-probabilities are compared with the trainer's.

    Raises:
        ConfigError: The block needs float64 there.
    """
    if device == "mps" and (engine or block.kl is not None or block.routing is not None):
        raise ConfigError(
            "a mismatch block on device 'mps', which has no float64; allowed: a CPU or a CUDA device. Set use_cpu=True, or "
            "remove the block."
        )


def check_sharding(block: MismatchConfig, *, deepspeed: Mapping[str, Any] | None, fsdp: int | None) -> None:
    """Refuse sections that cannot work with sharded parameters.

    Args:
        block: The block.
        deepspeed: DeepSpeed's configuration; None if DeepSpeed does not train.
        fsdp: Version of the FSDP that shards the model; None without FSDP.

    Raises:
        PrecisionError: As `check_deepspeed`.
        ConfigError: As `check_deepspeed`, or the weight check is on with FSDP1.
    """
    if deepspeed is not None:
        check_deepspeed(block, deepspeed)
    if fsdp == 1 and block.monitor.weight_sync != "off":
        # torch does not start FSDP1 on a CPU, so that the weight check was never run with it.
        raise ConfigError(
            f"mismatch.monitor.weight_sync={block.monitor.weight_sync!r} with fsdp_version=1: scoring probes and telling moved "
            "weights were run with FSDP2's shards alone; set fsdp_version: 2 in accelerate's config, or "
            "mismatch.monitor.weight_sync='off' to go on unverified."
        )


def check_reference(plugin: Any, processes: int, reference: bool) -> None:
    """Refuse a reference model of zeros: accelerate's default for FSDP2 loads weights only on the first rank.

    Args:
        plugin: accelerate's FSDP plugin, or None.
        processes: Number of ranks.
        reference: Whether there is a reference model, or will be.

    Raises:
        ConfigError: TRL would shard such a model.
    """
    if plugin is None or not reference or processes == 1:
        return
    if plugin.fsdp_version == 2 and plugin.cpu_ram_efficient_loading:
        raise ConfigError(
            "a reference model with FSDP2 and fsdp_cpu_ram_efficient_loading=true: TRL shards it as each rank has loaded it, "
            "which is zeros on all but the first, so that the KL would be to a broken model; set it to false in accelerate's "
            "config."
        )


class RoutingRefusals(AbstractContextManager[None]):
    """Turn the refusal of a model whose routing cannot be replayed into an error that names the setting.

    Args:
        routing: The `routing` section.
    """

    def __init__(self, routing: RoutingConfig) -> None:
        self.routing = routing

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ReplayError):
            raise ReplayError(
                f"mismatch.routing.mode={self.routing.mode!r}: {error} Remove mismatch.routing if the model is not a mixture of "
                "experts."
            ) from error


class EngineRefusals(AbstractContextManager[None]):
    """Turn vLLM's refusal of what a block asked for into an error that names the setting.

    Args:
        block: The block.
    """

    def __init__(self, block: MismatchConfig) -> None:
        self.block = block

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, ValueError) or isinstance(error, MismatchError) or not _from_vllm(error):
            return  # an error of ours names its setting already
        dtype = self.block.precision.dtype if self.block.precision is not None else None
        if dtype is not None and re.search(rf"\b{dtype}\b", str(error)):
            raise PrecisionError(
                f"mismatch.precision.dtype={dtype!r}: vLLM refuses to run this model in it: {error} "
                "Choose a dtype that both sides support."
            ) from error
        # vLLM's words for a dense model, and for a runner that records nothing; since 0.31 it names the connector of the routes.
        if self.block.routing is not None and any(words in str(error) for words in ("outed-experts", "AuxOutput")):
            raise RoutingError(
                f"mismatch.routing.mode={self.block.routing.mode!r}: vLLM refuses to record this model's routing: {error} "
                "Set mode='R2', which records it in the trainer, or remove mismatch.routing."
            ) from error


def _from_vllm(error: BaseException) -> bool:
    """Tell whether an error was raised by vLLM, or by what it calls."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.partition(".")[0] == "vllm" for name in modules)
