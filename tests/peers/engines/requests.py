"""The requests that every rollout engine is asked for alike, in a run that does other things too."""

from __future__ import annotations

from typing import Any

import torch

COUNT, STOP = 24, [5, 6]


def rows() -> list[list[int]]:
    """Return prompts of many lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 16, (n,), generator=generator).tolist() for n in (1, 2, 5, 17, 40, 64, 65, 100)]


def requests() -> dict[str, Any]:
    """Return prompts and how to sample: greedily, at temperature 1.

    Both engines sample the same tokens, and report log-probabilities before the truncation.
    """
    return {
        "sampling": {"temperature": 1.0, "top_k": 1},
        "rows": rows(),
        "count": COUNT,
        "stop_token_ids": STOP,
    }
