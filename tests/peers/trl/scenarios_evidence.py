"""Runs of TRL in which something goes wrong at step 7, and what they leave behind."""

from __future__ import annotations

import copy
from typing import Any

from tests.peers.trl.scenarios_training import AtStep, build, outcome

FIRST = 7
"""The first step whose batch has the fault."""
HEAT = 1.25
RUN = {
    "max_completion_length": 160, "vllm_max_model_length": 224, "per_device_train_batch_size": 64, "num_generations": 8,
    "learning_rate": 1e-5, "max_steps": 9, "save_strategy": "steps", "save_steps": 10,
}  # fmt: skip


def heat(trainer: Any) -> None:
    """Let the engine sample, and report, at another temperature than it is asked for."""
    llm = trainer.vllm_generation.llm
    generate = llm.generate

    def generate_heated(*args: Any, **kwargs: Any) -> Any:
        if "sampling_params" in kwargs:  # TRL's own call, and no probe of a weight update
            kwargs["sampling_params"] = copy.deepcopy(kwargs["sampling_params"])
            kwargs["sampling_params"].temperature = HEAT
        return generate(*args, **kwargs)

    llm.generate = generate_heated


def faulty(model: str, out: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Train with an engine that is too hot from one step on."""
    trainer = build(model, out, block, **{**RUN, **overrides})
    trainer.add_callback(AtStep(FIRST - 1, lambda: heat(trainer)))
    trainer.train()
    return outcome(trainer)
