"""KL regularisation towards a reference policy, with the gradient that it claims."""

from mismatch_ext.kl.controller import KlController, KlControllerState
from mismatch_ext.kl.estimators import kl_estimate
from mismatch_ext.kl.full import kl_full, kl_full_surrogate
from mismatch_ext.kl.penalty import KlPenalty, kl_penalty
from mismatch_ext.kl.surrogate import kl_baseline, kl_surrogate
from mismatch_ext.kl.term import KlTerm, ragged_bias

__all__ = [
    "KlController",
    "KlControllerState",
    "KlPenalty",
    "KlTerm",
    "kl_baseline",
    "kl_estimate",
    "kl_full",
    "kl_full_surrogate",
    "kl_penalty",
    "kl_surrogate",
    "ragged_bias",
]
