"""verl's own KL terms and corrections by exact enumeration: `python -m tests.peers.verl.in_process.scenarios_kl_terms`."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import numpy as np
import torch
import verl
from mismatch_ext.adapters.verl.refusals import QUIRKS, VERL_PRESETS
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import FixedKLController, compute_rloo_outcome_advantage
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.utils.losses import ppo_loss

from mismatch_ext.presets import PRESETS
from mismatch_ext.testing import RowLoss, Term, moments, row_term
from tests.oracles.corrections import judged, judged_ours
from tests.oracles.kl.hosts import SAMPLINGS, judge, problem_of
from tests.peers.verl.in_process.losses import actor_config, batch_of, driven, host_config, loss_on

ACTOR = "actor_rollout_ref.actor"
LOSSES = ("low_var_kl", "low_var_kl+", "kl")
"""Values of `kl_loss_type`."""


def loss_term(kind: str, default: bool) -> Term:
    """Return verl's loss, advantages 0, with its KL term of a kind; each response is a batch."""
    chosen = [] if default else [f"{ACTOR}.kl_loss_type={kind}"]
    config = driven(host_config(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=1", *chosen))

    def loss(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        length = logprobs.size(1)
        fields = {
            "ref_log_prob": list(ref_logprobs), "old_log_probs": list(behavior_logprobs),
            "advantages": [torch.zeros(length, dtype=torch.float64)],
        }  # fmt: skip
        data = batch_of([torch.ones(length, dtype=torch.long)], fields)
        # verl's default aggregation is the mean over tokens.
        return loss_on(partial(ppo_loss, config=config), logprobs, data)[0] * length

    return row_term(loss)


def reward_term() -> Term:
    """Return verl's loss with the KL in the rewards and no other reward.

    Each response is a group of its own, for which RLOO has no baseline: the mean of others leaves the expectation as it is.
    """
    whole = host_config("algorithm.use_kl_in_reward=True")
    config, kind = driven(whole), whole.algorithm.kl_penalty

    def loss(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        mask = torch.ones(logprobs.shape, dtype=torch.long)
        fields = {
            "old_log_probs": behavior_logprobs, "ref_log_prob": ref_logprobs, "response_mask": mask,
            "token_level_scores": torch.zeros_like(ref_logprobs),
        }  # fmt: skip
        data, _ = apply_kl_penalty(DataProto.from_dict(tensors=fields), FixedKLController(1.0), kl_penalty=kind)
        rewards = data.batch["token_level_rewards"]
        advantages, _ = compute_rloo_outcome_advantage(rewards, mask, np.arange(len(mask)))
        given = {"old_log_probs": list(behavior_logprobs), "advantages": list(advantages)}
        value, _ = loss_on(partial(ppo_loss, config=config), logprobs, batch_of(list(mask), given))
        # The value of a policy loss means nothing; what is regularized is the penalty.
        return (value - value.detach()) * mask.numel() - rewards.sum()

    return row_term(loss)


def terms() -> list[dict[str, Any]]:
    """Measure verl's KL terms: in the loss, the default kind first, and in the rewards."""
    plain = host_config(f"{ACTOR}.use_kl_loss=True").actor_rollout_ref.actor.kl_loss_type
    found = []
    for kind in LOSSES:
        term = loss_term(kind, kind == plain)
        for sampling in SAMPLINGS:
            found.append(
                judge(
                    moments(problem_of(sampling), term), host="verl", version=verl.__version__,
                    setting=f"use_kl_loss=True, kl_loss_type={kind}", default=kind == plain, sampling=sampling,
                )
            )  # fmt: skip
    found.append(
        judge(
            moments(problem_of("on-policy"), reward_term()), host="verl", version=verl.__version__,
            setting="use_kl_in_reward=True, adv_estimator=rloo", sampling="on-policy",
        )
    )  # fmt: skip
    return [dataclasses.asdict(term) for term in found]


def corrections() -> dict[str, Any]:
    """Judge verl's rollout correction by each of its presets, beside ours; the old policy is the one that is trained."""
    found = {}
    for name in sorted(VERL_PRESETS):
        if PRESETS[name].loss == "ppo_clip" and PRESETS[name].mode == "bypass":
            continue  # the ratio that it clips is the weight
        theirs = getattr(RolloutCorrectionConfig, name)()
        ours = dataclasses.replace(PRESETS[name], compat=QUIRKS)
        found[name] = {"theirs": judged(corrected_loss(theirs)), "ours": judged_ours(ours)}
    unbounded = RolloutCorrectionConfig.decoupled_seq_is(threshold=1e9)
    return found | {"unbounded": judged(corrected_loss(unbounded))}


def corrected_loss(settings: RolloutCorrectionConfig) -> RowLoss:
    """Return verl's policy loss of one response, of whose weights and mask its driver and its loss take care by settings."""
    chosen = {"loss_mode": "bypass_mode", "rollout_correction": settings} if settings.bypass_mode else {}
    config = actor_config(loss=chosen)

    def loss(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor, reward: Tensor) -> Tensor:
        fields = {
            "old_log_probs": behavior_logprobs if settings.bypass_mode else logprobs.detach(),
            "rollout_log_probs": behavior_logprobs, "response_mask": torch.ones(logprobs.shape, dtype=torch.long),
        }  # fmt: skip
        batch = DataProto.from_dict(tensors={**fields, "advantages": reward[:, None].expand_as(logprobs)})
        if not settings.bypass_mode:
            batch, _ = compute_rollout_correction_and_add_to_batch(batch, settings)
        given = {name: list(tensor) for name, tensor in batch.batch.items()}
        data = batch_of(list(fields["response_mask"]), given)
        return loss_on(partial(ppo_loss, config=config), logprobs, data)[0] * logprobs.numel()

    return loss


if __name__ == "__main__":
    print("RESULT " + json.dumps(terms()))
