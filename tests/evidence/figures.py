"""What records keep of a demo's summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.evidence import judges


def gaps(summary: dict[str, Any], splits: Sequence[str]) -> dict[str, Any]:
    """Return the figures of a summary that a reader looks for."""
    rows = judges.runs_of(summary)
    names = list(dict.fromkeys(run for run, _ in rows))

    def of(key: str) -> dict[str, dict[str, float]]:
        return {run: {split: rows[run, split]["values"][key] for split in splits} for run in names}

    return {
        "mean |Δlogp|": of("logp_abs_diff_mean"),
        "k3": of("k3_kl"),
        "largest |Δlogp|": of("logp_abs_diff_max"),
        **summary["intervals"],
    }


def replayed(summary: dict[str, Any]) -> dict[str, Any]:
    """Return what replay changed on the same tokens: figures under the trainer's own routes and under the engine's, and flips."""
    pairs: dict[str, Any] = {}
    flips: dict[str, Any] = {}
    for row in summary["replay"]:
        run, split = row["run"], row["split"]
        pairs.setdefault(run, {})[split] = {"mean |Δlogp|": row["logp_abs_diff_mean"], "k3": row["k3_kl"]}
        flips.setdefault(run, {})[split] = row["flips"]
    return {"own routes and replayed": pairs, "flips": flips}


def of_the_real_model(summary: dict[str, Any], splits: Sequence[str]) -> dict[str, Any]:
    """Return the figures of the record of the real model."""
    return {
        "tokens": summary["tokens"],
        **gaps(summary, splits),
        **replayed(summary),
        "experts": summary["experts"],
        "seconds": summary["seconds"],
    }
