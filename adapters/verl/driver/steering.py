"""Statistics of a batch that lead the learning rate of the update that learns from it, and what the ranks answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mismatch_ext.lr import length_statistics
from mismatch_ext.metrics import mismatch_metrics
from mismatch_ext.recorder import PREFIX

Gap = tuple[Tensor, Tensor, Tensor]
# The threshold of F that leads the rate with `trigger: f_tau`: the tail is thin at 2.
F_TAU = "f_1.1"


def leading_statistics(trigger: str, lengths: Tensor, limit: int, gap: Gap | None) -> dict[str, float | None]:
    """Return the arguments of a controller's `update` for one batch.

    Args:
        trigger: Of `mismatch.lr`.
        lengths: Tokens per response `[B]`, as verl counts them.
        limit: Tokens at which a response is cut off.
        gap: Old log-probabilities, rollout log-probabilities and mask `[B, T]`; None where the trainer takes none.
    """
    found: dict[str, float | None] = {}
    if trigger == "response_length":
        found |= length_statistics(lengths, lengths >= limit, reduce=lambda x, reduction: x).to_dict()
    if trigger in ("mismatch_kl", "f_tau") and gap is not None and bool(gap[2].any()):
        metrics = mismatch_metrics(*gap)
        found |= {"mismatch_kl": metrics["k3_kl"], "f_tau": metrics[F_TAU]}
    return found


def merged(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what the ranks measured under the names that are logged; they agree on all of it before they answer."""
    return {name if name.startswith(PREFIX) else PREFIX + name: value for name, value in answers[0].items()}
