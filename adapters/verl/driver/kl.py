"""The driver's part of the KL: it says which rows belong together, and penalises rewards, which verl does in the driver too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mismatch_ext.kl import KlTerm, kl_terms


def groups(keys: Sequence[str]) -> list[list[str]]:
    """Return the rows of a batch whose responses answer the same prompt, by their keys, in the order of their first rows.

    Outputs of one session, such as the turns of an agent, depend on each other. Where a session has several, each is a group of
    its own: it has no baseline, and is in no other row's baseline.

    Args:
        keys: verl's keys of the rows, `{uid}_{session}_{output}`.
    """
    sessions = [key.rsplit("_", 1)[0] for key in keys]
    outputs = Counter(sessions)
    found: dict[str, list[str]] = {}
    for key, session in zip(keys, sessions, strict=True):
        found.setdefault(key if outputs[session] > 1 else session.rsplit("_", 1)[0], []).append(key)
    return list(found.values())


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
    penalty = kl_terms(batch["old_log_probs"], batch["ref_log_prob"], mask, term.config, coef=term.coef).reward
    batch["token_level_rewards"] = batch["token_level_scores"] - penalty.to(batch["token_level_scores"].dtype)
    per_response = penalty.sum(-1) / term.coef / mask.sum(-1).clamp(min=1)
    responses = max(int(mask.any(-1).sum()), 1)
    return {
        "actor/reward_kl_penalty": float(per_response.sum()) / responses,
        "actor/reward_kl_penalty_coeff": term.coef,
    }
