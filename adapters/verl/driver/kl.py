"""The KL over the driver's whole batch: its measurement, its part of the rewards, its baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_ext.kl import KlTerm
from mismatch_ext.recorder import PREFIX


def adapt(data: Any, term: KlTerm) -> dict[str, float]:
    """Fix the coefficient of a fresh batch and measure its KL, and return what is logged of them; see `KlTerm.adapt`.

    Args:
        data: verl's DataProto with `old_log_probs`, in bypass mode the rollout's, `ref_log_prob` and `response_mask` before
            rejection.
        term: The run's.
    """
    batch = data.batch
    found = term.adapt(batch["old_log_probs"], batch["ref_log_prob"], batch["response_mask"])
    return {PREFIX + name: value for name, value in found.items()}


def baseline(data: Any, term: KlTerm, keys: Sequence[str] | None = None) -> Tensor:
    """Return the leave-one-out baseline of each token `[B, T]`, nats; see `KlTerm.baseline`.

    It is computed over all ranks' responses, because verl spreads the responses to a prompt over ranks and micro-batches. Outputs
    of one session, such as the turns of an agent, depend on each other: where a session has several, they have no baseline and
    are in none.

    Args:
        data: verl's DataProto with `old_log_probs`, `ref_log_prob`, `response_mask` before rejection, and `uid`; with
            `rollout_log_probs` where the engine reports them.
        term: The run's.
        keys: verl's keys of the rows, `{uid}_{session}_{output}`; None takes every row for a session of its own.
    """
    names = [str(uid) for uid in data.non_tensor_batch["uid"]]
    if keys is not None:
        sessions = [key.rsplit("_", 1)[0] for key in keys]
        several = {session for session, count in Counter(sessions).items() if count > 1}
        names = [key if s in several else name for key, s, name in zip(keys, sessions, names, strict=True)]
    groups = torch.from_numpy(np.unique(names, return_inverse=True)[1])
    batch = data.batch
    rollout = batch["rollout_log_probs"] if "rollout_log_probs" in batch else None
    return term.baseline(batch["old_log_probs"], batch["ref_log_prob"], batch["response_mask"], groups, rollout)


def apply_kl_to_rewards(data: Any, term: KlTerm) -> dict[str, float]:
    """Take the KL penalty off verl's token-level scores, instead of verl's `apply_kl_penalty`.

    Args:
        data: verl's DataProto with `token_level_scores`, `old_log_probs`, `ref_log_prob` and `response_mask` before rejection;
            `token_level_rewards` is set.
        term: The run's.

    Returns:
        verl's own two metrics: the mean over responses of the mean estimate per token, nats, and the coefficient.
    """
    batch, mask = data.batch, data.batch["response_mask"].bool()
    penalty = term.penalty(batch["old_log_probs"], batch["ref_log_prob"], mask)
    batch["token_level_rewards"] = batch["token_level_scores"] - penalty.to(batch["token_level_scores"].dtype)
    per_response = penalty.sum(-1) / term.coef / mask.sum(-1).clamp(min=1)
    responses = max(int(mask.any(-1).sum()), 1)
    return {
        "actor/reward_kl_penalty": float(per_response.sum()) / responses,
        "actor/reward_kl_penalty_coeff": term.coef,
    }
