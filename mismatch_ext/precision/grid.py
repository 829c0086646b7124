"""How much of an optimizer step reaches an engine that holds its weights in a coarser dtype than the trainer computes in.

A step changes a weight in the engine only if the weight rounds to another value of the engine's dtype. With a float32 trainer, a
bfloat16 engine and a small learning rate most weights do not: the trainer learns, and the engine samples from older weights.
Under autocast to the engine's dtype both sides round alike, and nothing is lost between them.

    sums = grid_sums(before, after, "float32", "bfloat16")    # elements before and after a step
    grid_metrics(sums)                                        # {"engine_moved_frac": 0.02}
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mismatch_ext.alarms import FEW_MOVED
from mismatch_ext.precision.audit import EngineReading, TrainerReading
from mismatch_ext.precision.dtypes import is_finer, torch_dtype
from mismatch_ext.ranks import Ranks
from mismatch_ext.sums import Sums, merged, over_ranks
from mismatch_ext.weights import NamedTensors

METRIC = "engine_moved_frac"
EVENT = "coarse_engine"
"""Name of the event that warns of a small share at the start of a run."""
ELEMENTS = 1 << 16
FIRST = 3
"""Steps after which a small share is warned of."""
NOTHING: Sums = {name: torch.zeros((), dtype=torch.float64) for name in ("changed", "moved")}


def sampled(parameters: NamedTensors) -> Tensor:
    """Return a copy of about 65,536 trainable elements `[n]` of this rank, at a regular stride, widened to one dtype.

    Adapters of LoRA are left out: an engine gets them merged into the base, on whose grid their own elements are not.
    """
    flat = [
        (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().reshape(-1)
        for name, tensor in parameters
        if tensor.requires_grad and tensor.is_floating_point() and "lora_" not in name
    ]
    # The stride is odd, so that it visits all columns of a matrix whose width is a power of two.
    stride = (sum(tensor.numel() for tensor in flat) // ELEMENTS) | 1
    parts = [tensor[::stride] for tensor in flat]
    return torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.zeros(0)


def grid_sums(before: Tensor, after: Tensor, trainer_dtype: str, engine_dtype: str) -> Sums:
    """Count the elements `[n]` that a step changed for the trainer, as "changed", and of them those in the engine, as "moved"."""
    changed, moved = (
        before.to(dtype) != after.to(dtype) for dtype in (torch_dtype(trainer_dtype), torch_dtype(engine_dtype))
    )
    counts = torch.stack([changed.sum(), (changed & moved).sum()]).double().cpu()
    return {"changed": counts[0], "moved": counts[1]}


def grid_metrics(sums: Sums) -> dict[str, float]:
    """Return the share of the changed elements that moved in the engine, as `engine_moved_frac`; nothing if none changed."""
    changed = float(sums["changed"])
    return {METRIC: float(sums["moved"]) / changed} if changed else {}


class GridWatch:
    """Counts over a run's steps what reaches the engine, and warns once at the start if it is little.

    Steps at a rate that is still rising are left out, because a small rate of a warm-up says nothing of the run's.
    """

    def __init__(self, trainer_dtype: str, engine_dtype: str) -> None:
        self._dtypes = (trainer_dtype, engine_dtype)
        self._before = torch.zeros(0)
        self._rate, self._steps = math.inf, 0
        self._sums = self._first = NOTHING

    @classmethod
    def of(cls, trainer: TrainerReading, engine: EngineReading) -> GridWatch | None:
        """Return what watches two sides as they were read back; None if the engine's dtype is as fine as the trainer's."""
        dtypes = (trainer.compute_dtype, engine.model_dtype)
        return cls(*dtypes) if is_finer(*dtypes) else None

    def before(self, parameters: NamedTensors) -> None:
        """Keep a sample of the parameters, just before the optimizer steps."""
        self._before = sampled(parameters)

    def after(self, parameters: NamedTensors, rate: float) -> str | None:
        """Count what a step of this learning rate has changed, and return the warning if it is due."""
        rising, self._rate = rate > self._rate, rate
        sums = grid_sums(self._before, sampled(parameters), *self._dtypes)
        if rising or not sums["changed"]:
            return None
        self._sums, self._steps = merged(self._sums, sums), self._steps + 1
        if self._steps > FIRST:
            return None
        self._first = merged(self._first, sums)
        share = grid_metrics(self._first)[METRIC]
        if self._steps < FIRST or share >= FEW_MOVED:
            return None
        trainer, engine = self._dtypes
        return (
            f"the trainer computes in {trainer} and the engine holds weights in {engine}: of the elements that a step at rate "
            f"{rate:.3g} changes, {share:.2%} change in the engine. It samples from older weights than the trainer learns, and "
            f"the gap grows. Give both sides one dtype (mismatch: {{precision: {{dtype: {engine}}}}}, or autocast to {engine}), "
            "or train at a higher rate."
        )

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return the share over all ranks and the steps since the last call; every rank must call it."""
        sums, self._sums = self._sums, NOTHING
        return grid_metrics(over_ranks(sums, ranks))
