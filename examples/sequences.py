"""Sums of the gap per sequence, for intervals: tokens of one response depend on each other, but whole responses do not.

`SequenceSums(trainer)` listens to what the trainer measures in evaluation. For each response it keeps the number of tokens, the
sums of |Δlogp| and of k3, and the number of tokens off by more than a factor of 2, with replay and (`native/`) without.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.bootstrap import Interval, bootstrap_quotient, bootstrap_ratio
from mismatch_ext import kl_estimate

FILE = "sequences.json"
MEASURES = {"abs": "mean|Δlogp|", "k3": "k3"}
Sums = dict[str, dict[str, list[float]]]
"""Split, name, one value per response."""


class SequenceSums:
    """Keeps the sums of every response that is evaluated.

    Args:
        trainer: A `MismatchGRPOTrainer`.
    """

    def __init__(self, trainer: Any) -> None:
        self.sums: Sums = {}
        self._observe: Callable[..., None] = trainer.mm.log.sums.add_gap
        trainer.mm.log.sums.add_gap = self._observed

    def _observed(self, split: str, *, old: Tensor, rollout: Tensor, mask: Tensor, native: bool = False) -> None:
        self._observe(split, old=old, rollout=rollout, mask=mask, native=native)
        if split == "train":
            return
        gap = torch.where(mask.bool(), old.double() - rollout.double(), 0.0)
        per_token = {
            "abs": gap.abs(),
            "k3": kl_estimate(logprobs=-gap, ref_logprobs=torch.zeros_like(gap), estimator="k3"),
            "f2": (gap.abs() > math.log(2)).double(),
        }
        kept = self.sums.setdefault(split, {})
        for name, values in per_token.items():
            kept.setdefault(f"native/{name}" if native else name, []).extend(values.sum(1).tolist())
        if not native:
            kept.setdefault("tokens", []).extend(mask.double().sum(1).tolist())

    def write(self, folder: Path) -> None:
        """Write what was kept to `sequences.json` in a folder."""
        (folder / FILE).write_text(json.dumps(self.sums), encoding="utf-8")


def read_sequences(folder: Path) -> Sums:
    """Read the sums that a run wrote."""
    return json.loads((folder / FILE).read_text(encoding="utf-8"))


def times_larger(first: Sums, second: Sums, split: str, measure: str) -> Interval:
    """Return how many times larger a mean per token is in the first run than in the second."""
    samples = [(run[split][measure], run[split]["tokens"]) for run in (first, second)]
    return bootstrap_quotient(samples[0], samples[1])


def left_by_replay(run: Sums, split: str, measure: str) -> Interval:
    """Return a mean with replay over the mean without it, on the same tokens: below 1, replay helps."""
    return bootstrap_ratio(run[split][measure], run[split][f"native/{measure}"])
