"""The `mismatch:` block in verl's configuration: the driver copies it to the one place that every process reads.

Workers and agent loops get `actor_rollout_ref`; rollout servers get only `actor_rollout_ref.rollout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError

KEY = "mismatch"
"""Name of the user's block, and of the entry in `actor_rollout_ref.rollout.custom`."""


@dataclass(frozen=True, kw_only=True)
class RunMode:
    """How verl's trainer takes turns with its rollout servers."""

    name: str = "sync"  # or "colocate_async", "separate_async"
    updates: int = 1  # local ones of the actor between two weight updates, verl's `parameter_sync_step`

    @property
    def asynchronous(self) -> bool:
        """Whether rollouts of a batch may be of older weights than the servers have."""
        return self.name != "sync"


def hand_on(config: DictConfig, block: MismatchConfig, mode: RunMode, given: MismatchConfig | None = None) -> None:
    """Put the block that acts, the mode and the block as given where verl's processes read them."""
    entry = {"block": block.to_dict(), "mode": asdict(mode), "given": None if given is None else given.to_dict()}
    rollout = config.actor_rollout_ref.rollout
    rollout.custom = OmegaConf.merge(rollout.get("custom") or {}, {KEY: entry})


def handed_on(config: DictConfig) -> bool:
    """Tell whether a configuration's block was handed on."""
    return bool(_entry(config.actor_rollout_ref.rollout))


def check_unedited(config: DictConfig) -> None:
    """Refuse a prepared configuration whose config was changed or removed since: verl's settings are still those of before."""
    given = given_in(config)
    if given != _parsed(_entry(config.actor_rollout_ref.rollout).get("given")):
        edit = "removed" if given is None else "changed"
        raise ConfigError(
            f"the mismatch config was {edit} after verl's validate_config had read it, and verl's settings still follow the "
            "earlier one. Compose the configuration again for each run, or give each run a copy of it (copy.deepcopy)."
        )


def given_in(config: DictConfig) -> MismatchConfig | None:
    """Return the config that its user gives now; None without one. Raises ConfigError."""
    stated = config.get(KEY)
    if OmegaConf.is_config(stated):
        stated = OmegaConf.to_container(stated, resolve=True)
    return MismatchConfig.parse(stated)


def block_of(group: Any) -> MismatchConfig | None:
    """Return the block of verl's `actor_rollout_ref`; None without one."""
    return block_of_server(group.rollout)


def mode_of(group: Any) -> RunMode:
    """Return the trainer's mode of verl's `actor_rollout_ref` that has a block."""
    return RunMode(**_entry(group.rollout)["mode"])


def block_of_server(rollout: Any) -> MismatchConfig | None:
    """Return the block of a rollout server's own configuration; None without one."""
    return _parsed(_entry(rollout).get("block"))


def _entry(rollout: Any) -> Mapping[str, Any]:
    """Return what was handed on in verl's `rollout`; empty without a block."""
    return (rollout.get("custom") or {}).get(KEY) or {}


def _parsed(given: Mapping[str, Any] | None) -> MismatchConfig | None:
    plain: Any = OmegaConf.to_container(given) if isinstance(given, DictConfig) else given
    return MismatchConfig.parse(plain, "the block that verl's driver handed on")
