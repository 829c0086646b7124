"""What a run says of itself at its start: the header of its metrics file, and the lines that a host prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mismatch_ext.alarms import Rule
from mismatch_ext.config import MismatchConfig
from mismatch_ext.log_reading import METRICS_FILES
from mismatch_ext.names import HostNames
from mismatch_ext.precision.audit import AuditReport, EngineReading, TrainerReading
from mismatch_ext.rollout import SamplingSettings
from mismatch_ext.versions import installed


def run_info(
    block: MismatchConfig,
    names: HostNames,
    *,
    trainer: TrainerReading,
    engine: EngineReading | None = None,
    sampling: SamplingSettings | None = None,
    patches: Sequence[Mapping[str, Any]] = (),
    audit: AuditReport | None = None,
    packages: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
    **run: Any,
) -> dict[str, Any]:
    """Return the header of a run's metrics file, with the same keys for every host; `run` is name, model, device and the like."""
    read = {"trainer": trainer, "engine": engine, "sampling": sampling}
    sides = {name: None if reading is None else dataclasses.asdict(reading) for name, reading in read.items()}
    versions = {name: installed(name) or "not installed" for name in ("mismatch-ext", "torch", *packages)}
    return {
        "run": run,
        "names": names.to_dict(),
        **sides,
        **(more or {}),
        "patches": [dict(patch) for patch in patches],
        "config": block.to_dict(),
        "acts": block.acts,
        "versions": versions,
        "audit": None if audit is None else audit.to_dict(),
    }


def banner(
    block: MismatchConfig, header: Mapping[str, Any], rules: Mapping[str, Rule], run_dir: Path, *, verbose: bool = False
) -> str:
    """Return the lines at the start of a run: what both sides compute with, and a line for each section that is on.

    Args:
        block: The config of the run.
        header: The header of its metrics file.
        rules: The alarms that are watched.
        run_dir: The folder of the metrics file.
        verbose: Whether versions, and each patch with the function that it replaces, are shown too.
    """
    active = "is active on" if block.acts else "measures, and changes nothing in,"
    lines = [f"mismatch-ext {header['versions']['mismatch-ext']} {active} {header['run']['host']}"]
    for side in ("trainer", "engine"):
        reading = {name: value for name, value in (header[side] or {}).items() if name != "version"}
        lines.append(_line(side, reading or "none: the trainer's own model generates"))
    lines += section_lines(block)
    if header["audit"] is not None:
        lines.append(_line("audit", "both sides compute as asked: their dtypes were read back"))
    patches = header["patches"]
    if verbose:
        lines.append(_line("versions", header["versions"]))
        lines += [_line("patch", f"{patch['name']} on {patch['target']}") for patch in patches]
    elif patches:
        lines.append(_line("patches", f"{len(patches)}, named in {METRICS_FILES}"))
    return "\n".join([*lines, *alarm_lines(rules, run_dir)])


def section_lines(block: MismatchConfig) -> list[str]:
    """Return a line with the settings of each section that is on, alarms aside."""
    sections = {name: dict(keys) for name, keys in block.to_dict().items() if isinstance(keys, Mapping)}
    if block.kl is not None:
        sections["kl"]["placement"] = block.kl.applied_placement
    if block.correction is not None:
        preset = {"preset": sections["correction"].pop("preset")}
        off = {name: "off" for name, value in sections["correction"].items() if value is None}
        sections["correction"] = preset | sections["correction"] | off
    monitor = sections.get("monitor", {})
    for name in ("alarms", "default_alarms"):
        monitor.pop(name, None)
    # What happens after a failed check, or with bad rows, is worth a line also where the key is left out.
    weight_sync = block.monitor.weight_sync or ("error" if block.acts else "warn")
    ends = {"max_bad_rows": block.monitor.share_of_bad_rows} if block.acts else {}
    sections["monitor"] = {**monitor, "weight_sync": weight_sync, **ends}
    return [_line(name, keys) for name, keys in sections.items()]


def alarm_lines(rules: Mapping[str, Rule], run_dir: Path) -> list[str]:
    """Return the lines that say which alarms are watched, and where metrics are written."""
    named = [rule.describe() for rule in rules.values() if rule.named]
    if built_in := len(rules) - len(named):
        named.append(f"{built_in} built-in ones (docs/metrics.md)")
    return [_line("alarms", "; ".join(named) or "none"), _line("metrics", str(run_dir))]


def _line(name: str, text: str | Mapping[str, Any]) -> str:
    return f"  {name:<13} {text if isinstance(text, str) else ', '.join(_settings(text))}"


ON_FAILURE = {"error": "stop", "warn": "warn", "off": "no check"}


def _settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `key=value` for each setting that is set."""
    for key, value in settings.items():
        if key == "parameter_dtypes" and value:  # counts would not compare: a CPU engine packs most of its weights away
            yield f"parameters={' and '.join(value)}"
        elif isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{key}.")
        elif key == "weight_sync":
            yield f"weight check after each update, on failure: {ON_FAILURE[value]}"
        elif value is not None:
            yield f"{prefix}{key}={str(value).lower() if isinstance(value, bool) else value}"
