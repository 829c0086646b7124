"""What a run is, for the first line of its metrics file: the same keys whatever trains."""

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
        names: What the host calls its own metrics.
        name: The run's.
        host: Package, version and class that trains.
        model: Name or path of the model.
        model_type: Its architecture as its configuration names it; "" where that is not known.
        parameters: How many it has.
        device: Where it trains.
        seed: The host's seed.
        trainer: What the trainer was found to compute with.
        engine: What the engine was found to compute with; None without one, or where it is out of reach.
        sampling: Settings that the engine samples with; None where they are not known.
        patches: Descriptions of the patches in use.
        audit: The precision audit; None where no precision was asked for.
        packages: Packages whose versions are noted, beside those of this package and torch.
        **more: What this host alone has to say, by key.
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
