"""The KL term in the actor's loss, from the fields of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import RecordError
from mismatch_ext.kl import kl_terms

COEF = "mismatch_kl_coef"
"""Key of the batch's `extra_info` that carries the coefficient from the driver."""
BASELINE = "mismatch_kl_baseline"
"""Field of the batch that holds the driver's baseline of each token, nats."""
FIELDS = ("ref_log_prob", "loss_mask", "old_log_probs", "rollout_log_probs", BASELINE)
"""Fields that are read from a micro-batch, if it has them."""


def loss_term(logps: Tensor, fields: Mapping[str, Tensor], section: KlConfig) -> Tensor:
    """Return the term of the actor's loss `[B, T]`, nats, for coefficient 1.

    It covers every token that the policy sampled, also those that a rejection rule takes out of the policy term: leaving out
    responses because of what was sampled would change what is regularised.

    Args:
        logps: Current log-probabilities `[B, T]`, with their graph.
        fields: Padded fields of the micro-batch `[B, T]`, of `FIELDS`.
        section: The `kl` section.

    Raises:
        RecordError: A field is missing.
    """
    return kl_terms(
        logps,
        _field(fields, "ref_log_prob"),
        _field(fields, "loss_mask").bool(),
        section,
        behavior=sampled_by(fields) if section.ratio != "none" else None,
        coef=1.0,
        baseline=_field(fields, BASELINE) if section.has_baseline else None,
    ).loss


def sampled_by(fields: Mapping[str, Tensor]) -> Tensor:
    """Return log-probabilities under the policy that sampled `[B, T]`: the engine's where it reports them, else the old ones."""
    return fields["rollout_log_probs"] if "rollout_log_probs" in fields else _field(fields, "old_log_probs")


def _field(fields: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in fields:
        raise RecordError(
            f"the micro-batch has no field {name!r}, which mismatch.kl needs; it has {sorted(fields)}. It is computed by the "
            "trainer `mismatch` before the update."
        )
    return fields[name]
