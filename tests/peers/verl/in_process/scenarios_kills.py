"""verl's worker and engine, killed while they train and save, and resumed as verl's driver resumes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename

from tests.peers.death import Death, plain
from tests.peers.verl.in_process.workers import batch, parameters, scored, update, worker

BLOCK = {
    "precision": {"dtype": "float16", "init_scale": 1024.0, "growth_interval": 3},
    "routing": {"mode": "R2", "measured": 0.5},
    "lr": {
        "trigger": "grad_norm",
        "decay": 0.9,
        "baseline_window": 1,
        "surge_ratio": 1.0001,
    },
}


def leg(model: str, out: str, steps: int, kill: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train to the end or die on the way, from the last checkpoint where there is one.

    Args:
        model: The checkpoint to begin with.
        out: Folder of the checkpoints, the same for all legs of a run; laid out, and written in the order, of verl's driver.
        steps: Updates of the whole run.
        kill: `where`, `count` and `part`, as `Death` has them.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    built = worker(model, BLOCK, micro_batch=2, dtype="float16")
    chosen = find_latest_ckpt_path(out)
    first = 0
    if chosen is not None:
        built.load_checkpoint(str(Path(chosen) / "actor"))
        first = int(Path(chosen).name.removeprefix("global_step_"))
    death = None if kill is None else Death(kill["count"], kill["part"], lambda: step > 0)
    step = first
    if death is not None and kill is not None:
        death.plant(kill["where"])
    for step in range(first, steps):
        built.engine.mismatch_update_lr()
        data = scored(built, batch([(step + sample) % 7 for sample in range(4)]))
        metrics = update(built, data)
        told = {"lr": metrics["lr"][0], "grad_norm": float(metrics["grad_norm"][0]), **built.engine.mismatch_metrics()}
        (folder / f"log_{step + 1}.json").write_text(json.dumps(told))
        saved = folder / f"global_step_{step + 1}"
        built.save_checkpoint(str(saved / "actor"))
        torch.save({"step": step + 1}, saved / "data.pt")
        tracker = Path(get_checkpoint_tracker_filename(out))
        tracker.write_text(str(step + 1))
    last = folder / f"global_step_{steps}/actor"
    optimizer = torch.load(last / "optim_world_size_1_rank_0.pt", weights_only=False)
    return {
        "parameters": parameters(built),
        "optimizer": hashlib.sha256(repr(plain(optimizer)).encode()).hexdigest(),
        "state": json.loads((last / "mismatch.json").read_text()),
        "logs": [json.loads((folder / f"log_{number}.json").read_text()) for number in range(1, steps + 1)],
    }
