"""Description of a run for the first line of its metrics file, with the same keys for every trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_ext.config import MismatchConfig
from mismatch_ext.host_names import HostNames
from mismatch_ext.precision.audit import AuditReport, EngineReading, TrainerReading
from mismatch_ext.records import SamplingSettings
from mismatch_ext.versions import installed


def run_info(
    block: MismatchConfig,
    names: HostNames,
    *,
    name: str,
    host: str,
    model: str,
    model_type: str,
    parameters: int,
    device: str,
    seed: int,
    trainer: TrainerReading,
    engine: EngineReading | None = None,
    sampling: SamplingSettings | None = None,
    patches: Sequence[Mapping[str, Any]] = (),
    audit: AuditReport | None = None,
    packages: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return the header of a run's metrics file, as JSON-able data.

    Args:
        block: The `mismatch:` block.
        names: The host's names of its own metrics.
        name: Name of the run.
        host: Package, version and class of the trainer.
        model: Name or path of the model.
        model_type: Architecture as the model's configuration names it; "" if it is not known.
        parameters: Number of the model's parameters.
        device: Device that the model trains on.
        seed: The host's seed.
        trainer: What the trainer computes with, read back from it.
        engine: What the engine computes with, read back from it; None if there is no engine, or if it cannot be asked.
        sampling: Settings that the engine samples with; None if they are not known.
        patches: Descriptions of the patches in use.
        audit: The precision audit; None if no precision was asked for.
        packages: Packages whose versions are noted, in addition to this package and torch.
        **more: Further entries that only this host has, by key.
    """
    known = dict.fromkeys(("mismatch-ext", "torch", *packages))
    return {
        "run": {
            "name": name,
            "host": host,
            "model": model,
            "model_type": model_type,
            "parameters": parameters,
            "device": device,
            "seed": seed,
        },
        "names": names.to_dict(),
        "trainer": dataclasses.asdict(trainer),
        "engine": None if engine is None else dataclasses.asdict(engine),
        "sampling": None if sampling is None else dataclasses.asdict(sampling),
        **more,
        "patches": [dict(patch) for patch in patches],
        "config": block.to_dict(),
        "versions": {package: installed(package) or "not installed" for package in known},
        "audit": None if audit is None else audit.to_dict(),
    }
