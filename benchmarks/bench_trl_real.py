"""A training step of the real TRL with vLLM on SmolLM2, with every section on, against stock TRL's, step by step in turn.

As `trl_step`, with a real vocabulary of 49,152 tokens and a head that is tied to the embeddings. The model has SmolLM2's first
four layers and four experts in each, so that there are routes to replay; see `examples.smollm2`.
"""

from __future__ import annotations

from typing import Any

from benchmarks.bench_trl_step import Size, compared

SIZE = Size(steps=8, rows=32, tokens=64)


def run() -> list[dict[str, Any]]:
    """Return the row of this model."""
    from examples.smollm2 import upcycle

    model = str(upcycle(experts=4, layers=4))
    return [compared(SIZE, model, title="four layers of SmolLM2 with four experts, ")]
