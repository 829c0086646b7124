"""Completions of several turns on two ranks, of which one takes more turns; run as `scenarios_ranks` is."""

from __future__ import annotations

import os

from tests.peers.trl.scenarios_ranks import main, outcome, series
from tests.peers.trl.scenarios_turns import build


def unequal(out: str) -> None:
    """Train with tools, whose calls end after one turn on the main process and after two on the other."""
    block = {"precision": {"dtype": "float32"}, "correction": {"preset": "decoupled_token_is"}}
    trainer = build(f"{out}/{os.environ['RANK']}", block, max_steps=2, bf16=None, top_k=0)
    trainer.max_tool_calling_iterations = 1 + trainer.accelerator.process_index
    found = outcome(trainer)
    # Completions of two turns on one rank and of three on the other.
    assert series(found, "mismatch/turns") == [2.5, 2.5]
    assert max(series(found, "mismatch/logp_abs_diff_mean")) < 1e-5


if __name__ == "__main__":
    main(globals())
