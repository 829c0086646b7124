"""One run, in a process of a pool."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import be_quiet
from benchmarks.stability import experts, train
from benchmarks.stability.arms import ARMS, EXPERTS, REAL


def run_one(name: str, seed: int, out: Path, quick: bool) -> None:
    """Train one run and write its curves to `out`; what it prints is kept beside them."""
    torch.set_num_threads(1)
    steps = {"steps": 2} if quick else {}
    if name in ARMS:
        curves = train.train(ARMS[name], base(ARMS[name].vocabulary, quick), seed=seed, **steps)
    elif name in EXPERTS:
        curves = experts.train(EXPERTS[name], base(0, quick), seed=seed, **steps)
    else:
        folder = out.with_suffix("")
        folder.mkdir(exist_ok=True)
        be_quiet(folder)
        from benchmarks.stability import real  # not before it is needed: it imports vLLM

        curves = real.train(REAL[name], seed, folder, **steps)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps({"arm": name, "seed": seed, "curves": curves}), encoding="utf-8")
    partial.rename(out)


@cache
def base(vocabulary: int, quick: bool) -> Any:
    """Return what the miniature's runs start from: of a vocabulary, or of experts where that is 0."""
    return train.base(vocabulary, quick=quick) if vocabulary else experts.base(quick=quick)
