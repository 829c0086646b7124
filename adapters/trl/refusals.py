"""What TRL's adapter refuses before TRL builds the model, or its engine: the rows of refusals.toml, and a few checks."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mismatch_ext.adapters import compat

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, MismatchError, PrecisionError
from mismatch_ext.presets import resolve
from mismatch_ext.versions import on_cpu_build

# Arguments of TRL's trainers that let a completion be stitched together from several generations.
STITCHING = ("tools", "rollout_func", "environment_factory")
ROWS: dict[str, list[dict[str, Any]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ERRORS: dict[str, type[MismatchError]] = {"PrecisionError": PrecisionError}


def refuse(what: str, given: Any, block: MismatchConfig) -> None:
    """Raise the error of the first row whose feature the block has, and whose settings are there.

    Args:
        what: "settings", "deepspeed", "fsdp" or "class".
        given: TRL's configuration with all settings final, DeepSpeed's or FSDP's, or the class of a trainer or a configuration.
        block: The block.
    """
    correction = None if block.correction is None else resolve(block.correction)
    for row in ROWS[what]:
        asked = any(f"{feature}.".startswith(f"{row['feature']}.") for feature in block.features)
        if asked and all(_holds(test, path, given, block, correction) for path, test in row["when"].items()):
            found = row["found"].format(s=given, b=block, c=correction)
            raise ERRORS.get(row.get("error", ""), ConfigError)(f"{found}: {row['sentence']}")


def _holds(test: Any, path: str, given: Any, block: MismatchConfig, correction: Any) -> bool:
    """Tell whether a value is one that a row refuses."""
    value, names = given, path.split(".")
    if names[0] == "mismatch":
        value, names = block, names[1:]
        if names[0] == "correction":
            value, names = correction, names[1:]
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    if isinstance(test, str):
        return bool(TESTS[test](value, given))
    if isinstance(test, list):
        return value in test
    if "named" in test:
        return any(kind.__name__ in test["named"] for kind in value)
    return value not in test["other_than"]


def _is_ligers(loss_type: str | None, _: Any) -> bool:
    from trl import GRPOTrainer

    # In later releases, use_liger_kernel means kernels within the model.
    return bool(loss_type) and hasattr(GRPOTrainer, "compute_liger_loss")


TESTS: dict[str, Callable[[Any, Any], Any]] = {
    "on": lambda value, _: value,
    "off": lambda value, _: not value,
    "given": lambda value, _: value is not None,
    "below_one": lambda value, _: value is not None and value < 1.0,
    "ligers": _is_ligers,
    "of_several_steps": lambda iterations, s: iterations > 1 or s.steps_per_generation > s.gradient_accumulation_steps,
}
"""What words of the table mean, as functions of a value and of what is refused."""


def check_sharding(block: MismatchConfig, *, deepspeed: Mapping[str, Any] | None, fsdp: int | None) -> None:
    """Refuse sections that do not work with sharded parameters; `fsdp` is its version, and None for neither of the two."""
    if deepspeed is not None:
        refuse("deepspeed", deepspeed, block)
    refuse("fsdp", {"version": fsdp}, block)


def check_peers(
    trainer: type[Any], block: MismatchConfig, *, use_vllm: bool, server: bool, stitches: bool = False
) -> None:
    """Refuse features that the peers lack, and warn of untested versions; `stitches`: completions of several generations."""
    peers = ["torch", "transformers", "accelerate", "trl", *(["vllm"] if use_vllm else [])]
    using = {"trl", *(kind.__name__ for kind in trainer.__mro__)}
    if use_vllm:
        circumstances = {"vllm": True, "cpu": on_cpu_build(), "server": server, "tools": stitches}
        using |= {name for name, here in circumstances.items() if here}
    features = list(block.features)
    if block.correction is not None and resolve(block.correction).centering is not None:
        features.append("correction.centering")  # reads the fused head
    compat.check(peers, features, using)


def check_device(device: str, block: MismatchConfig, *, engine: bool) -> None:
    """Refuse a device without float64, in which log-probabilities are compared."""
    if device == "mps" and (engine or block.kl is not None or block.routing is not None):
        raise ConfigError(
            "a mismatch block on device 'mps', which has no float64; allowed: a CPU or a CUDA device. Set use_cpu=True, or "
            "remove the block."
        )


def check_reference(accelerator: Any, built: bool) -> None:
    """Refuse a reference model of zeros: by accelerate's default for FSDP2, only the first rank loads weights."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or not built or accelerator.num_processes == 1:
        return
    if plugin.fsdp_version == 2 and plugin.cpu_ram_efficient_loading:
        raise ConfigError(
            "a reference model with FSDP2 and fsdp_cpu_ram_efficient_loading=true: TRL shards it as each rank has loaded it, "
            "which is zeros on all but the first; set it to false in accelerate's config."
        )
