"""The two functions that verl's driver calls with its whole configuration before it starts Ray."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mismatch_ext.patching import Patch

Prepare = Callable[[Any], dict[str, Any]]
"""Gets a configuration with a `mismatch` block, or one that was prepared for a block that is gone.

It may change or refuse the configuration, and returns new values of arguments that it changed.
"""

Refuse = Callable[[Any], None]
"""Gets such a configuration when Ray is about to start, and refuses one that was not prepared for the block that it has."""

_UPSTREAM = "https://github.com/verl-project/verl/blob/v0.9.1/verl/trainer/main_ppo.py"


def _concerns(config: Any) -> bool:
    """Tell whether a configuration has a block, or was prepared for one that its user has removed since."""
    if config.get("mismatch") is not None:
        return True
    group = config.get("actor_rollout_ref") or {}
    rollout = group.get("rollout") or {}
    handed_on = rollout.get("custom") or {}
    return handed_on.get("mismatch") is not None


def _make(original: Callable[..., Any], prepare: Prepare) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def checked(config: Any, *args: Any, **kwargs: Any) -> Any:
        if _concerns(config):
            # Before verl's own checks, so that they see the settings that the block asks for.
            fresh = prepare(config)
            kwargs |= {name: value for name, value in fresh.items() if name in kwargs}
        return original(config, *args, **kwargs)

    return checked


VALIDATE_CONFIG = Patch(
    name="verl/validate_config",
    peer="verl",
    supports=">=0.9.1,<=0.9.1",
    target="verl.utils.config:validate_config",
    make=_make,
    observed="GUARD ends a run that was not prepared",
    upstream=_UPSTREAM,
    reason="verl has no hook that sees the configuration before Ray starts, and ignores a root block that it does not know.",
    not_covered="Programs that call run_ppo without validate_config, or imported it before this package.",
    remove_when="verl calls its plugins with the configuration before it starts Ray.",
)


def _make_guard(original: Callable[..., Any], refuse: Refuse) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def guarded(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config", args[0] if args else None)
        if config is not None and _concerns(config):
            refuse(config)
        return original(*args, **kwargs)  # as they come: a version of verl may give no configuration

    return guarded


GUARD = Patch(
    name="verl/guard",
    peer="verl",
    supports="",
    target="verl.trainer.constants_ppo:get_ppo_ray_runtime_env",
    make=_make_guard,
    observed="without a block it calls verl's own and does nothing else",
    upstream=_UPSTREAM,
    reason="verl ignores a root block that nobody has read: a program may call run_ppo without verl's check, and verl swallows a "
    "plugin that fails to load.",
    not_covered="Programs that start Ray themselves, or imported the function before this package.",
    remove_when="verl calls its plugins with the configuration before it starts Ray, and ends when one fails to load.",
)
