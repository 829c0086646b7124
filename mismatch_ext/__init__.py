"""Prove that your RL trainer and your rollout engine compute the same policy, and close the gap when they don't.

The names below are all that you need. Each is loaded when it is first used: reading a block imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mismatch_ext.centering import centering_terms as centering_terms
    from mismatch_ext.centering import sampler_bias as sampler_bias
    from mismatch_ext.config import CorrectionConfig as CorrectionConfig
    from mismatch_ext.config import KlConfig as KlConfig
    from mismatch_ext.config import LrConfig as LrConfig
    from mismatch_ext.config import MismatchConfig as MismatchConfig
    from mismatch_ext.correction import correct as correct
    from mismatch_ext.doctor import write_rollouts as write_rollouts
    from mismatch_ext.drift import drift_metrics as drift_metrics
    from mismatch_ext.drift import drift_sums as drift_sums
    from mismatch_ext.errors import MismatchError as MismatchError
    from mismatch_ext.gap import gap_metrics as gap_metrics
    from mismatch_ext.gap import gap_sums as gap_sums
    from mismatch_ext.kl import kl_estimate as kl_estimate
    from mismatch_ext.kl import kl_full as kl_full
    from mismatch_ext.kl import kl_terms as kl_terms
    from mismatch_ext.log_reading import read_run as read_run
    from mismatch_ext.loop import Run as Run
    from mismatch_ext.lr import LrControl as LrControl
    from mismatch_ext.precision.audit import audit as audit
    from mismatch_ext.precision.scaler import LossScaler as LossScaler
    from mismatch_ext.presets import PRESETS as PRESETS
    from mismatch_ext.rollout import (
        Provenance as Provenance,
    )
    from mismatch_ext.rollout import (
        RolloutRecord as RolloutRecord,
    )
    from mismatch_ext.rollout import (
        SamplingSettings as SamplingSettings,
    )
    from mismatch_ext.routing import RoutingTrace as RoutingTrace
    from mismatch_ext.routing.align import align as align
    from mismatch_ext.sampling_mask import TokenSupport as TokenSupport
    from mismatch_ext.sampling_mask import support_logprobs as support_logprobs
    from mismatch_ext.weights import WeightVerifier as WeightVerifier

__version__ = "0.1.0"

_MODULES = {
    "CorrectionConfig": "config",
    "KlConfig": "config",
    "LrConfig": "config",
    "LossScaler": "precision.scaler",
    "LrControl": "lr",
    "MismatchConfig": "config",
    "MismatchError": "errors",
    "PRESETS": "presets",
    "Provenance": "rollout",
    "RolloutRecord": "rollout",
    "RoutingTrace": "routing",
    "Run": "loop",
    "SamplingSettings": "rollout",
    "TokenSupport": "sampling_mask",
    "WeightVerifier": "weights",
    "align": "routing.align",
    "audit": "precision.audit",
    "centering_terms": "centering",
    "correct": "correction",
    "drift_metrics": "drift",
    "drift_sums": "drift",
    "gap_metrics": "gap",
    "gap_sums": "gap",
    "kl_estimate": "kl",
    "kl_full": "kl",
    "kl_terms": "kl",
    "read_run": "log_reading",
    "sampler_bias": "centering",
    "support_logprobs": "sampling_mask",
    "write_rollouts": "doctor",
}
"""Module of each public name; the imports above tell type checkers the same."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
