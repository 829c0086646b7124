"""The `monitor` section: what is measured, checked and watched."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch_ext.strict import Action
from mismatch_ext.strict import require as _require


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """What is measured and checked while training; the host's own numbers stay as they are.

    On a CPU any block makes TRL's engine run uncompiled and update its weights by vLLM's layer-wise reload: compiled it
    starts far slower, and TRL's own update fails there, or garbles the experts.
    """

    run_dir: str | None = None
    """Folder of `metrics.jsonl`; default is `<output_dir>/mismatch`."""
    weight_sync: Action = "error"
    """What to do when the engine holds stale or garbled weights after a weight update."""
    weight_sync_probes: int = 8
    """Number of probe sequences that both sides score after each weight update."""
    weight_sync_probe_length: int = 32
    """Tokens per probe sequence."""
    profile_every: int = 5
    """Logs of the trainer between two records of the per-position and per-probability profiles."""
    scatter_samples: int = 500
    """Tokens kept per profile record for the rollout-vs-trainer scatter; 0 keeps none."""

    def __post_init__(self) -> None:
        for name, least in (
            ("weight_sync_probes", 1),
            ("weight_sync_probe_length", 2),
            ("profile_every", 1),
            ("scatter_samples", 0),
        ):
            value = getattr(self, name)
            _require(value >= least, f"mismatch.monitor.{name}", value, f"an integer >= {least}")
