"""Kills whole runs of verl's main_ppo at random moments, resumes them without help, and judges how they end."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mismatch_ext.log_reading import RunData, read_run, segment_files
from mismatch_ext.names import MEASURES
from tests.peers.death import plain
from tests.peers.scenarios import Ran, named
from tests.peers.verl.main_ppo import KILLED, VerlRun, lasting, run_verl

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_kills as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_kills")

# Every section that has a state.
BLOCK = (
    "+mismatch.precision.dtype=float32",
    "+mismatch.routing={mode:R3,measured:0.5}",
    "+mismatch.kl={coef:0.05,target_kl:0.01}",
    "+mismatch.lr={trigger:grad_norm,decay:0.9,baseline_window:1,surge_ratio:1.0001}",
    "+mismatch.monitor.alarms={response_length/mean:{above:1e-9,patience:4}}",
)
RESUMING = ("trainer.save_freq=1", "trainer.resume_mode=auto")
AGREEMENT = "mismatch/routing/compared_tokens"


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A run that nothing stopped, its folder, and the seconds that its first steps took."""

    work: Path
    steps: int
    seconds: float


def run(work: Path, model: Path, steps: int, until: Callable[[], bool] | None = None) -> VerlRun:
    """Train to the end, from the last checkpoint if there is one, or be killed when it is time."""
    (work / "metrics.jsonl").unlink(missing_ok=True)  # verl's own, where a kill may have left half a line
    overrides = [*lasting(steps), *BLOCK, *RESUMING]
    return run_verl(work, overrides, model=model, plugin=True, timeout=600, until=until)


def whole_run(work: Path, model: Path, steps: int) -> Whole:
    """Train to the end."""
    found = run(work, model, steps).expect(steps)
    data = recorded(work)
    measured, native = data.series(AGREEMENT)[0], data.series("mismatch/native/k3_kl")[0]
    # Else whether the choice of measured passes is resumed would not show.
    assert 0 < len(measured) < steps or 0 < len(native) < steps, (measured, native)
    # The first step of every leg takes longest.
    return Whole(work=work, steps=steps, seconds=sum(step["timing_s/step"] for step in found[:4]))


def recorded(work: Path) -> RunData:
    """Return what a run has written."""
    return read_run(work / "checkpoints/mismatch")


class Moment:
    """Is over some seconds after a run has begun to train, and never before its first checkpoint is named as the last.

    Args:
        work: The run's folder.
        delay: Seconds.
        clock: Tells the time, in seconds.
    """

    def __init__(self, work: Path, delay: float, clock: Callable[[], float]) -> None:
        self._metrics, self._tracker = (
            work / "checkpoints/mismatch",
            work / "checkpoints/latest_checkpointed_iteration.txt",
        )
        self._before, self._delay, self._clock = self._segments(), delay, clock
        self._since: float | None = None

    def _segments(self) -> int:
        return len(segment_files(self._metrics)) if self._metrics.is_dir() else 0

    def __call__(self) -> bool:
        """Whether it is time."""
        if self._since is None and self._tracker.exists() and self._segments() > self._before:
            self._since = self._clock()
        return self._since is not None and self._clock() - self._since >= self._delay


def state_of(work: Path, step: int) -> dict[str, Any]:
    """Return weights, optimizer and our state of a checkpoint."""
    folder = work / f"checkpoints/global_step_{step}"
    loaded = {
        name: plain(torch.load(folder / f"actor/{name}_world_size_1_rank_0.pt", weights_only=False))
        for name in ("model", "optim")
    }
    ours = {name: json.loads((folder / name).read_text()) for name in ("mismatch.json", "actor/mismatch.json")}
    # The engine's log-probabilities of probes are in it, see `metrics_of`, and each start looks once more.
    assert ours["mismatch.json"].pop("weight_sync")["engines"]
    return {**loaded, **ours}


def metrics_of(data: RunData) -> dict[int, dict[str, Any]]:
    """Return every metric of a run by step; of those that the engine's log-probabilities enter, that they are there.

    vLLM's server sums float32 products in an order that hangs on which requests arrive together, so that its log-probabilities
    differ in the last bits between two runs of the same. What it samples, and what the trainer makes of it, does not.
    """

    def exact(name: str) -> bool:
        short = name.removeprefix("mismatch/").removeprefix("native/")
        return (short not in MEASURES or short in ("tokens", "sequences")) and not name.startswith(
            ("training/rollout_", "rollout_corr/")
        )

    return {
        record.step: {
            name: value if exact(name) else None
            for name, value in record.metrics.items()
            if not name.startswith("timing_") and "perf/" not in name and name != "mismatch/weight_sync_gap"
        }
        for record in data.steps
    }


def check_equal(whole: Whole, work: Path, kills: int) -> None:
    """Check that a run ended where another did; a kill may have cost a step's log, because verl saves before it logs."""
    data = recorded(work)
    lost = sorted({*range(1, whole.steps + 1)} - {record.step for record in data.steps})
    assert len(lost) <= kills
    found, expected = state_of(work, whole.steps), state_of(whole.work, whole.steps)
    if lost:  # the alarms have not seen those steps
        for state in (found, expected):
            state["mismatch.json"] = {
                name: part for name, part in state["mismatch.json"].items() if name not in ("monitor", "log")
            }
    for name in expected:
        assert found[name] == expected[name], name
    series, wanted = metrics_of(data), metrics_of(recorded(whole.work))
    assert sorted([*series, *lost]) == sorted(wanted) == list(range(1, whole.steps + 1))
    for step, metrics in series.items():
        apart = {
            name: (metrics.get(name), wanted[step].get(name))
            for name in metrics.keys() | wanted[step].keys()
            if metrics.get(name, "absent") != wanted[step].get(name, "absent")
        }
        assert not apart, f"step {step}: {apart}"


def killed_run(
    work: Path,
    model: Path,
    whole: Whole,
    draw: random.Random,
    *,
    more: Callable[[], bool],
    told: Callable[[], None],
    clock: Callable[[], float],
) -> None:
    """Train to the end over as many kills as are wanted and the run has time for.

    Each leg is killed at a random moment of its first four steps or so, with all of its processes at once.

    Args:
        work: The run's folder.
        model: The checkpoint to begin with.
        whole: The run that nothing stopped.
        draw: Draws the moments.
        more: Whether there is to be another kill.
        told: Is told of each.
        clock: Tells the time, in seconds.
    """
    kills = 0
    while True:
        until = Moment(work, draw.uniform(0, whole.seconds), clock) if more() else None
        ran = run(work, model, whole.steps, until)
        if ran.code != KILLED:
            assert ran.code == 0, ran.log[-6000:]
            check_equal(whole, work, kills)
            return
        kills += 1
        told()


# In verl's worker and engine alone, in one process.

MOMENTS: dict[str, float] = {"mismatch.json": 2, "torch.save": 8, "time": 0.5}
"""Where it is killed, and after how many times at most; seconds for `time`."""


def kill_in_process(
    start: Callable[..., Ran],
    model: Path,
    work: Path,
    draw: random.Random,
    *,
    kills: int,
    steps: int,
    told: Callable[[], None],
) -> dict[str, int]:
    """Kill one worker's training so many times, the moments in turn, and return how many there were of each."""
    whole = start(scenarios.leg, model=model, out=work / "whole", steps=steps).expect()
    measured = ["routing/compared_tokens" in log for log in whole["logs"]]
    assert any(measured) and not all(measured)  # else whether their choice is resumed would not show
    found = dict.fromkeys(MOMENTS, 0)
    runs = 0
    while (left := kills - sum(found.values())) > 0:
        moments = draw.sample(list(MOMENTS), len(MOMENTS))[:left]
        for where in (*moments, None):
            count = 0.0 if where is None else MOMENTS[where]
            count = draw.uniform(0, count) if where == "time" else draw.randint(1, max(int(count), 1))
            kill = None if where is None else {"where": where, "count": count, "part": draw.random()}
            ran = start(scenarios.leg, model=model, out=work / f"run-{runs}", steps=steps, kill=kill)
            if ran.code == 0:
                break
            assert where is not None and ran.code == -signal.SIGKILL, f"{kill}: {ran.code}\n{ran.stderr[-4000:]}"
            found[where] += 1
            told()
        assert ran.expect() == whole
        runs += 1
    return found
