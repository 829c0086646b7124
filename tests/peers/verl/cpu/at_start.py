"""What a process of a run does when Python starts in it, before verl and the rollout engine are imported. Cheap to import."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.peers.verl.cpu.after_import import AfterImport, Missing

REPORTS = "VERL_CPU_REPORTS"
"""Environment variable that names the file for what workers and rollout servers report to the driver."""

LEFT = "VERL_CPU_LEFT"
"""Environment variable that names the file for what verl's driver still holds of a batch once its step is over."""

ANSWERS_OF_A_STEP = 16
"""As `main_ppo.py` sets them, which takes long to import."""


def leave_out_other_backends() -> None:
    """Let verl do without the backends that it tries to import and does not need here: a fifth of every process's start.

    It takes each for optional; megatron-core and vLLM, which they import, are installed for other tests.
    """
    for name in (
        "verl.workers.engine.mindspeed",
        "verl.workers.engine.megatron",
        "verl.checkpoint_engine.hccl_checkpoint_engine",
    ):
        Missing(name, lambda: True, "left out of runs on a CPU")


def keep_reports(file: Path) -> None:
    """Keep what every process reports as it comes in, as `tests/data/verl` has it."""

    def change(module: Any) -> None:
        original = module.check_reports

        def check_reports(block: Any, workers: Any, rollouts: Any, *rest: Any) -> Any:
            answers = [
                {"engine": a.engine, "expected": a.expected, "reports": list(a.reports), "failure": repr(a.failure)}
                for a in rollouts
            ]
            found = {"block": block.to_dict(), "workers": list(workers), "rollouts": answers}
            file.write_text(json.dumps(_without_paths(found), indent=1, sort_keys=True) + "\n", encoding="utf-8")
            return original(block, workers, rollouts, *rest)

        module.check_reports = check_reports

    AfterImport("mismatch_ext.adapters.verl.driver.reports", change)


def look_for_leftovers(file: Path) -> None:
    """Write after every step which tensors of the driver have a row for each answer of a batch, with and without one of ours."""

    def change(module: Any) -> None:
        metrics = module.MismatchTrainer._compute_metrics

        def _compute_metrics(self: Any, *args: Any, **kwargs: Any) -> Any:
            import torch

            result = metrics(self, *args, **kwargs)
            found = _batch_shaped()
            held = torch.zeros(ANSWERS_OF_A_STEP, 2)  # it would be seen
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"found": found, "with one": _batch_shaped()}) + "\n")
            del held
            return result

        module.MismatchTrainer._compute_metrics = _compute_metrics

    AfterImport("mismatch_ext.adapters.verl.driver.trainer", change)


def _batch_shaped() -> list[list[int]]:
    """Return the shapes of all tensors of this process that have a row for each answer, and tokens in it."""
    import gc

    from torch import Tensor

    gc.collect()
    tensors = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    return [[int(size) for size in t.shape] for t in tensors if t.dim() > 1 and t.shape[0] == ANSWERS_OF_A_STEP]


def _without_paths(found: Any) -> Any:
    """Return plain data in which a path is only its last part: folders are this machine's."""
    if isinstance(found, dict):
        return {name: _without_paths(value) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_without_paths(value) for value in found]
    return found.rpartition("/")[2] if isinstance(found, str) and found.startswith("/") else found


leave_out_other_backends()
if name := os.environ.get(REPORTS):
    keep_reports(Path(name))
if name := os.environ.get(LEFT):
    look_for_leftovers(Path(name))
if name := os.environ.get("VERL_CPU_LOOKS"):
    from tests.peers.verl.cpu.looks import note_movement, note_verdicts

    note_verdicts(Path(name))
    note_movement(Path(name))
if os.environ.get("VERL_CPU_FAULT"):
    import tests.peers.verl.cpu.faults  # noqa: F401
if os.environ.get("VERL_CPU_TWICE"):
    from tests.peers.verl.cpu.twice import take_twice

    take_twice()
