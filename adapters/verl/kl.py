"""The `kl` section in verl: its term in the actor's loss, its part of the rewards, its baseline and its coefficient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.kl import KlController, kl_estimate, kl_penalty, kl_surrogate
from mismatch_ext.kl.estimators import estimate_from_log_ratio
from mismatch_ext.kl.inputs import checked_tokens
from mismatch_ext.kl.surrogate import mean_of_others

COEF = "mismatch_kl_coef"
"""Key of the batch's `extra_info` that carries an adaptive coefficient to the workers."""
BASELINE = "mismatch_kl_baseline"
"""Field of the batch that holds what each token's credit is compared with, nats."""


def in_rewards(section: KlConfig) -> bool:
    """Whether a part of the KL enters verl's token-level rewards, before advantages are computed."""
    return section.placement != "loss" and section.reward_path == "rewards"


def in_loss(section: KlConfig) -> bool:
    """Whether a part of the KL enters the actor's loss."""
    return not (section.placement == "reward" and section.reward_path == "rewards")


def wants_baseline(section: KlConfig) -> bool:
    """Whether the term in the loss has a baseline, which the driver computes over the whole batch."""
    return section.baseline == "leave_one_out" and section.placement != "loss" and section.reward_path == "surrogate"


def coefficient(section: KlConfig, config: DictConfig) -> float:
    """Return the coefficient to start with: the section's, else verl's `actor.kl_loss_coef` or, for rewards, `kl_ctrl.kl_coef`.

    Raises:
        ConfigError: It is not a number > 0.
    """
    if section.coef is not None:
        return section.coef
    name = "algorithm.kl_ctrl.kl_coef" if in_rewards(section) else "actor_rollout_ref.actor.kl_loss_coef"
    found = float(OmegaConf.select(config, name))
    if not 0 < found < float("inf"):
        raise ConfigError(f"{name}={found!r} with mismatch.kl: allowed: a number > 0; set it, or set mismatch.kl.coef.")
    return found


def set_kl(config: DictConfig, section: KlConfig) -> list[str]:
    """Let verl build its reference policy and carry what the section needs, and say what was set.

    verl's own KL term is off in the loss all the same: see `loss.make_loss`.

    Args:
        config: All of verl's configuration; changed in place.
        section: The `kl` section.

    Raises:
        ConfigError: verl cannot do what the section asks for, or does something else besides.
    """
    _check(config, section)
    actor, algorithm, coef = config.actor_rollout_ref.actor, config.algorithm, coefficient(section, config)
    done = []
    if in_rewards(section):
        algorithm.use_kl_in_reward = True
        algorithm.kl_ctrl.kl_coef = coef
        done.append(f"algorithm.use_kl_in_reward=True, kl_ctrl.kl_coef={coef:g}: mismatch.kl takes the place of verl's")
    else:
        actor.use_kl_loss = True
    if in_loss(section):
        actor.kl_loss_coef = coef
        done.append(f"actor.kl_loss_coef={coef:g}: the term of mismatch.kl takes the place of verl's kl_loss_type")
    return done


def _check(config: DictConfig, section: KlConfig) -> None:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if section.preset is not None:
        raise ConfigError(
            f"mismatch.kl.preset={section.preset!r}: it leaves the KL term to TRL, and this is verl; leave out mismatch.kl to "
            "leave it to verl."
        )
    if section.estimator == "full":
        raise ConfigError(
            "mismatch.kl.estimator='full': it needs the logits of policy and reference for the same tokens in one process, and "
            "verl's reference is scored in a pass of its own that keeps the sampled tokens' alone; use k1, k2, k3 or abs."
        )
    if in_rewards(section):
        if section.ratio != "none":
            raise ConfigError(
                f"mismatch.kl.reward_path='rewards' with ratio={section.ratio!r}: a reward is weighed with the policy term that "
                "it is part of; set ratio='none', or reward_path='surrogate'."
            )
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


def loss_term(logps: Tensor, fields: Mapping[str, Tensor], section: KlConfig) -> Tensor:
    """Return the term of the actor's loss `[B, T]`, nats, for coefficient 1.

    It covers every token that the policy sampled, also those that a rejection rule keeps from the policy term: to leave out
    responses for what they turned out to be would change what is regularised.

    Args:
        logps: Current log-probabilities `[B, T]`, with their graph.
        fields: Padded fields of the micro-batch `[B, T]`: `ref_log_prob`, `loss_mask`, and what ratio and baseline need.
        section: The `kl` section.

    Raises:
        RecordError: A field is missing.
    """
    reference, mask = _field(fields, "ref_log_prob"), _field(fields, "loss_mask").bool()
    behavior = None
    if section.ratio != "none":
        behavior = fields["rollout_log_probs"] if "rollout_log_probs" in fields else _field(fields, "old_log_probs")
    if section.reward_path == "rewards":
        return kl_penalty(logps, reference, mask, section, behavior_logprobs=behavior, coef=1.0).loss
    plain = replace(section, baseline="none")
    term = kl_surrogate(logps, reference, mask, plain, behavior_logprobs=behavior, coef=1.0)
    if not wants_baseline(section):
        return term
    tokens = checked_tokens(logps, reference, mask, behavior)
    compared = tokens.ratio(section.ratio) * torch.where(mask, _field(fields, BASELINE), 0.0)
    return term - (compared * (tokens.logprobs - tokens.logprobs.detach())).to(term.dtype)


def _field(fields: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in fields:
        raise RecordError(
            f"the micro-batch has no field {name!r}, which mismatch.kl needs; it has {sorted(fields)}. It is computed by the "
            "trainer `mismatch` before the update."
        )
    return fields[name]


def baseline(data: Any, section: KlConfig, keys: Sequence[str] | None = None) -> Tensor:
    """Return the leave-one-out baseline of each token `[B, T]`, nats: the mean over the prompt's other responses.

    It is computed once a batch, over all ranks' responses and from the policy that starts the update, because verl spreads the
    responses to a prompt over ranks and micro-batches. It does not depend on the response that it is taken from, so that the
    expectation stays what it is, also while the policy moves. Outputs of one session, such as the turns of an agent, depend on
    each other: where a session has several, they have no baseline and are in none.

    Args:
        data: verl's DataProto with `old_log_probs`, `ref_log_prob`, `response_mask` before rejection, and `uid`.
        section: The `kl` section.
        keys: verl's keys of the rows, `{uid}_{session}_{output}`; None takes every row for a session of its own.
    """
    batch, mask = data.batch, data.batch["response_mask"].bool()
    behavior = batch["rollout_log_probs"] if section.ratio != "none" and "rollout_log_probs" in batch else None
    behavior = batch["old_log_probs"] if section.ratio != "none" and behavior is None else behavior
    tokens = checked_tokens(batch["old_log_probs"], batch["ref_log_prob"], mask, behavior)
    credit = estimate_from_log_ratio(tokens.logprobs - tokens.ref_logprobs, section.estimator)
    if section.ratio == "sequence":
        credit = credit * tokens.ratio("sequence")
    if section.target == "sequence":
        credit = credit.flip(-1).cumsum(-1).flip(-1)
    names = [str(uid) for uid in data.non_tensor_batch["uid"]]
    if keys is not None:
        sessions = [key.rsplit("_", 1)[0] for key in keys]
        several = {session for session, count in Counter(sessions).items() if count > 1}
        names = [key if s in several else name for key, s, name in zip(keys, sessions, names, strict=True)]
    groups = torch.from_numpy(np.unique(names, return_inverse=True)[1])
    return mean_of_others(credit, tokens.mask, groups).to(tokens.dtype)


def apply_kl_to_rewards(data: Any, section: KlConfig, coef: float) -> dict[str, float]:
    """Take the KL penalty off verl's token-level scores, in the place of verl's `apply_kl_penalty`.

    Args:
        data: verl's DataProto with `token_level_scores`, `old_log_probs`, `ref_log_prob` and `response_mask` before rejection;
            `token_level_rewards` is set.
        section: The `kl` section.
        coef: Coefficient of this batch.

    Returns:
        verl's own two metrics: the mean over responses of the mean estimate per token, nats, and the coefficient.
    """
    batch, mask = data.batch, data.batch["response_mask"].bool()
    estimate = kl_penalty(batch["old_log_probs"], batch["ref_log_prob"], mask, section, coef=1.0).reward
    batch["token_level_rewards"] = batch["token_level_scores"] - coef * estimate.to(batch["token_level_scores"].dtype)
    per_response = estimate.sum(-1) / mask.sum(-1).clamp(min=1)
    responses = max(int(mask.any(-1).sum()), 1)
    return {
        "actor/reward_kl_penalty": float(per_response.sum()) / responses,
        "actor/reward_kl_penalty_coeff": coef,
    }


class KlControl:
    """The coefficient of the driver's batches, constant or led towards a target KL.

    Args:
        section: The `kl` section.
        coef: Coefficient to start with.
    """

    def __init__(self, section: KlConfig, coef: float) -> None:
        self.section = section
        self.controller = KlController(coef, section.controller)
        self._coef_of_batch: float | None = None

    @property
    def coef(self) -> float:
        """Coefficient of the present batch, in its loss as in its rewards; the controller's answer counts from the next."""
        return self.controller.coef if self._coef_of_batch is None else self._coef_of_batch

    def begin(self, data: Any) -> dict[str, float]:
        """Fix the coefficient of a fresh batch, measure its KL and let the controller answer for the next.

        Args:
            data: verl's DataProto with `old_log_probs`, in bypass mode the rollout's, `ref_log_prob` and `response_mask`
                before rejection.

        Returns:
            Mean k1 and k3 per token of the whole batch, nats, and the coefficient.
        """
        mask = data.batch["response_mask"].bool()
        policy, reference = data.batch["old_log_probs"][mask], data.batch["ref_log_prob"][mask]
        found = {name: float(kl_estimate(policy, reference, name).double().sum()) for name in ("k1", "k3")}
        count = max(int(mask.sum()), 1)
        self._coef_of_batch = self.controller.coef
        if bool(mask.any()):
            self.controller.update(found["k1"] / count)
        return {
            "mismatch/kl_ref_k1": found["k1"] / count,
            "mismatch/kl_ref_k3": found["k3"] / count,
            "mismatch/kl_coef": self.coef,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able data, between two batches."""
        return self.controller.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> str | None:
        """Go on from a saved state, and return what is to be said of it; see `KlController.load_state_dict`."""
        self._coef_of_batch = None
        return self.controller.load_state_dict(state)
