"""Every section with each of its presets or choices, as it is held against every host, and the page that says what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_ext.correction import PRESETS

HOSTS = ("TRL GRPO", "TRL RLOO", "verl", "MismatchCallback")
TRIGGERS = ("response_length", "grad_norm", "mismatch_kl", "f_tau")
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "precision": {f"dtype: {name}": {"dtype": name} for name in ("float16", "bfloat16", "float32")},
    "correction": {f"preset: {name}": {"preset": name} for name in PRESETS},
    "kl": {
        "preset: trl": {"preset": "trl", "coef": 0.3},
        **{f"estimator: {name}": {"estimator": name, "coef": 0.3} for name in ("k1", "k2", "k3", "abs", "full")},
        "reward_path: rewards": {"reward_path": "rewards", "coef": 0.3},
    },
    "routing": {f"mode: {name}": {"mode": name, "agreement_rate": 1.0} for name in ("R2", "R3")},
    "lr": {
        "period: 1": {"period": 1},
        **{f"trigger: {name}": {"trigger": name} for name in TRIGGERS},
        "count_from: surge": {"count_from": "surge"},
    },
    "monitor": {"defaults": {}, "alarms": {"alarms": {"loss": {"above": -1e9, "patience": 1}}}},
}

Found = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""What each host did: host, `section/choice`, and there `read`, what was read back, or `refused`, the message."""


def names() -> list[str]:
    """Return every case as `section/choice`."""
    return [f"{section}/{label}" for section, labels in CASES.items() for label in labels]


def page(found: Found) -> str:
    """Return docs/sections.md."""
    lines = [
        "# Sections, presets and hosts",
        "",
        "Written by `python -m tests.peers.sections`, and held by a test: each case is built in the real host on a CPU, and one",
        "step is taken. **active**: the effect was read back from what is stepped (below: what was read). **refused**: the host",
        "says so before it trains, with the message of that number. TRL generates with vLLM where a gap is asked for; verl is",
        "an FSDP2 actor, prepared as `main_ppo` does; with FSDP1 and verl's fused head it takes the same. docs/verl.md says what",
        "a Megatron actor takes.",
        "",
        f"| section | choice | {' | '.join(HOSTS)} |",
        "|---|---|" + "---|" * len(HOSTS),
    ]
    messages: dict[str, int] = {}
    read: dict[str, dict[str, None]] = {}
    for section, labels in CASES.items():
        for label in labels:
            cells = []
            for host in HOSTS:
                one = found[host][f"{section}/{label}"]
                if "refused" in one:
                    cells.append(f"refused ({messages.setdefault(one['refused'], len(messages) + 1)})")
                else:
                    cells.append("active")
                    read.setdefault(section, {})[one["what"]] = None
            lines.append(f"| `{section}` | `{label}` | {' | '.join(cells)} |")
    lines += ["", "## What was read back", ""]
    lines += [f"- `{section}`: {'; '.join(whats)}." for section, whats in read.items()]
    lines += ["", "## Messages", ""]
    lines += [f"{number}. {message}" for message, number in messages.items()]
    return "\n".join(lines) + "\n"
