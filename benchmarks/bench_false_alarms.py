"""How often a healthy run would be warned of or ended: every clean log of the repository, resampled to a long run.

A clean log is one of a run with no fault planted, whose two sides differ by rounding alone. Blocks of consecutive steps of one
run are drawn again and again, so that neighboring steps stay as alike as they were. The alarms, the growth of both gaps, the
verdicts on weight updates and the rule on bad rows are then replayed over them. Trainings of TRL (`clean_runs.json`) have all
that is watched, and other logs have k3 alone. Verdicts are also made here, by a small model in each dtype.
"""

from __future__ import annotations

import copy
import math
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from mismatch_ext.adapters.transformers.side import TrainedModel

from benchmarks import clean_runs
from benchmarks.stability.record import RECORDED, RECORDED_REAL, recorded
from mismatch_ext.alarms import AlarmState, rules_of, watch
from mismatch_ext.bad_rows import METRIC, BadRowWindow
from mismatch_ext.config import MonitorConfig
from mismatch_ext.growth import GROWTH_FLOOR, GROWTH_WINDOW, Growth, grown
from mismatch_ext.log_reading import read_run
from mismatch_ext.names import PREFIX, TRL
from mismatch_ext.weights import RECENT, WeightVerifier, doubted_too_often, draw_probes
from tests.torch_rollout import Recurrent, TorchRollout, recurrent_logits

ROOT = Path(__file__).resolve().parents[1]
STEPS, BLOCK, UPDATES = 100_000, 24, 400
CLEAN = (
    "no mismatch",
    "bf16 engine",
    "gspo float32, bf16",
    "gspo bf16",
    "gspo float32, FP16",
    "gspo FP16",
    "kl k3, no mismatch",
    "kl surrogate, no mismatch",
    "one router",
)
"""Runs of docs/stability.md whose engine rounds as it would anyway; so do all that are matched. In the others a coarse engine was
made on purpose."""
Entry = TypeVar("Entry")
Log = Mapping[str, float]


def clean_logs() -> Iterator[tuple[str, list[list[Log]]]]:
    """Yield each kind of clean log: its name, and the metrics of each step of its runs."""
    for file in (RECORDED, RECORDED_REAL):
        for name, seeds in recorded(file)[1].items():
            if name in CLEAN or name.endswith("matched"):
                yield name, [[{PREFIX + "k3_kl": value} for value in curves["k3"]] for curves in seeds.values()]
    with tempfile.TemporaryDirectory() as folder:
        text = (ROOT / "tests/data/verl/stock_rate.jsonl").read_bytes()
        (Path(folder) / "metrics-000.jsonl").write_bytes(text)
        steps = read_run(folder).steps
    metrics = [{key: value for key, value in step.metrics.items() if value is not None} for step in steps]
    yield "verl, FSDP with vLLM", [metrics]
    for setting, runs in clean_runs.recorded():
        yield f"TRL with vLLM, {setting}", runs


def resampled(runs: Sequence[Sequence[Entry]], steps: int, seed: int) -> Iterator[list[Entry]]:
    """Yield for each run a run of its share of the steps, made of its own blocks of consecutive steps."""
    draw = random.Random(seed)
    for run in runs:
        length = min(BLOCK, len(run))
        entries: list[Entry] = []
        while len(entries) < steps // len(runs):
            first = draw.randrange(len(run) - length + 1)
            entries += run[first : first + length]
        yield entries


@lru_cache(maxsize=STEPS)
def growth_of(gaps: tuple[float, ...], name: str) -> dict[str, float]:
    """Return the metrics of the growth of consecutive gaps; where they do not exceed the rule's floor they are all alike."""
    points = tuple((step, math.log(gap)) for step, gap in enumerate(gaps))
    growth = Growth(points=points[:-1])
    _, found = grown(growth, len(gaps) - 1, gaps[-1], name)
    return {PREFIX + name: value for name, value in found.items()}


def replayed(logs: Sequence[Log]) -> tuple[Counter[str], int]:
    """Return how often each rule warns over the logs of a run, and how often it ends the run."""
    rules, state, window = rules_of(MonitorConfig(), TRL), AlarmState(), BadRowWindow()
    gaps: dict[str, tuple[float, ...]] = {}
    warned: Counter[str] = Counter()
    ends = 0
    for step, log in enumerate(logs, 1):
        bad = int(sum(value for name, value in log.items() if name.startswith(PREFIX + METRIC)))
        window = window.after(step, bad, clean_runs.ROWS)
        ends += window.too_many(MonitorConfig().share_of_bad_rows) is not None
        metrics = dict(log)
        log_odds = log.get(PREFIX + clean_runs.LOG_ODDS)
        now = {
            "k3": log.get(PREFIX + "k3_kl"),
            "log_odds": None if log_odds is None else log_odds**2,
            "weight_sync": log.get(PREFIX + "weight_sync_gap"),
        }
        for name, gap in now.items():
            if gap is not None:
                gaps[name] = (*gaps.get(name, ()), max(gap, GROWTH_FLOOR))[-GROWTH_WINDOW:]
                metrics |= growth_of(gaps[name], name)
        state, alarms = watch(state, metrics, rules, step)
        raised = [alarm for alarm in alarms if alarm.status == "raised"]
        warned.update(alarm.metric for alarm in raised)
        ends += sum(alarm.action == "stop" for alarm in raised)
    verdicts = [log[clean_runs.UPDATE] for log in logs if clean_runs.UPDATE in log]
    doubted, ended = verdicts_replayed([(bad > clean_runs.GOOD, bad == clean_runs.CLEARLY_BAD) for bad in verdicts])
    if doubted:
        warned["weight_sync"] = doubted
    return warned, ends + ended


def updates(dtype: str, seed: int = 0) -> list[tuple[bool, bool]]:
    """Return, for weight updates that all reach an engine of a dtype, whether each is called bad, and clearly so."""
    model = Recurrent(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = TrainedModel(model, optimizer, None, logits=recurrent_logits)
    engine = TorchRollout(copy.deepcopy(model).to(getattr(torch, dtype)), recurrent_logits, dtype=dtype)
    probes = draw_probes(trainer.vocabulary())
    verifier = WeightVerifier(trainer, engine, MonitorConfig(), probes, dtype=dtype, trainer_dtype="float32")
    verifier.begin()
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(UPDATES):
        tokens = torch.randint(len(trainer.vocabulary()), (8, 16), generator=draw)
        logprobs = model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
        (-logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.update(trainer.named_parameters())
        verdict = verifier.judge()
        found.append((not verdict.ok, verdict.clear))
    return found


def verdicts_replayed(found: Sequence[tuple[bool, bool]]) -> tuple[int, int]:
    """Return how many updates warn, and how many would end a run."""
    doubted: tuple[bool, ...] = ()
    warned = ends = 0
    for bad, clear in found:
        doubted = (*doubted, bad)[-RECENT:]
        warned += bad
        ends += bad and (clear or doubted_too_often(doubted))
    return warned, ends


def row(name: str, recorded_steps: int, steps: int, ends: int, warned: Mapping[str, int]) -> dict[str, Any]:
    """Return what is printed of one kind of log."""
    often = {rule: round(count / steps * 10_000, 2) for rule, count in warned.items()}
    return {
        "name": f"false alarms, {name}",
        "recorded": recorded_steps,
        "steps": steps,
        "ends": ends,
        "warnings per 10,000 steps": often,
    }


def run(steps: int = STEPS) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of clean log, and for the weight updates of each dtype."""
    for seed, (name, runs) in enumerate(clean_logs()):
        warned: Counter[str] = Counter()
        ends = taken = 0
        for logs in resampled(runs, steps, seed):
            of_run, ended = replayed(logs)
            warned, ends, taken = warned + of_run, ends + ended, taken + len(logs)
        yield row(name, sum(map(len, runs)), taken, ends, warned)
    for dtype in ("float32", "bfloat16", "float16"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = updates(dtype)
        (entries,) = resampled([found], steps, 0)
        warnings_of, ends = verdicts_replayed(entries)
        counted = {"weight_sync": warnings_of} if warnings_of else {}
        yield row(f"weight updates in {dtype}, made now", len(found), len(entries), ends, counted)
