"""Reads logs that TRL and verl write without this package: `trainer_state.json`, verl's jsonl, TensorBoard's event files.

Figures that names.toml knows under the host's name become this package's, so that the report shows them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mismatch_ext.errors import PeerVersionError, RunDirectoryError
from mismatch_ext.log_reading import RunData, StepRecord
from mismatch_ext.names import HOSTS, MEASURES, PREFIX, VERL, HostNames

TRAINER_STATE = "trainer_state.json"
EVENTS = "events.out.tfevents.*"
CENTRAL = ("logp_abs_diff_mean", "k3_kl", "ess_seq")
"""The figures of the gap that the report's verdict and first table are about."""
HOW_TO_LOG = {
    "TRL": "use_vllm=True, with vllm_importance_sampling_correction as it is by default; or one line: "
    "mismatch_ext.adapters.trl.attach(trainer)",
    "verl": "actor_rollout_ref.rollout.calculate_log_probs=true; or +mismatch.level=observe",
}
"""What makes a host log the figures that the report is about."""

Logged = Iterator[tuple[int, str, Mapping[str, Any]]]


def host_log(path: Path) -> RunData | None:
    """Read a host's own log, a file or the first in a folder, or None; raises RunDirectoryError or PeerVersionError."""
    if path.is_file():
        candidates = [path]
    else:
        # The last checkpoint's state holds the whole history.
        states = sorted(path.glob(f"checkpoint-*/{TRAINER_STATE}"), key=lambda state: int(state.parent.name[11:]))
        candidates = [*path.glob(TRAINER_STATE), *reversed(states), *sorted(path.glob("*.jsonl")), *path.glob(EVENTS)]
    if not candidates:
        return None
    source = candidates[0]
    try:
        if source.match(EVENTS):
            rows = list(_tensorboard(source))
        elif source.suffix == ".json":
            rows = list(_trainer_state(json.loads(source.read_bytes())))
        else:
            rows = list(_verl(source))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{source} is not a log of TRL or verl ({error!r}); give a {TRAINER_STATE}, a jsonl file of verl's file logger, or "
            "a folder of TensorBoard's event files."
        ) from error
    return _run(source, rows)


def _trainer_state(state: Mapping[str, Any]) -> Logged:
    for record in state["log_history"]:
        step = record["step"]
        evaluation = {name[5:]: value for name, value in record.items() if name.startswith("eval_")}
        yield (step, "eval/eval", evaluation) if evaluation else (step, "train", record)


def _verl(path: Path) -> Logged:
    with path.open("rb") as lines:
        for line in lines:
            record = json.loads(line)
            yield record["step"], "train", record["data"]


def _tensorboard(path: Path) -> Logged:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise PeerVersionError(
            "reading event files needs tensorboard, which is not installed; run `pip install tensorboard`."
        ) from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        # transformers puts "train/" and "eval/" before its names, which may have other slashes.
        split, name = ("eval/eval", tag[5:]) if tag.startswith("eval/") else ("train", tag.removeprefix("train/"))
        for event in events.Scalars(tag):
            yield event.step, split, {name: event.value}


def _run(source: Path, rows: list[tuple[int, str, Mapping[str, Any]]]) -> RunData:
    steps: dict[tuple[str, int], dict[str, float | None]] = {}
    for step, split, metrics in rows:
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        values = {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}
        steps.setdefault((split, step), {}).update(values)
    logged = {name for metrics in steps.values() for name in metrics}
    host = "verl" if any(name.startswith(("actor/", "critic/", "rollout_corr/")) for name in logged) else "TRL"
    column = host.lower()
    ours = {getattr(measure, column): PREFIX + name for name, measure in MEASURES.items() if getattr(measure, column)}
    return RunData(
        path=source.parent,
        headers=(_header(source, host),),
        steps=tuple(
            StepRecord(
                kind="step",
                segment=0,
                step=step,
                split=split,
                metrics=metrics | {ours[name]: value for name, value in metrics.items() if name in ours},
            )
            for (split, step), metrics in sorted(steps.items())
        ),
        problems=(
            _about(source, host, {ours.get(name, name).removeprefix(PREFIX) for name in logged} & MEASURES.keys()),
        ),
    )


def _header(source: Path, host: str) -> dict[str, Any]:
    names: HostNames = HOSTS[host]
    # Stock verl logs at each step the rate of the next one.
    names_of_host = names.to_dict() | ({"next_rate": True} if names is VERL else {})
    folder = source.resolve().parent
    name = source.stem if source.suffix == ".jsonl" else folder.name
    return {
        "kind": "header", "segment": 0, "of": "training", "resume_step": None, "names": names_of_host,
        "run": {"name": name, "host": f"stock {host}"},
    }  # fmt: skip


def _about(source: Path, host: str, logged: set[str]) -> str:
    figures = f"of the gap it has {', '.join(sorted(logged))}" if logged else "it has no figure of the gap"
    missing = [name for name in CENTRAL if name not in logged]
    text = f"read from {host}'s own log, {source.name}: {figures}"
    return f"{text}. Missing: {', '.join(missing)}; to have them logged: {HOW_TO_LOG[host]}." if missing else f"{text}."
