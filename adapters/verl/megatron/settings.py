"""The block with verl's Megatron engine: settings, and checks around verl's own replay, which does the work of `routing`.

verl's replay does not check expert ids, and lets a router without routes choose for itself. Here every sample's routes are
checked before a batch runs, and a router that does not replay is an error (`replay.py` beside this file).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.transformers import read_trainer
from mismatch_ext.adapters.verl.settings.refusals import refuse_first
from mismatch_ext.patches.verl.megatron_replay import CLOSED_TOPK, REPLAYED_BATCH
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn
from verl.utils.device import get_device_name

from mismatch_ext.config import MismatchConfig, RoutingConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.patching import Patch, apply, described, verify

if TYPE_CHECKING:
    from mismatch_ext.adapters.verl.megatron.replay import ReplayGuard

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))


def megatron_settings(config: DictConfig, block: MismatchConfig) -> list[str]:
    """Set verl's own settings for a Megatron actor, and say what was set.

    Args:
        config: All of verl's configuration; changed in place.
        block: The block of this run.

    Returns:
        Lines for the log.

    Raises:
        ConfigError: The block asks for what this release cannot do with verl's Megatron engine; names the setting.
    """
    _check_block(block)
    fused = f"{MODEL}.use_fused_kernels"
    if OmegaConf.select(config, fused):
        raise _refused(fused, True, "False", "its fused head was not run with this package's loss")
    lines = [] if block.lr is None else _keep_schedule(config)
    return lines if block.routing is None else lines + _set_replay(config, block.routing)


def _keep_schedule(config: DictConfig) -> list[str]:
    """Let a resumed run go on with the schedule of its checkpoint, because the rate's control counts that schedule's updates."""
    name = f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler"
    with open_dict(config):
        OmegaConf.update(config, name, True)
    return [
        f"{name}=True: with mismatch.lr a resumed run takes its schedule from the checkpoint, where verl's default begins "
        "warm-up and decay anew; the rates and steps of actor.optim are then the checkpoint's, too."
    ]


def _set_replay(config: DictConfig, routing: RoutingConfig) -> list[str]:
    _check_model(config)
    name, switch = f"{ACTOR}.megatron.router_replay.mode", f"{ROLLOUT}.enable_rollout_routing_replay"
    given = OmegaConf.select(config, name)
    if given not in (None, "disabled", routing.mode):
        raise _refused(name, given, repr(routing.mode), f"it contradicts mismatch.routing.mode={routing.mode!r}")
    if routing.mode == "R2" and OmegaConf.select(config, switch):
        raise _refused(switch, True, "False", "verl would replay the rollout's routes in the place of the actor's own")
    with open_dict(config):
        OmegaConf.update(config, name, routing.mode)
        if routing.mode == "R3":
            OmegaConf.update(config, switch, True)
    return [
        f"{name}={routing.mode!r}: routing is replayed by verl's own Megatron engine; its routes are checked here, and compared "
        f"with the model's own in {routing.measured:.0%} of the batches."
    ]


def _check_block(block: MismatchConfig) -> None:
    routing, sync = block.routing, block.monitor.weight_sync
    refuse_first(
        _refused,
        ("mismatch.precision", "set", block.precision is not None, "to leave it out",
         "dtypes and loss scale of verl's Megatron engine are set elsewhere"),
        ("mismatch.monitor.weight_sync", sync, sync != "off", "'off'", "the actor's weights are probed in FSDP models alone"),
        ("mismatch.routing.reference", True, routing is not None and routing.reference, "False",
         "verl never replays its reference engine"),
    )  # fmt: skip


def _check_model(config: DictConfig) -> None:
    packed, mtp = f"{MODEL}.use_remove_padding", f"{MODEL}.mtp.enable"
    refuse_first(
        _refused,
        (packed, False, not OmegaConf.select(config, packed), "True",
         "verl packs routes without padding, so that those of a padded batch are other tokens'"),
        (mtp, True, bool(OmegaConf.select(config, mtp)), "False",
         "routers that predict further tokens have no routes, and would choose for themselves"),
    )  # fmt: skip


def _refused(setting: str, value: object, allowed: str, why: str) -> ConfigError:
    return ConfigError(
        f"{setting}={value!r} with {ACTOR}.strategy='megatron': {why}; allowed: {allowed}. Change it, or use strategy='fsdp2'."
    )


@dataclass(frozen=True)
class ReplayChecks:
    """The checks of verl's Megatron replay in this process.

    Args:
        guard: Looks at routes and routers.
        patches: Where verl asks it.
    """

    guard: ReplayGuard
    patches: tuple[Patch, ...]


@cache
def _replay_checks() -> ReplayChecks:
    # megatron-core is imported here, in a worker: the driver may have none.
    from mismatch_ext.adapters.verl.megatron.replay import ReplayGuard

    guard = ReplayGuard()
    patches = (REPLAYED_BATCH.calling(guard), CLOSED_TOPK.calling(guard))
    apply(*patches)
    return ReplayChecks(guard, patches)


def register_megatron_checks(block: MismatchConfig) -> tuple[Patch, ...] | None:
    """Apply the checks of verl's Megatron replay for the life of this process; once is enough.

    Args:
        block: The block of this run.

    Returns:
        The patches, or None when the block has no `routing` section.

    Raises:
        PatchError: verl's code does not do what the patches need.
    """
    if block.routing is None:
        return None
    patches = _replay_checks().patches
    verify(*patches)
    return patches


def registered() -> ReplayChecks | None:
    """Return the checks of this process, or None where nothing registered them."""
    return _replay_checks() if _replay_checks.cache_info().currsize else None


def replayed_others() -> int:
    """Return how many passes this process's checks have found since the last call over other tokens than their routes."""
    checks = registered()
    return 0 if checks is None else checks.guard.take_others()


def megatron_report(engine: Any) -> dict[str, Any]:
    """Return what verl's Megatron engine runs with, as plain data, for the check before the first step.

    Args:
        engine: verl's engine, initialised.
    """
    reading = read_trainer(nn.ModuleList(engine.module), nullcontext, None, torch.device(get_device_name()))
    optimizer = getattr(engine, "optimizer", None)
    if "float16" in reading.parameter_dtypes and optimizer is not None:
        scale = {"class": type(optimizer).__name__, "enabled": True, "scale": float(optimizer.get_loss_scale())}
        reading = replace(reading, scaler=scale)
    mode = engine.engine_config.router_replay.mode
    rate, checks = getattr(engine, "_rate", None), registered()
    return {
        "engine": type(engine).__name__,
        "strategy": engine.engine_config.strategy,
        "trainer": asdict(reading),
        "routing": None if mode == "disabled" else mode,
        "lr": None if rate is None else rate.multiplier,
        "patches": [] if checks is None else described(*checks.patches),
    }
