"""Adds up what is measured between two logs of a run, by split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.correction import masked_sums
from mismatch_ext.drift import drift_sums
from mismatch_ext.gap import gap_sums
from mismatch_ext.prefix_cache import cache_sums, no_cache_sums
from mismatch_ext.ranks import Ranks
from mismatch_ext.rollout import RolloutRecord
from mismatch_ext.sums import Sums, merged, prefixed

SCATTER_SAMPLES = 500
"""Tokens kept per profile record for the rollout-vs-trainer scatter."""
PROCESSES = 32
"""Number of low bits of a seed that tell processes apart."""


class Accumulator:
    """The sums of each split since it was last taken. Each rank has one.

    A part of the sums has the name of what was measured: "gap", "native" (the gap with the trainer's own routes), "masked",
    "cache", "bad_rows" and, where versions are followed, "drift".

    Attributes:
        created: How many samples were drawn; every one needs a seed of its own.
        follows_versions: Whether drift is separated from numerics in the train split; on all ranks or on none.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.created = 0
        self.follows_versions = False
        self._ranks = ranks
        self._sums: dict[str, dict[str, Sums]] = {}

    def add(self, split: str, name: str, sums: Sums) -> None:
        """Add a part of the sums of a split."""
        parts = self._sums.setdefault(split, {})
        parts[name] = merged(parts[name], sums) if name in parts else sums

    def add_gap(self, split: str, *, old: Tensor, rollout: Tensor, mask: Tensor, native: bool = False) -> None:
        """Add a batch of `[B, T]` log-probabilities; with `native`, of the trainer's own routing."""
        self.created += 1
        # Each rank and batch needs its own seed, because otherwise all of them would sample the same places.
        seed = self.created * self._ranks.size + self._ranks.rank
        sums = gap_sums(old=old, rollout=rollout, mask=mask, sample=SCATTER_SAMPLES, seed=seed)
        self.add(split, "native" if native else "gap", sums)

    def add_cached(
        self, split: str, *, old: Tensor, rollout: Tensor, mask: Tensor, records: Sequence[RolloutRecord | None]
    ) -> None:
        """Add the gap of a batch apart for prompts from the engine's prefix cache; arguments as for `cache_sums`."""
        self.add(split, "cache", cache_sums(old=old, rollout=rollout, mask=mask, records=records))

    def draw(self) -> dict[str, int]:
        """Return the arguments `sample` and `seed` of `gap_sums` in other processes; each adds its number to the seed."""
        self.created += 1
        return {"sample": SCATTER_SAMPLES, "seed": self.created << PROCESSES}

    def has_observed(self, split: str) -> bool:
        """Return whether this rank has added anything of a split since it was last taken."""
        return bool({"gap", "native", "masked", "bad_rows"} & self._sums.get(split, {}).keys())

    def take(self, split: str) -> Sums:
        """Return the sums of a split, with the same names on all ranks, and begin at nothing."""
        parts = self._nothing(split) | self._sums.pop(split, {})
        whole: Sums = {}
        for name, sums in parts.items():
            whole |= prefixed(name, sums)
        return whole

    def _nothing(self, split: str) -> dict[str, Sums]:
        """Return what a rank sends that has added nothing."""
        empty = torch.zeros(0, 0)
        no_gap = gap_sums(old=empty, rollout=empty, mask=empty, sample=SCATTER_SAMPLES)
        parts = {
            "gap": no_gap,
            "native": no_gap,
            "masked": masked_sums(empty, empty),
            "cache": no_cache_sums(),
            "bad_rows": BadRows(0).sums(),
        }
        if split == "train" and self.follows_versions:
            parts["drift"] = drift_sums(old=empty, rollout=empty, mask=empty, versions=empty.long(), scoring=0)
        return parts
