"""Completions of several turns on two ranks, of which one takes more turns; run as `scenarios_ranks` is."""

from __future__ import annotations

import os
from typing import Any

from tests.peers.trl.scenarios_ranks import main, outcome
from tests.peers.trl.scenarios_turns import build


def unequal(out: str) -> dict[str, Any]:
    """Train with tools, whose calls end after one turn on the main process and after two on the other."""
    block = {"precision": {"dtype": "float32"}, "correction": {"preset": "decoupled_token_is"}}
    trainer = build(f"{out}/{os.environ['RANK']}", block, max_steps=2, bf16=None, top_k=0)
    trainer.max_tool_calling_iterations = 1 + trainer.accelerator.process_index
    calls: list[int] = []
    generate = trainer.vllm_generation.generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return generate(*args, **kwargs)

    trainer.vllm_generation.generate = counted
    return outcome(trainer) | {"calls": len(calls)}


if __name__ == "__main__":
    main(globals())
