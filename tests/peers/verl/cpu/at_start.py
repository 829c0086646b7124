"""What a process of a run does when Python starts in it, before verl and the rollout engine are imported. Cheap to import."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.peers.verl.cpu.after_import import AfterImport, Missing

REPORTS = "VERL_CPU_REPORTS"
"""Environment variable that names the file for what workers and rollout servers report to the driver."""


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
if os.environ.get("VERL_CPU_FAULT"):
    import tests.peers.verl.cpu.faults  # noqa: F401
