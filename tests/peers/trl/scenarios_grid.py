"""A trainer whose updates an engine of a coarser dtype does not get."""

from __future__ import annotations

import warnings
from typing import Any

from mismatch_ext.log_reading import read_run
from tests.peers.trl.scenarios_training import build


def train(model: str, out: str, dtype: str, **overrides: Any) -> dict[str, Any]:
    """Train with parameters in `dtype` and without autocast, where vLLM takes bfloat16; return what is said of it."""
    given = {"bf16": False, "model_init_kwargs": {"dtype": dtype}, "max_steps": 4, **overrides}
    trainer = build(model, out, {}, **given)
    run: Any = trainer.mm
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "dtypes": [run.compute_dtype, run.readings["engine"].model_dtype],
        "shares": [entry.get("mismatch/engine_moved_frac") for entry in logged],
        "events": [[e.name, e.step, e.message] for e in read_run(run.log.run_dir).events],
        "told": [str(warning.message) for warning in told if "changes" in str(warning.message)],
    }
