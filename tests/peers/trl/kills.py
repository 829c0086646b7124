"""Kills runs of the real TRL at random moments, resumes them, and holds them against one that nothing stopped."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_ext.log_reading import read_run, segment_files
from tests.peers.scenarios import Ran, named

scenarios = named("tests.peers.trl.scenarios_kills")

STEPS = 10
"""Optimizer steps of a run."""

# Where a run is killed, and after how many times, counted from the leg's beginning, at most; seconds for `time`.
MOMENTS: dict[str, float] = {
    "mismatch.json": 2,
    "metrics": 6,
    "torch.save": 10,
    "weights": 2,
    "trainer_state.json": 2,
    "rotation": 2,
    "step begins": 3,
    "step ends": 3,
    "generation": 30,
    "time": 0.8,
}
KILLS_OF_A_RUN = 5
AGREEMENT = ("mismatch/routing/compared_tokens", "mismatch/routing/native_rows_frac")

Start = Callable[..., Ran]


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A run that nothing stopped, and its output folder."""

    mode: str
    out: Path
    result: dict[str, Any]


def whole_run(start: Start, model: Path, out: Path, mode: str) -> Whole:
    """Train to the end."""
    result = start(scenarios.leg, model=model, out=out, mode=mode, steps=STEPS).expect()
    measured = set(read_run(out / "mismatch").series(AGREEMENT[0])[0])
    # Else whether the choice of measured passes is resumed would not show.
    assert 1 <= len(measured) < STEPS, sorted(measured)
    return Whole(mode=mode, out=out, result=result)


def planned(draw: random.Random, where: str) -> dict[str, Any]:
    """Draw when to kill a leg at one of the moments."""
    most = MOMENTS[where]
    count = draw.uniform(0, most) if where == "time" else draw.randint(1, int(most))
    return {"where": where, "count": count, "part": draw.random()}


def killed_run(start: Start, model: Path, out: Path, whole: Whole, plans: Sequence[dict[str, Any]]) -> list[str]:
    """Train to the end over as many kills as the run has time for, and return their moments.

    Every leg after the first is begun with `resume_from_checkpoint=True`, once checkpoints that were not finished are deleted.
    """
    died: list[str] = []
    for number, kill in enumerate([*plans, None]):
        ran = start(scenarios.leg, model=model, out=out, mode=whole.mode, steps=STEPS, kill=kill, resume=number > 0)
        if ran.code == 0:
            break
        assert kill is not None and ran.code == -signal.SIGKILL, f"{died}, {kill}: {ran.code}\n{ran.stderr[-4000:]}"
        died.append(kill["where"])
    check_equal(whole, out, ran.expect())
    return died


def check_equal(whole: Whole, out: Path, result: dict[str, Any]) -> None:
    """Check that a run ended where another did: weights, optimizer, our state, every metric of every step."""
    assert result == whole.result
    last = f"checkpoint-{whole.result['step']}/mismatch.json"
    assert json.loads((out / last).read_text()) == json.loads((whole.out / last).read_text())
    series, expected = metrics_of(out), metrics_of(whole.out)
    assert series.keys() == expected.keys() == set(range(1, whole.result["step"] + 1))
    for step, metrics in expected.items():
        assert series[step] == metrics, f"step {step}: {differences(series[step], metrics)}"
    check_lines(out / "mismatch", whole.result["step"])


def metrics_of(out: Path) -> dict[int, dict[str, Any]]:
    """Return every metric of a run by step, without what tells the time and the mean of the losses since the last start."""
    return {
        record.step: {
            name: value
            for name, value in record.metrics.items()
            if not name.endswith(("_time", "_runtime", "_per_second")) and name != "train_loss"
        }
        for record in read_run(out / "mismatch").steps
    }


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics that differ, with both values."""
    return {
        name: (found.get(name), expected.get(name))
        for name in found.keys() | expected.keys()
        if found.get(name) != expected.get(name)
    }


def check_lines(folder: Path, steps: int) -> None:
    """Check that each start has written its steps once and in order, from its checkpoint on, and the last one to the end."""
    resumed: dict[int, int] = {}
    written: dict[int, list[int]] = {}
    lines = [line for file in segment_files(folder) for line in file.read_text().splitlines(keepends=True)]
    for text in lines:
        if not text.endswith("\n"):
            continue  # torn by a kill
        line = json.loads(text)
        if line["kind"] == "header":
            resumed[line["segment"]] = line.get("resume_step", 0)
            written[line["segment"]] = []
        elif line["kind"] == "step" and "loss" in line["metrics"]:
            written[line["segment"]].append(line["step"])
    for segment, found in written.items():
        assert found == list(range(resumed[segment] + 1, resumed[segment] + 1 + len(found))), (segment, found)
    assert resumed[max(resumed)] + len(written[max(written)]) == steps


def kill_many(
    start: Start, model: Path, work: Path, whole: Whole, *, kills: int, seed: int, told: Callable[[int], None]
) -> tuple[int, dict[str, int]]:
    """Kill runs until there have been so many kills, the moments in turn; return how many runs, and kills of each moment.

    Args:
        start: Runs a scenario.
        model: The checkpoint to begin with.
        work: Folder of the runs; each is removed once it has been judged.
        whole: The run that nothing stopped.
        kills: How many kills.
        seed: Of moments and counts.
        told: Is told of each run's number of kills.
    """
    draw = random.Random(seed)
    found, waiting = dict.fromkeys(MOMENTS, 0), list[str]()
    runs = 0
    while (left := kills - sum(found.values())) > 0:
        if len(waiting) < KILLS_OF_A_RUN:
            waiting += draw.sample(list(MOMENTS), len(MOMENTS))
        chosen, waiting = waiting[: min(KILLS_OF_A_RUN, left)], waiting[KILLS_OF_A_RUN:]
        out = work / f"run-{runs}"
        died = killed_run(start, model, out, whole, [planned(draw, where) for where in chosen])
        for where in died:
            found[where] += 1
        shutil.rmtree(out)
        runs += 1
        told(len(died))
    return runs, found
