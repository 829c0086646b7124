"""What a run in float16 says of a checkpoint that is risky there; asserted on runs that both hosts' own tests make."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mismatch_ext.log_reading import RunData

NAME = "model.layers.1.mlp.up_proj.weight"


def risky(model: Path, directory: Path) -> Path:
    """Save a checkpoint in which every fifth weight of one matrix is subnormal in float16."""
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        changed.get_parameter(NAME).view(-1)[::5] = 1e-6
    changed.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model).save_pretrained(directory)
    return directory


def expect_told(data: RunData) -> None:
    """Check that each start of a run has warned, and gone on."""
    told = [event for event in data.events if event.name == "readiness"]
    assert [event.step for event in told] == [header.get("resume_step") or 0 for header in data.headers]
    assert {event.level for event in told} == {"warning"} and data.steps
    for event in told:
        assert event.message.startswith("the checkpoint is risky in float16: 1 weights are subnormal in more than 10% ")
        assert f": {NAME} (" in event.message
