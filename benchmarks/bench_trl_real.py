"""A training step of the real TRL with vLLM on SmolLM2, with every section on, against stock TRL's, step by step in turn.

As `trl_step`, with a real vocabulary of 49,152 tokens and a head that is tied to the embeddings. The mixture has the model's
first four layers and four experts in each, so that there are routes to replay. All 30 layers are measured dense, with fewer
tokens. See `examples.smollm2` for what these models are.
"""

from __future__ import annotations

from typing import Any

from benchmarks.bench_trl_step import Size, compared

MIXTURE = Size(steps=14, rows=64, tokens=64)
DENSE = Size(steps=14, rows=32, tokens=32)


def run() -> list[dict[str, Any]]:
    """Return a row of the mixture, and one of the dense model."""
    from examples.smollm2 import unpack, upcycle

    mixture, dense = upcycle(experts=4, layers=4), unpack()
    return [
        compared(MIXTURE, str(mixture), title="four layers of SmolLM2 with four experts, "),
        compared(DENSE, str(dense), ("routing",), title="SmolLM2, "),
    ]
