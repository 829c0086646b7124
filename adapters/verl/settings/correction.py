"""What the `correction` section sets in verl's configuration: verl's own settings, where they do what is asked.

In verl 0.9.1 a policy loss reads `actor.policy_loss`, and `algorithm.rollout_correction.bypass_mode` reaches only the driver: the
weights, rejection and `loss_type` beside it have no effect. `set_correction` sets both places.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from mismatch_ext.config import CorrectionConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.presets import PRESETS, Interval, ResolvedCorrection, resolve

VERL_PRESETS = frozenset(name for name in PRESETS if name == "disabled" or name.startswith(("decoupled_", "bypass_")))
"""The names of the factory methods of verl's RolloutCorrectionConfig."""
QUIRKS = frozenset({"verl_inverse_k1", "verl_empty_rows"})
"""Where verl, and so its presets, compute differently from this package."""
UNBOUNDED = (1e-9, 1e9)
"""Bounds of a mask that has none: verl wants both, and its ratios are from exp(-20) to exp(20)."""
# Values that verl's loss takes where a key is missing.
DEFAULTS = {
    "rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False, "rollout_rs": None,
    "rollout_rs_threshold": None, "loss_type": "ppo_clip",
}  # fmt: skip
# In these losses a token of advantage 0 still has a gradient, or affects which other tokens have one.
NOT_BY_ADVANTAGE = ("clip_cov", "kl_cov", "dro")


def settings_of(section: CorrectionConfig) -> ResolvedCorrection:
    """Return the settings of a section; a preset with one of verl's names does what verl's own method of that name does."""
    settings = resolve(section)
    if section.preset in VERL_PRESETS and section.reject is None:
        settings = replace(settings, compat=QUIRKS)
    if settings.normalize and settings.mode == "bypass":
        raise ConfigError(
            "mismatch.correction.normalize with mode='bypass': the weights are those of the current policy, a micro-batch "
            "at a time, and would be divided by its mean and not the batch's; remove it, or set mode='decoupled'."
        )
    return settings


def native_rollout_correction(settings: ResolvedCorrection) -> dict[str, Any]:
    """Return verl's `rollout_correction` that does what the settings ask.

    `off_policy_threshold` is left out, because the loss applies it for any kind of weights.

    Args:
        settings: The resolved `correction` section.

    Raises:
        ConfigError: verl has no setting for it.
    """
    clipped = settings.bound in ("truncate", "clip") and settings.lower is not None
    for setting, value, wrong, allowed in (
        ("level", settings.level, settings.level == "geometric", "'token' or 'sequence'"),
        ("veto", settings.veto, settings.veto is not None, "none"),
        ("lower", settings.lower, settings.level != "none" and clipped, "none, or bound='mask'"),
    ):
        if wrong:
            raise ConfigError(
                f"mismatch.correction.{setting}={value!r}: verl's rollout_correction has no setting for it; allowed: {allowed}. "
                "Change it, or name one of verl's own presets (decoupled_*, bypass_*)."
            )
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


def set_correction(config: DictConfig, section: CorrectionConfig | None) -> list[str]:
    """Set in verl's configuration what the section asks for, and say what was set.

    Args:
        config: All of verl's configuration; changed in place.
        section: The `correction` section; None repairs the user's own `algorithm.rollout_correction` (`check_native`).

    Raises:
        ConfigError: The section contradicts verl's own settings, or verl cannot do it.
    """
    if section is None:
        return check_native(config)
    settings = settings_of(section)
    given = config.algorithm.get("rollout_correction") or {}
    for key in ("rollout_is", "rollout_rs", "bypass_mode"):
        if given.get(key):
            raise ConfigError(
                f"algorithm.rollout_correction.{key}={given[key]!r} with mismatch.correction: both would weigh the same tokens; "
                "remove one of the two."
            )
    mode = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    if settings.mode == "bypass" and mode != "vanilla":
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={mode!r} with mismatch.correction.mode='bypass', which has a policy "
            f"loss of its own ({settings.loss}); remove one of the two."
        )
    if settings.off_policy_threshold is not None and mode in NOT_BY_ADVANTAGE:
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={mode!r} with mismatch.correction.off_policy_threshold: that loss "
            "has terms that no advantage multiplies, so that a sequence cannot be taken out; leave out one of the two."
        )
    entropy = config.actor_rollout_ref.actor.entropy_coeff
    if settings.off_policy_threshold is not None and entropy:
        raise ConfigError(
            f"actor_rollout_ref.actor.entropy_coeff={entropy!r} with mismatch.correction.off_policy_threshold: the entropy of "
            "dropped sequences would still be trained on; allowed: 0. Set it to 0, or leave out off_policy_threshold."
        )
    native = native_rollout_correction(settings)
    with open_dict(config):
        config.algorithm.rollout_correction = OmegaConf.merge(given, native)
        done = [f"algorithm.rollout_correction: {_words(native)}"]
        return done + (_set_policy_loss(config, native) if settings.mode == "bypass" else [])


def check_native(config: DictConfig) -> list[str]:
    """Make the user's own `algorithm.rollout_correction` work where verl 0.9.1 ignores it, and say what was set.

    Args:
        config: All of verl's configuration; changed in place.

    Raises:
        ConfigError: A setting has no effect and cannot be given one.
    """
    given = config.algorithm.get("rollout_correction") or DictConfig({})
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    mode = policy_loss.get("loss_mode", "vanilla")
    if mode == "bypass_mode" and not given.get("bypass_mode", False):
        raise ConfigError(
            "actor_rollout_ref.actor.policy_loss.loss_mode='bypass_mode' without algorithm.rollout_correction.bypass_mode=True: "
            "its ratio would be that to the trainer's own old policy, not to the rollout's; set both, or neither."
        )
    inert = [key for key in ("rollout_is", "rollout_rs") if given.get(key)]
    inert += ["loss_type"] if given.get("loss_type", "ppo_clip") != "ppo_clip" else []
    if not given.get("bypass_mode", False):
        if "loss_type" in inert:
            raise ConfigError(
                f"algorithm.rollout_correction.loss_type={given.loss_type!r} without bypass_mode=True has no effect in verl; "
                "remove it, or set bypass_mode=True."
            )
        return []
    if mode == "bypass_mode" and policy_loss.get("rollout_correction"):
        _compare(given, policy_loss.rollout_correction)
        return []
    if not inert and mode != "bypass_mode":
        return []  # the plain ratio pi/mu, in whichever loss was asked for
    if mode not in ("vanilla", "bypass_mode"):
        raise ConfigError(
            f"algorithm.rollout_correction.{inert[0]}={given[inert[0]]!r} with bypass_mode=True and "
            f"actor_rollout_ref.actor.policy_loss.loss_mode={mode!r}: verl applies it in its loss 'bypass_mode' alone; remove "
            "one of the two."
        )
    with open_dict(config):
        return _set_policy_loss(config, OmegaConf.to_container(given, resolve=True))


def _compare(driver: DictConfig, worker: DictConfig) -> None:
    """Refuse two copies of verl's settings that differ: the driver reads one, the loss the other."""
    for key, default in DEFAULTS.items():
        mine, theirs = driver.get(key, default), worker.get(key, default)
        if mine != theirs:
            raise ConfigError(
                f"algorithm.rollout_correction.{key}={mine!r}, but {theirs!r} in "
                "actor_rollout_ref.actor.policy_loss.rollout_correction, which verl's loss reads; remove the latter: it is set "
                "to the former."
            )


def _set_policy_loss(config: DictConfig, native: Any) -> list[str]:
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    policy_loss.loss_mode, policy_loss.rollout_correction = "bypass_mode", native
    return [
        "actor_rollout_ref.actor.policy_loss.loss_mode='bypass_mode', with the settings of the correction: verl 0.9.1 itself "
        "does not hand them to its loss"
    ]


def _words(native: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in native.items())
