"""The tables below the plots: both sides' settings, versions, patches, the event log, and what is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mismatch_ext.log_reading import EventRecord, RunData
from mismatch_ext.names import PREFIX, Role
from mismatch_ext.pooling import ABS_DIFF_MEAN
from mismatch_ext.precision.dtypes import spelled
from mismatch_ext.report.summary import Summary

# More than this many info events of one name in one run become one line.
COLLAPSE_INFO = 3
MAX_EVENTS = 500
MAX_PROBLEMS = 50
PARAMETERS = "parameter_dtypes"


def flatten(block: Any, prefix: str = "") -> dict[str, str]:
    """Return nested settings as dotted key -> text; anything but a mapping counts as no settings."""
    if not isinstance(block, Mapping):
        return {}
    flat: dict[str, str] = {}
    for key, value in block.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat


def side_rows(runs: Mapping[str, RunData]) -> list[dict[str, Any]]:
    """Return the settings of trainer and engine of every run side by side, dtypes first; None for what a side does not report."""
    sides = [(_side(r.header.get("trainer")), _side(r.header.get("engine"))) for r in runs.values()]
    keys = dict.fromkeys(key for pair in sides for side in pair for key in side)
    rows = []
    for key in sorted(keys, key=lambda k: ("dtype" not in k, k)):
        pairs = [(trainer.get(key), engine.get(key)) for trainer, engine in sides]
        # Parameters in float32 beside a compute dtype are mixed precision.
        compared = "dtype" in key and key != PARAMETERS
        differs = [compared and None not in pair and len(set(map(spelled, pair))) == 2 for pair in pairs]
        rows.append({"key": key, "pairs": pairs, "differs": differs})
    return rows


def _side(block: Any) -> dict[str, str]:
    """Return the settings of a side; counts of parameters are left out, because a CPU engine packs most of its weights away."""
    counts = block.get(PARAMETERS) if isinstance(block, Mapping) else None
    return flatten(block | {PARAMETERS: " and ".join(counts)} if isinstance(counts, Mapping) and counts else block)


def setting_tables(runs: Mapping[str, RunData]) -> list[tuple[str, list[tuple[str, list[str | None]]]]]:
    """Return caption and rows of the header blocks that both sides share, one column per run."""
    tables = []
    for caption, key in (("What was run.", "run"), ("Sampling.", "sampling"), ("Package versions.", "versions")):
        blocks = [flatten(run.header.get(key)) for run in runs.values()]
        keys = dict.fromkeys(name for block in blocks for name in block)
        if keys:
            tables.append((caption, [(name, [b.get(name) for b in blocks]) for name in keys]))
    return tables


def patch_rows(runs: Mapping[str, RunData]) -> list[tuple[str, dict[str, str]]]:
    """Return (run, patch) for every patch that a run declares active."""
    rows = []
    for name, run in runs.items():
        patches = run.header.get("patches")
        for patch in patches if isinstance(patches, list) else []:
            flat = flatten(patch)
            if flat:
                rows.append((name, {key: flat.get(key, "") for key in ("name", "target", "digest")}))
    return rows


def config_texts(runs: Mapping[str, RunData]) -> list[tuple[str, str]]:
    """Return the `mismatch:` block and the precision audit of each run as indented JSON."""
    return [
        (f"{name}: {key}", json.dumps(run.header[key], indent=2, ensure_ascii=False))
        for name, run in runs.items()
        for key in ("config", "audit")
        if run.header.get(key)
    ]


def event_rows(runs: Mapping[str, RunData]) -> tuple[list[dict[str, Any]], int]:
    """Return the event log and the number of rows left out; repeated info events share one row."""
    rows = []
    for name, run in runs.items():
        groups: dict[tuple[int, str], list[EventRecord]] = {}
        for event in run.events:
            if event.level == "info":
                groups.setdefault((event.segment, event.name), []).append(event)
        for event in run.events:
            group = groups.get((event.segment, event.name), []) if event.level == "info" else []
            row = event.model_dump() | {"run": name, "steps": str(event.step)}
            if len(group) > COLLAPSE_INFO:
                if event is not group[0]:
                    continue
                at, last = [e.step for e in group], group[-1]
                row |= {"steps": f"{min(at)}–{max(at)}", "data": last.data}
                row["message"] = f"{len(group)} times; the last: {last.message}"
            rows.append(row | {"data": json.dumps(row["data"], ensure_ascii=False) if row["data"] else ""})
    rows.sort(key=lambda row: row["level"] == "info")
    return rows[:MAX_EVENTS], max(0, len(rows) - MAX_EVENTS)


def missing(runs: Mapping[str, RunData], summary: Summary) -> list[tuple[str, str]]:
    """Say for each run what a complete report would show and this one cannot."""
    found: list[tuple[str, str]] = []
    for name, run in runs.items():
        found += [(name, text) for text in run.problems[:MAX_PROBLEMS]]
        if (more := len(run.problems) - MAX_PROBLEMS) > 0:
            found.append((name, f"{more} more lines like these were left out."))
        found += [(name, text) for text in _absent(name, run, summary)]
    return found


def _absent(name: str, run: RunData, summary: Summary) -> list[str]:
    status, texts = run.ending.status, []
    if status == "open":
        texts.append("no end line: the run was killed or is still running, and later steps are missing.")
    elif status == "failed":
        texts.append(f"the {run.ending.of} ended with an error, later steps are missing: {run.ending.message}")
    elif status == "interrupted":
        texts.append(f"the {run.ending.of} was interrupted, later steps are missing.")
    if not run.steps:
        return [*texts, "no step was recorded."]
    rows = [row for row in summary.rows if row.run == name]
    # Of a host's log its first problem says what it lacks.
    if not run.is_host_log and all(row.values.get(ABS_DIFF_MEAN) is None for row in rows):
        texts.append(f"no mismatch metrics ({PREFIX}{ABS_DIFF_MEAN} and its kin) were recorded.")
    for row in rows:
        if row.nonfinite_steps:
            texts.append(
                f"{row.nonfinite_steps} of {row.logs} logs of {row.split} hold NaN or infinity in a mismatch metric, the loss or "
                "the gradient norm; those values are gaps in the plots and are left out of the table."
            )
    if not any(run.series(Role.REWARD, split)[0] for split in run.splits):
        texts.append(f"no reward was recorded (by this host's name for it, `{run.names.reward}`).")
    if run.is_host_log:
        return texts
    for kind in ("position", "probability"):
        if not any(kind in record.profiles for record in run.profiles):
            texts.append(f"no {kind} profile was recorded.")
    if not run.scatters:
        texts.append("no token sample was recorded.")
    texts += [f"the header has no {key!r} block." for key in ("trainer", "engine", "versions") if not _has(run, key)]
    return texts


def _has(run: RunData, key: str) -> bool:
    # If there is no header at all, reading the run has already said so.
    return not run.headers or bool(run.header.get(key))
