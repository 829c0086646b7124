"""Every section with each of its presets or choices, as it is held against every host."""

from __future__ import annotations

from typing import Any

from mismatch_ext.config import ESTIMATORS
from mismatch_ext.presets import PRESETS

HOSTS = ("TRL GRPO", "TRL RLOO", "verl", "MismatchCallback")
TRIGGERS = ("response_length", "grad_norm", "mismatch_kl", "f_tau")
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "precision": {f"dtype: {name}": {"dtype": name} for name in ("float16", "bfloat16", "float32")},
    "correction": {f"preset: {name}": {"preset": name} for name in PRESETS},
    "kl": {
        **{f"estimator: {name}": {"estimator": name, "coef": 0.3} for name in (*ESTIMATORS, "full")},
        "reward_path: rewards": {"reward_path": "rewards", "coef": 0.3},
    },
    "routing": {f"mode: {name}": {"mode": name, "measured": 1.0} for name in ("R2", "R3")},
    "lr": {
        "period: 1": {"period": 1},
        **{f"trigger: {name}": {"trigger": name} for name in TRIGGERS},
    },
    "monitor": {
        "defaults": {},
        "alarms": {"alarms": {"loss": {"above": -1e9, "patience": 1}}},
    },
}


def names() -> list[str]:
    """Return every case as `section/choice`."""
    return [f"{section}/{label}" for section, labels in CASES.items() for label in labels]
