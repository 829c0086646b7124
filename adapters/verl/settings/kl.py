"""What the `kl` section sets in verl's configuration, and what verl cannot do of it."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.kl import ragged_bias


def coefficient(section: KlConfig, config: DictConfig) -> float:
    """Return the first coefficient: the section's, or verl's `actor.kl_loss_coef` or, for rewards, `kl_ctrl.kl_coef`.

    Raises:
        ConfigError: It is not a number > 0.
    """
    if section.coef is not None:
        return section.coef
    name = "algorithm.kl_ctrl.kl_coef" if section.in_rewards else "actor_rollout_ref.actor.kl_loss_coef"
    found = float(OmegaConf.select(config, name))
    if not 0 < found < float("inf"):
        raise ConfigError(f"{name}={found!r} with mismatch.kl: allowed: a number > 0; set it, or set mismatch.kl.coef.")
    return found


def set_kl(config: DictConfig, section: KlConfig) -> list[str]:
    """Let verl build its reference policy and carry what the section needs, and say what was set.

    verl's own KL term stays out of the loss: see `worker/loss.py`.

    Args:
        config: All of verl's configuration; changed in place.
        section: The `kl` section.

    Raises:
        ConfigError: verl cannot do what the section asks for, or does something else besides.
    """
    _check(config, section)
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


def _check(config: DictConfig, section: KlConfig) -> None:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if section.estimator == "full":
        raise ConfigError(
            "mismatch.kl.estimator='full': it needs the logits of policy and reference for the same tokens in one process, and "
            "verl's reference is scored in a pass of its own that keeps the sampled tokens' alone; use k1, k2, k3 or abs."
        )
    if section.in_rewards:
        if str(algorithm.adv_estimator) == "gdpo":
            raise ConfigError(
                "mismatch.kl.reward_path='rewards' with algorithm.adv_estimator='gdpo', which normalises the components of the "
                "reward function and reads no token-level rewards; use reward_path='surrogate'."
            )
        if actor.use_kl_loss:
            raise ConfigError(
                "mismatch.kl.reward_path='rewards' with actor_rollout_ref.actor.use_kl_loss=True, which asks for a second KL "
                "term in the loss; remove one of the two (placement='both' has a part on either side)."
            )
    elif algorithm.use_kl_in_reward:
        raise ConfigError(
            f"algorithm.use_kl_in_reward=True with mismatch.kl.reward_path={section.reward_path!r}, placement="
            f"{section.placement!r}: both would regularise; remove one of the two, or set reward_path='rewards'."
        )
