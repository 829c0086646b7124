"""One run of verl's asynchronous modes that is ended in every way there is, and goes on each time from what was left of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mismatch_ext.log_reading import read_run
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import KILLED, VerlRun, run_verl

BLOCK = ("+mismatch.precision.dtype=float32", "+mismatch.routing={mode:R3,measured:1.0}", "+mismatch.lr.period=2")
STOP = "+mismatch.monitor.alarms={response_length/mean:{above:1e-9,patience:1,action:stop}}"
NONE_BAD = "+mismatch.monitor.max_bad_rows=0"
"""One bad row ends the run."""
LAST = 12
"""More steps than are trained before the last ending."""


@dataclass(frozen=True)
class Ending:
    """How a run ended, and the step whose checkpoint the next one goes on from."""

    run: VerlRun
    after: int


def endings(work: Path, mode: tuple[str, ...], model: Path) -> dict[str, Ending]:
    """Run once for each ending, in one folder, and then to the end.

    Args:
        work: Folder.
        mode: Overrides that set the mode.
        model: Checkpoint with experts.
    """
    found: dict[str, Ending] = {}

    def ended(
        name: str, *overrides: str, fault: str = "", steps: int = LAST, until: Callable[[], bool] | None = None
    ) -> None:
        (work / "metrics.jsonl").unlink(missing_ok=True)
        settings = [*BLOCK, *mode, *overrides, "trainer.resume_mode=auto", f"trainer.total_training_steps={steps}"]
        run = run_verl(work, settings, model=model, plugin=True, env={FAULT: fault}, until=until)
        saved = work / "checkpoints/latest_checkpointed_iteration.txt"
        found[name] = Ending(run, int(saved.read_text()) if saved.exists() else 0)

    ended("stopped", STOP)
    ended("lost routes", NONE_BAD, fault="lost_routes@3")
    ended("killed", "trainer.save_freq=1", until=_logged(work / "metrics.jsonl"))
    ended("not a number", NONE_BAD, fault=f"nonfinite_logprob@{found['killed'].after + 2}")
    ended("completed", steps=found["not a number"].after + 1)
    return found


def _logged(file: Path) -> Callable[[], bool]:
    """Return what tells that a step's metrics are written, which come after its checkpoint."""
    return lambda: file.exists() and file.read_text().count("\n") >= 1


def check_endings(found: dict[str, Ending], work: Path) -> None:
    """Check that each ending says what it was, and that the next run goes on from the last checkpoint."""
    runs = {name: ending.run for name, ending in found.items()}
    assert runs["stopped"].code == 0 and found["stopped"].after == 1, runs["stopped"].log[-6000:]
    said = {
        "lost routes": "came without routing",
        "not a number": "token 1: the engine's log-probability is nan",
    }
    for name, words in said.items():
        assert runs[name].code == 0, runs[name].log[-6000:]
        assert words in runs[name].log, (name, runs[name].log[-6000:])
    assert runs["killed"].code == KILLED
    assert runs["completed"].code == 0, runs["completed"].log[-6000:]
    after = 0
    for name, ending in found.items():
        assert ending.after >= after, name
        if after:
            assert "training prompt groups from TransferQueue" in ending.run.log, name
            assert "Restored 0 training" not in ending.run.log, name
            if name != "killed":  # whose metrics may end in half a line
                steps = [int(step["training/global_step"]) for step in ending.run.steps]
                assert steps == [*range(after + 1, after + 1 + len(steps))], (name, steps)
        assert (work / f"checkpoints/global_step_{ending.after}/transfer_queue/metadata.json").is_file(), name
        after = ending.after
    data = read_run(work / "checkpoints/mismatch")
    assert data.ends[-1].status == "completed"
    # Rules and schedules go on as if nothing had happened; the kill may come between a checkpoint and its step's log.
    logged = {step.step: step.metrics for step in data.steps}
    last = found["not a number"].after + 1
    assert set(logged) <= set(range(1, last + 1)) and len(logged) + 1 >= last, (last, sorted(logged))
    assert not [event for event in data.events if event.name == "weight_sync"]
    for step, metrics in logged.items():
        assert metrics["mismatch/lr_multiplier"] == max(0.1, 0.5 ** ((step - 1) // 2)), step
