"""verl's side of what both hosts are held to; TRL's is in `trl/scenarios_hosts.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mismatch_ext.adapters.verl import engine as worker_state
from omegaconf import OmegaConf

from mismatch_ext.checkpoint import STATE_FILE
from mismatch_ext.checks import Checks
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import MismatchError
from mismatch_ext.log import RunLog
from mismatch_ext.names import VERL
from mismatch_ext.routing.replay import MeasuredPasses
from tests.peers.conformance.resumed import Told, told


def resumed(out: str, block: dict[str, Any], files: dict[str, str]) -> dict[str, Told]:
    """Resume the driver's own part from checkpoints that differ in our file alone; return what each has led to.

    Imported here, in a fork: with its driver verl imports the trainers that a block is refused in.
    """
    from mismatch_ext.adapters.verl.driver.processes import Processes
    from mismatch_ext.adapters.verl.driver.trainer import MismatchTrainer

    parsed = MismatchConfig.parse(block)
    assert parsed is not None
    found = {}
    for name, text in files.items():
        folder = Path(out, name)
        checkpoint = folder / "global_step_3"
        checkpoint.mkdir(parents=True)
        (checkpoint / STATE_FILE).write_text(text)
        driver: Any = object.__new__(MismatchTrainer)  # without its processes
        driver._block, driver._checks, driver._kl = parsed, Checks(True), None
        driver._draws, driver.global_steps = None if parsed.routing is None else MeasuredPasses(parsed.routing, 0), 3
        driver.config = OmegaConf.create({"trainer": {"default_local_dir": str(folder), "resume_mode": "auto"}})
        driver._log = RunLog(
            parsed,
            folder / "mismatch",
            info=lambda: {"config": parsed.to_dict()},
            step=lambda: 3,
            names=VERL,
            checks=driver._checks,
        )
        driver._log.begin(3)
        driver._processes = object.__new__(Processes)
        driver._processes.log = driver._log
        error = ""
        try:
            driver._resume_state()
        except MismatchError as refused:
            error = f"{type(refused).__name__}: {refused}"
        found[name] = told(folder / "mismatch", error, checkpoint / STATE_FILE)
    return found


def resumed_by_a_worker(out: str, files: dict[str, str]) -> dict[str, Told]:
    """Read our file as a worker does, from an actor's folder; return what each has led to."""
    found = {}
    for name, text in files.items():
        folder = Path(out, name, "actor")
        folder.mkdir(parents=True)
        (folder / STATE_FILE).write_text(text)
        error = ""
        try:
            worker_state.read_state(str(folder))
        except MismatchError as refused:
            error = f"{type(refused).__name__}: {refused}"
        found[name] = told(None, error, folder / STATE_FILE)
    return found
