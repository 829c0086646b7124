"""One run in a process of a pool, which keeps the models that its runs start from."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.stability import experts, train
from benchmarks.stability.arms import ARMS, EXPERTS

Job = tuple[str, int, Path, bool]
"""Name of the arm, seed, file, and whether it is the same code with little of everything."""


def run_one(job: Job) -> None:
    """Train one run and write it."""
    torch.set_num_threads(1)
    name, seed, out, quick = job
    steps = {"steps": 2} if quick else {}
    if name in ARMS:
        curves = train.train(ARMS[name], _base(ARMS[name].vocabulary, quick), seed=seed, **steps)
    else:
        curves = experts.train(EXPERTS[name], _base(0, quick), seed=seed, **steps)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps({"arm": name, "seed": seed, "curves": curves}), encoding="utf-8")
    partial.rename(out)


@cache
def _base(vocabulary: int, quick: bool) -> Any:
    """Return what runs start from: of a vocabulary, or of experts where that is 0."""
    return train.base(vocabulary, quick=quick) if vocabulary else experts.base(quick=quick)
