"""The driver's part of verl's checkpoints, without Ray."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mismatch_ext.checks import Checks
from mismatch_ext.config import MismatchConfig


class Host:
    """verl's trainer with a `checkpoint_callback_class` that uploads a checkpoint, and deletes it here."""

    uploaded: Path
    config: Any
    global_steps = 1

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        folder.rename(self.uploaded)


def moved_away() -> dict[str, Any]:
    """Save a step and log it; return what was uploaded, and what lies in the run's folder after that."""
    from mismatch_ext.adapters.verl.driver.trainer import (
        MismatchTrainer,  # in a fork, as `scenarios_driver.driving` says
    )

    driver: Any = object.__new__(type("Driver", (MismatchTrainer, Host), {}))
    with tempfile.TemporaryDirectory() as work:
        driver.config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=f"{work}/run"))
        driver.uploaded = Path(work, "uploaded")
        driver._block, driver._checks = MismatchConfig(), Checks(True)
        driver._kl = driver._draws = driver._weights = None
        driver._waiting, driver._saved_step = [{"f_tau": 0.5}], 0
        logged = SimpleNamespace(metrics={}, shown={}, stop=None)
        driver._log = SimpleNamespace(state_dict=dict, log=lambda *_: logged, shown=dict)
        driver._save_checkpoint()
        driver._record({}, 1)
        local = [path.name for path in Path(work, "run").iterdir()]
        return {"uploaded": json.loads((driver.uploaded / "mismatch.json").read_text()), "local": local}
