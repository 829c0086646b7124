"""The KL term in the actor's loss, from the fields of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mismatch_ext.errors import RecordError
from mismatch_ext.kl import KlTerm

COEF = "mismatch_kl_coef"
"""Key of the batch's `extra_info` that carries the coefficient from the driver."""
BASELINE = "mismatch_kl_baseline"
"""Field of the batch that holds the driver's baseline of each token, nats."""
FIELDS = ("ref_log_prob", "loss_mask", "old_log_probs", "rollout_log_probs", BASELINE)
"""Fields that are read from a micro-batch, if it has them."""


def loss_term(logps: Tensor, fields: Mapping[str, Tensor], term: KlTerm) -> Tensor:
    """Return the term of the actor's loss `[B, T]`, nats, the term's coefficient included.

    It covers every token that the policy sampled, also those that a rejection rule takes out of the policy term: leaving out
    responses because of what was sampled would change what is regularised.

    Args:
        logps: Current log-probabilities `[B, T]`, with their graph.
        fields: Padded fields of the micro-batch `[B, T]`, of `FIELDS`.
        term: This worker's KL term.

    Raises:
        RecordError: A field is missing.
    """
    return term.loss(
        logps,
        _field(fields, "ref_log_prob"),
        _field(fields, "loss_mask"),
        rollout_logprobs=fields.get("rollout_log_probs"),
        old_logprobs=fields.get("old_log_probs"),  # which verl's own loss needs as well
        baseline=_field(fields, BASELINE) if term.config.has_baseline else None,
    )


def _field(fields: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in fields:
        raise RecordError(
            f"the micro-batch has no field {name!r}, which mismatch.kl needs; it has {sorted(fields)}. It is computed by the "
            "trainer `mismatch` before the update."
        )
    return fields[name]
