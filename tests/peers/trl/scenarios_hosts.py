"""TRL's side of what both hosts are held to; verl's is in `verl/in_process/scenarios_hosts.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerState

from mismatch_ext.checkpoint import STATE_FILE
from mismatch_ext.errors import MismatchError
from tests.peers.conformance.resumed import Told, told
from tests.peers.trl.scenarios_training import build


def resumed(model: str, out: str, block: dict[str, Any], files: dict[str, str]) -> dict[str, Told]:
    """Resume a real trainer's own part from checkpoints that differ in our file alone; return what each has led to."""
    found = {}
    for name, text in files.items():
        folder = Path(out, name)
        checkpoint = folder / "checkpoint-3"
        checkpoint.mkdir(parents=True)
        (checkpoint / STATE_FILE).write_text(text)
        state = TrainerState()
        state.global_step = 3
        state.save_to_json(str(checkpoint / "trainer_state.json"))
        trainer = build(model, str(folder), block, use_vllm=False, bf16=False, model_init_kwargs={"dtype": "float32"})
        trainer.state = state  # as transformers sets it before it tells callbacks that training begins
        trainer.mm.log.begin(3)
        error = ""
        try:
            trainer.mm.load(str(checkpoint))
        except MismatchError as refused:
            error = f"{type(refused).__name__}: {refused}"
        found[name] = told(folder / "mismatch", error, checkpoint / STATE_FILE)
    return found
