"""The lines that every host trainer prints when a run starts and when it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_ext.config import LrConfig, MismatchConfig
from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.lr.controller import PERIOD_FACTOR
from mismatch_ext.monitor import Monitor
from mismatch_ext.report.closing import closing_lines
from mismatch_ext.rundata import read_run
from mismatch_ext.terminal import say

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Integration:
    """Names what carries each part of a block into a host; the banner prints these names in brackets.

    Attributes:
        trainer: Carries loss scaler and replay.
        correction, lr, kl: Carries the section of this name.
        precision: Sets the dtypes; "" if they are only audited.
        verified: Whether weight updates are verified where the block asks for it.
    """

    trainer: str
    correction: str
    lr: str
    kl: str
    precision: str = ""
    verified: bool = True


def banner(
    block: MismatchConfig,
    header: Mapping[str, Any],
    monitor: Monitor,
    run_dir: Path,
    *,
    integration: Integration,
    measured: str,
) -> str:
    """Return the lines that say which parts are active, in which peer, and what carries each of them.

    Args:
        block: The parsed `mismatch:` block.
        header: The header of the run.
        monitor: The alarms.
        run_dir: Folder of the metrics.
        integration: What carries each part into the host.
        measured: When the gap is measured, as "at every ...".
    """
    trainer, engine = header["trainer"], header["engine"]
    scaler = trainer["scaler"]
    scaler_text = f"{scaler['class']} at {scaler['scale']:g}" if scaler else "none"
    active = "observes, and changes nothing in," if block.level == "observe" else "is active on"
    lines = [
        f"mismatch-ext {header['versions']['mismatch-ext']} {active} {header['run']['host']}",
        f"  trainer    {', '.join(trainer['parameter_dtypes'])} weights, autocast {trainer['autocast_dtype'] or 'off'}, "
        f"loss scaler {scaler_text}   [{integration.trainer}]",
    ]
    if engine is None:
        lines.append("  engine     none: the trainer's own model generates")
    else:
        lines.append(
            f"  engine     {engine['engine']} {engine['version']}, {engine['model_dtype']}, KV cache {engine['kv_cache_dtype']}, "
            f"{engine['logprobs_mode']}   [native]"
        )
    if block.precision is None:
        lines.append("  precision  not asked for: the dtypes of both sides are the host's own choice")
    else:
        set_by = f"   [{integration.precision}]" if integration.precision else ""
        parts = {"weights": block.precision.engine_weights, "KV cache": block.precision.engine_kv_cache}
        but = "".join(f", engine's {part} in {name}" for part, name in parts.items() if name is not None)
        lines.append(f"  precision  uniform {block.precision.dtype}{but}: audited on both sides{set_by}")
    lines += _mitigations(block, integration, "" if engine is None else engine["engine"])
    if engine is not None:
        check = f"weight sync check (prefill, decode): {block.monitor.weight_sync}"
        lines.append(
            f"  monitor    gap measured {measured}; {check if integration.verified else 'weights not verified'}"
        )
    lines += monitor_lines(monitor, run_dir)
    return "\n".join(lines + [f"  patch      {patch['name']} on {patch['target']}" for patch in header["patches"]])


def _mitigations(block: MismatchConfig, integration: Integration, sampler: str) -> list[str]:
    """Return one line for each mitigation that is on."""
    lines = []
    if block.correction is not None:
        lines.append(f"  correction {block.correction.preset or 'custom'}   [{integration.correction}]")
    if block.routing is not None:
        source = sampler if block.routing.mode == "R3" else "the trainer's old-logprob pass"
        where = "old-logprob pass, update" if block.routing.mode == "R3" else "update"
        where += ", reference" if block.routing.reference else ""
        done = f"recorded by {source}, replayed in {where}"
        lines.append(f"  routing    {block.routing.mode}: {done}   [{integration.trainer}]")
    if block.sampling_mask is not None:
        where = "old-logprob pass, update, reference"
        lines.append(f"  sampling   masks of {sampler}, replayed in {where}   [{integration.trainer}]")
    if block.lr is not None:
        lines.append(f"  lr         {rule_of(block.lr)}   [{integration.lr}]")
    if block.kl is not None:
        kl = block.kl
        form = f"{kl.estimator} in {kl.placement}, target {kl.target}, ratio {kl.ratio}"
        lines.append(f"  kl         {form}   [{integration.kl}]")
    return lines


def monitor_lines(monitor: Monitor, run_dir: Path) -> list[str]:
    """Return the lines that say which alarms are watched, and where metrics are written."""
    named = [rule.describe() for rule in monitor.rules.values() if rule.named]
    built_in = len(monitor.rules) - len(named)
    said = [*named, *([f"{built_in} built-in ones (python -m mismatch_ext.monitor)"] if built_in else [])]
    return [f"  alarms     {'; '.join(said) or 'none'}", f"  metrics    {run_dir}"]


def print_closing(run_dir: Path) -> None:
    """Print what happened in a run; a lost metrics file causes only a warning, because training has already ended well."""
    try:
        say("\n".join(closing_lines(read_run(run_dir))))
    except RunDirectoryError as error:
        logger.warning("The summary of the run cannot be printed: %s", error)


def rule_of(lr: LrConfig) -> str:
    """Return in a few words by which rule the learning rate is lowered."""
    every = f"{PERIOD_FACTOR:g} x the step of a surge of {lr.trigger}" if lr.period is None else f"{lr.period} steps"
    return f"times {lr.decay:g} every {every}, counted from the end of warm-up, floor {lr.floor:g}"
